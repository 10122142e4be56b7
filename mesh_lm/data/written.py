"""Recognizes what mesh_lm itself has written below a directory of text: none of that is text to
train on.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from mesh_lm import checksums, strict_json

RUN = "TrainConfig"
"""The class that a run's config.json names; the config.json of a Hugging Face model has none."""
OF_A_RUN = ("checkpoints", "tokenizer", "log.txt", "metrics.jsonl")
"""What may be in a run's output before its config.json is."""
SLURM_LOG = re.compile(r"slurm-\d+(_\d+)?\.(out|err)")
"""Where Slurm writes what a job prints, in the directory that it was submitted in. `srun` is no
reader of the job's pipes."""
_CHECKPOINT = "_CHECKPOINT_METADATA"
"""A file that Orbax writes into each step's directory."""
_INDEX = b"MMIDIDX\x00\x00"
_PREPARED = ("bin", "idx", "digests", "json", "tokenizer", "parts")
"""Suffixes of what `mesh-lm prepare` writes for a prefix."""

Identity = tuple[int, int]
"""Device and inode: the same for a directory and for a link to it."""


def identity(path: Path | str) -> Identity:
    """Returns the identity of what a path leads to. Raises OSError."""
    stat = os.stat(path)
    return stat.st_dev, stat.st_ino


def identities(paths: Collection[Path | str]) -> set[Identity]:
    """Returns the identities of those paths that exist."""
    return {identity(path) for path in paths if path and os.path.exists(path)}


def logs() -> set[Identity]:
    """Returns the files that this process writes its output to, as after `mesh-lm train > log`, or
    by way of `| tee log` or a launcher.
    """
    found: set[Identity] = set()
    pipes: set[str] = set()
    for descriptor in (1, 2):
        try:
            about = os.fstat(descriptor)
        except OSError:  # closed, as a daemon's
            continue
        if stat.S_ISFIFO(about.st_mode):
            pipes.add(f"pipe:[{about.st_ino}]")
        else:
            found.add((about.st_dev, about.st_ino))
    return found | _files_behind(pipes) if pipes else found


def is_output(folder: Path, folders: Collection[str], names: Collection[str]) -> bool:
    """Returns whether a directory is one that mesh_lm has written. folders, names: of the
    directories and the files in it.

    Such are a run's output, a checkpoint, the corpora and indices of `data.cache`, an unfinished
    preparation and an export.
    """
    if "config.json" in names and _object(folder / "config.json").get("class") == RUN:
        return True
    if ".lease" in names and "life" in _object(folder / ".lease"):
        return True  # of a run that is about to write its config.json, or was killed before
    if {"checkpoints", "tokenizer"} <= {*folders} and any(
        (folder / "checkpoints").glob(f"[0-9]*/{_CHECKPOINT}")
    ):
        return True  # of `mesh-lm import`, or of a run whose config.json was removed
    if _CHECKPOINT in names or {"state.raw", "description.json"} <= {*names}:
        return True
    if folder.name.endswith(".parts") and "plan.json" in names:
        return True
    if "digests.json" in names and any(name.endswith(".npy") for name in names):
        return True
    if {"config.json", checksums.NAME} <= {*names} and any(
        name.endswith(".safetensors") for name in names
    ):
        return True
    return "corpus.json" in names and "train_tokens" in _object(folder / "corpus.json")


def prepared(folder: Path, names: Collection[str]) -> set[str]:
    """Returns the names that a directory may have beside each finished .idx in it: `mesh-lm
    prepare` wrote them.
    """
    prefixes = {
        name.removesuffix(".idx")
        for name in names
        if name.endswith(".idx") and _is_index(folder / name)
    }
    return {f"{prefix}.{suffix}" for prefix in prefixes for suffix in _PREPARED}


def is_of_prefix(prefix: str, path: Path) -> bool:
    """Returns whether a file is what `mesh-lm prepare --output=prefix` writes, be it finished or
    not.
    """
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
    """Returns the files that the readers of pipes write to, perhaps through further pipes; none on
    a system without Linux's /proc.
    """
    found: set[Identity] = set()
    known: set[str] = set()
    opened = [dict(_descriptors(process)) for process in Path("/proc").glob("[0-9]*")]
    while pipes:
        known |= pipes
        reached: set[str] = set()
        for descriptors in opened:
            if not any(
                target in pipes and not _is_written(path) for path, target in descriptors.items()
            ):
                continue
            for path, target in descriptors.items():
                if target.startswith("pipe:") and _is_written(path):
                    reached.add(target)
                elif target.startswith("/") and _is_written(path):
                    with contextlib.suppress(OSError):  # closed since
                        found.add(identity(path))
        pipes = reached - known
    return found


def _descriptors(process: Path) -> Iterator[tuple[Path, str]]:
    """Yields (link, what it leads to) of each file that a process has open; of a process of another
    user, none.
    """
    with contextlib.suppress(OSError):
        for path in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed since
                yield path, os.readlink(path)


def _is_written(descriptor: Path) -> bool:
    """Returns whether a file is open for writing."""
    try:
        lines = (
            (descriptor.parents[1] / "fdinfo" / descriptor.name)
            .read_text(encoding="utf-8")
            .splitlines()
        )
    except OSError:
        return False
    flags = next((line.split()[1] for line in lines if line.startswith("flags:")), "0")
    return int(flags, 8) & os.O_ACCMODE != os.O_RDONLY
