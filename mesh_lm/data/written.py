"""Recognizes what mesh_lm itself has written below a directory of text: none of that is text to train on."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from mesh_lm import strict_json

RUN = "TrainConfig"
"""The class that a run's config.json names; the config.json of a Hugging Face model has none."""
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
    """Returns the files that this process writes its output to, as after `mesh-lm train ... > log`."""
    found = set()
    for descriptor in (1, 2):
        try:
            stat = os.fstat(descriptor)
        except OSError:  # closed, as a daemon's
            continue
        found.add((stat.st_dev, stat.st_ino))
    return found


def is_output(folder: Path, names: Collection[str]) -> bool:
    """Returns whether a directory with these files is a run's output, a corpus of `data.cache`, or an unfinished preparation."""
    if folder.name.endswith(".parts") and "plan.json" in names:
        return True
    if "config.json" in names and _object(folder / "config.json").get("class") == RUN:
        return True
    return "corpus.json" in names and "train_tokens" in _object(folder / "corpus.json")


def prepared(folder: Path, names: Collection[str]) -> set[str]:
    """Returns the names that a directory may have beside each finished .idx in it: `mesh-lm prepare` wrote them."""
    prefixes = {name.removesuffix(".idx") for name in names if name.endswith(".idx") and _is_index(folder / name)}
    return {f"{prefix}.{suffix}" for prefix in prefixes for suffix in _PREPARED}


def is_of_prefix(prefix: str, path: Path) -> bool:
    """Returns whether a file is what `mesh-lm prepare --output=prefix` writes, be it finished or not."""
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
