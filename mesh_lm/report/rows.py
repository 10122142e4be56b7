"""The rows of metrics.jsonl, which are verified: beside it, metrics.sha256 has the digest and the
step of each row that was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mesh_lm import strict_json

METRICS = "metrics.jsonl"
DIGESTS = "metrics.sha256"


def encoded(step: int, values: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the line of a row, and that of its digest."""
    line = json.dumps({"step": step, **values}, allow_nan=False)
    return f"{line}\n", f"{_digest(line)} {step}\n"


def read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns the intact rows of a metrics.jsonl, and how many are damaged or missing. Raises
    OSError.

    Without digests, as in the output of an older version, every row that is JSON with a step counts
    as intact.
    """
    intact, n_damaged = _verified(path, last_step=math.inf)
    return list(intact.values()), n_damaged


def keep_up_to(path: Path, step: int) -> int:
    """Drops rows after a step, and damaged ones. Returns how many up to the step are damaged or
    missing. Raises OSError.
    """
    if step:
        intact, n_damaged = _verified(path, step)
    else:
        intact, n_damaged = {}, 0
    rows = {line: row for line, row in intact.items() if row["step"] <= step}
    digests = [f"{_digest(line)} {row['step']:g}" for line, row in rows.items()]
    _replace(path, list(rows))
    # The digests come last: that file may have more than the rows.
    _replace(path.with_name(DIGESTS), digests)
    return n_damaged


def _verified(path: Path, last_step: float) -> tuple[dict[str, dict[str, Any]], int]:
    """Returns the intact rows by their lines, and how many up to a step are damaged or missing."""
    steps = _written_steps(path.with_name(DIGESTS))
    intact = {}
    n_damaged = 0
    for line in _lines(path):
        row = None
        if steps is None or _digest(line) in steps:
            with contextlib.suppress(ValueError):
                row = strict_json.loads(line)
        if row is not None and isinstance(row.get("step"), int | float):
            intact[line] = row
        else:
            n_damaged += 1
    if steps is None:
        return intact, n_damaged
    intact_digests = {_digest(line) for line in intact}
    n_missing = 0
    for digest, step in steps.items():
        if step <= last_step and digest not in intact_digests:
            n_missing += 1
    # A damaged row is missing as well, and counts once.
    return intact, n_missing or n_damaged


def _written_steps(path: Path) -> dict[str, float] | None:
    """Returns the step of each row that was written, by its digest; None if there is no such
    file.
    """
    steps = {}
    try:
        for line in path.read_text(errors="replace", encoding="utf-8").splitlines():
            digest, _, step = line.partition(" ")
            steps[digest] = float(step) if step.isdecimal() else 0.0
    except FileNotFoundError:
        return None
    return steps


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
    """Writes a file atomically."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
