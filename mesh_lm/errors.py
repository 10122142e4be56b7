"""The errors that end a program with a message, and what such messages have in common.

They are in a module of their own, so that worker processes can raise them without importing JAX.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence
from pathlib import Path

_MAX_LINES = 8
"""Lines of a list that are printed."""
_MAX_RANGES = 8
"""Ranges of numbers that are printed."""
_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE}
_FILES = {".txt", ".json", ".jsonl", ".gz", ".zst", ".parquet", ".model", ".tiktoken", ".py"}
_FOLDERS = {"runs", "data", "configs", "checkpoints"}
"""Beginnings of paths rather than of names on the Hub."""


class ConfigError(ValueError):
    """A mistake of the user.

    Its text is the whole message; the program prints it and exits with status 1.
    """


class ReplacedError(ConfigError):
    """Another run has taken this run's output over while this one was suspended.

    It must write nothing more. The program exits with status 77.
    """


class StorageError(ConfigError):
    """A disk does not work at the moment, on this or another host.

    Another attempt may succeed: the program exits with status 75.
    """


def storage_failed(error: BaseException | None) -> bool:
    """Returns whether an error is due to a full or failing disk, or a lost mount: itself, or one
    that it was raised from or during.
    """
    visited: set[int] = set()  # a chain of errors may be a circle
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        if isinstance(error, StorageError):
            return True
        if isinstance(error, OSError) and error.errno in _STORAGE:
            return True
        error = error.__cause__ or error.__context__
    return False


def listed(head: str, lines: Sequence[str]) -> str:
    """Returns `head`, the first few of `lines` as a list, and how many more there are."""
    items = [head, *lines[:_MAX_LINES]]
    if len(lines) > _MAX_LINES:
        items.append(f"and {len(lines) - _MAX_LINES} more")
    return "\n  - ".join(items)


def number_ranges(numbers: list[int], singular: str = "process", plural: str = "processes") -> str:
    """Returns the numbers as ranges: "process 3", "processes 0-6, 8"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    texts = [str(low) if low == high else f"{low}-{high}" for low, high in ranges[:_MAX_RANGES]]
    noun = plural if len(numbers) > 1 else singular
    return f"{noun} {', '.join(texts)}{' and more' if len(ranges) > _MAX_RANGES else ''}"


def hub_hint(name: str, kind: str = "") -> str:
    """Returns the end of a message that says how to download a repository of this name from the
    Hugging Face Hub; empty if `name` is a path.

    kind: "dataset"; empty: a model.
    """
    repository = re.fullmatch(r"(?:hf://)?(?:datasets/|models/)?([\w.-]*\w(?:/[\w.-]+)?)", name)
    if not repository or Path(name).suffix in _FILES or Path(name).parts[0] in _FOLDERS:
        return ""
    option = f" --repo-type={kind}" if kind else ""
    return (
        f". For a name on the Hugging Face Hub: hf download{option} {repository[1]} "
        f"--local-dir={repository[1]}"
    )


def did_you_mean(near: list[str]) -> str:
    """Returns the end of a message that suggests names; empty without any."""
    return f"; did you mean {' or '.join(near)}?" if near else ""
