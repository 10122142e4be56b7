"""Recognizes what mesh_lm itself has written below a directory of text: none of that is text to
train on.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from mesh_lm import checksums, strict_json

RUN = "TrainConfig"
"""The class that a run's config.json names; the config.json of a Hugging Face model has none."""
OF_A_RUN = ("checkpoints", "tokenizer", "log.txt", "metrics.jsonl")
"""Files and directories that a run's output may have before its config.json."""
SLURM_LOG = re.compile(r"slurm-\d+(_\d+)?\.(out|err)")
"""Files to which Slurm writes a job's output, in the directory that it was submitted from. `logs`
does not find them, because `srun` does not read the job's pipes."""
_CHECKPOINT = "_CHECKPOINT_METADATA"
"""A file that Orbax writes into each step's directory."""
_INDEX = b"MMIDIDX\x00\x00"
_PREPARED = ("bin", "idx", "digests", "json", "tokenizer", "parts")
"""Suffixes of the files that `mesh-lm prepare` writes for a prefix."""

Identity = tuple[int, int]
"""Device and inode: the same for a directory and for a link to it."""


def identity(path: Path | str) -> Identity:
    """Returns the identity of the file that a path leads to. Raises OSError."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def identities(paths: Collection[Path | str]) -> set[Identity]:
    """Returns the identities of the paths that exist."""
    return {identity(path) for path in paths if path and os.path.exists(path)}


def logs() -> set[Identity]:
    """Returns the files that this process writes its output to, as after `mesh-lm train > log`, or
    by way of `| tee log` or a launcher.
    """
    files: set[Identity] = set()
    pipes: set[str] = set()
    for descriptor in (1, 2):
        try:
            status = os.fstat(descriptor)
        except OSError:  # closed, as a daemon's
            continue
        if stat.S_ISFIFO(status.st_mode):
            pipes.add(f"pipe:[{status.st_ino}]")
        else:
            files.add((status.st_dev, status.st_ino))
    return files | _files_behind(pipes) if pipes else files


def is_output(folder: Path, folders: Collection[str], names: Collection[str]) -> bool:
    """Whether mesh_lm has written a directory.

    Such are a run's output, a checkpoint, the corpora and indices of `data.cache`, an unfinished
    preparation and an export. folders, names: of the directories and the files in it.
    """
    if "config.json" in names and _object(folder / "config.json").get("class") == RUN:
        return True
    # A run that is about to write its config.json, or was killed before.
    if ".lease" in names and "life" in _object(folder / ".lease"):
        return True
    # The output of `mesh-lm import`, or of a run whose config.json was removed.
    has_run_folders = {"checkpoints", "tokenizer"} <= {*folders}
    if has_run_folders and any((folder / "checkpoints").glob(f"[0-9]*/{_CHECKPOINT}")):
        return True
    if _CHECKPOINT in names or {"state.raw", "description.json"} <= {*names}:
        return True
    if folder.name.endswith(".parts") and "plan.json" in names:
        return True
    if "digests.json" in names and any(name.endswith(".npy") for name in names):
        return True
    has_weights = any(name.endswith(".safetensors") for name in names)
    if has_weights and {"config.json", checksums.NAME} <= {*names}:
        return True
    return "corpus.json" in names and "train_tokens" in _object(folder / "corpus.json")


def prepared(folder: Path, names: Collection[str]) -> set[str]:
    """Returns the names of all files that `mesh-lm prepare` may have written beside each finished
    .idx of a directory.
    """
    prepared_names: set[str] = set()
    for name in names:
        if name.endswith(".idx") and _is_index(folder / name):
            prefix = name.removesuffix(".idx")
            prepared_names.update(f"{prefix}.{suffix}" for suffix in _PREPARED)
    return prepared_names


def is_of_prefix(prefix: str, path: Path) -> bool:
    """Whether `mesh-lm prepare --output=prefix` writes a file, be it finished or not."""
    start = f"{os.path.abspath(prefix)}."
    name = os.path.abspath(path)
    return name.startswith(start) and name[len(start) :].split(os.sep)[0] in _PREPARED


def _object(path: Path) -> dict[str, object]:
    """Returns the JSON object in a file; {} for any other file, and for one that cannot be read."""
    try:
        return strict_json.read(path)
    except (OSError, ValueError):
        return {}


def _is_index(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_INDEX)) == _INDEX
    except OSError:
        return False


def _files_behind(pipes: set[str]) -> set[Identity]:
    """Returns the files that the readers of pipes write to, perhaps through further pipes.

    There are none on a system without Linux's /proc.
    """
    files: set[Identity] = set()
    visited: set[str] = set()
    processes = [_descriptors(process) for process in Path("/proc").glob("[0-9]*")]
    while pipes:
        visited |= pipes
        further: set[str] = set()
        for descriptors in processes:
            if not any(d.target in pipes and not _is_written(d.link) for d in descriptors):
                continue
            for descriptor in descriptors:
                if not _is_written(descriptor.link):
                    continue
                if descriptor.target.startswith("pipe:"):
                    further.add(descriptor.target)
                elif descriptor.target.startswith("/"):
                    with contextlib.suppress(OSError):  # it was closed meanwhile
                        files.add(identity(descriptor.link))
        pipes = further - visited
    return files


class _Descriptor(NamedTuple):
    """An open file of a process."""

    link: Path
    target: str
    """A path, or "pipe:[number]"."""


def _descriptors(process: Path) -> list[_Descriptor]:
    """Returns the open files of a process; none for one of another user."""
    descriptors: list[_Descriptor] = []
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # it was closed meanwhile
                descriptors.append(_Descriptor(link, os.readlink(link)))
    return descriptors


def _is_written(descriptor: Path) -> bool:
    """Whether a file is open for writing."""
    information = descriptor.parents[1] / "fdinfo" / descriptor.name
    try:
        lines = information.read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    for line in lines:
        if line.startswith("flags:"):
            flags = int(line.split()[1], 8)
            return flags & os.O_ACCMODE != os.O_RDONLY
    return False
