"""The rows of metrics.jsonl, which are verified: beside it, metrics.sha256 has the digest and the
step of each row that was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mesh_lm import strict_json

METRICS, DIGESTS = "metrics.jsonl", "metrics.sha256"


def encoded(step: int, numbers: Mapping[str, float | None]) -> tuple[str, str]:
    """Returns the line of a row, and that of its digest."""
    line = json.dumps({"step": step, **numbers}, allow_nan=False)
    return f"{line}\n", f"{_digest(line)} {step}\n"


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the intact rows of a metrics.jsonl, and how many are damaged or missing. Raises
    OSError.

    Without digests, as in the output of an older version, every row that is JSON with a step counts
    as intact.
    """
    intact, damaged = _checked(path)
    return list(intact.values()), damaged


def keep_up_to(path: Path, step: int) -> int:
    """Drops rows after a step, and damaged ones. Returns how many up to the step are damaged or
    missing. Raises OSError.
    """
    intact, damaged = _checked(path, step) if step else ({}, 0)
    lines = [line for line, row in intact.items() if row["step"] <= step]
    _replace(path, lines)
    # last: it may have more
    _replace(
        path.with_name(DIGESTS), [f"{_digest(line)} {intact[line]['step']:g}" for line in lines]
    )
    return damaged


def _checked(path: Path, last: float = float("inf")) -> tuple[dict[str, dict[str, Any]], int]:
    """Returns the intact rows by their lines, and how many up to a step are damaged or missing."""
    written = _digests(path.with_name(DIGESTS))
    intact, strange = {}, 0
    for line in _lines(path):
        row = None
        if written is None or _digest(line) in written:
            with contextlib.suppress(ValueError):
                row = strict_json.loads(line)
        if row is not None and isinstance(row.get("step"), int | float):
            intact[line] = row
        else:
            strange += 1
    found = {_digest(line) for line in intact}
    missing = sum(step <= last for digest, step in (written or {}).items() if digest not in found)
    return intact, missing or strange


def _digests(path: Path) -> dict[str, float] | None:
    """Returns the step of each row that was written, by its digest; None if there is no such
    file.
    """
    written = {}
    try:
        for line in path.read_text(errors="replace", encoding="utf-8").splitlines():
            digest, _, step = line.partition(" ")
            written[digest] = float(step) if step.isdecimal() else 0.0
    except FileNotFoundError:
        return None
    return written


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines, but not a last one that a kill or a full disk has truncated."""
    with contextlib.suppress(FileNotFoundError):
        *complete, last = path.read_text(errors="replace", encoding="utf-8").split("\n")
        yield from filter(str.strip, complete)
        if last.endswith("}"):
            yield last


def _digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:16]


def _replace(path: Path, lines: list[str]) -> None:
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
