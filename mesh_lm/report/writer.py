"""Metrics on disk: TensorBoard events for people, metrics.jsonl for programs."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tensorboardX import SummaryWriter


class Sink(Protocol):
    """Somewhere else that metrics go."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class Writer:
    """Appends metrics to <directory>/metrics.jsonl, one {"step": 10, "loss": 3.2, ...} a line, and to <directory>/tensorboard.

    A run that continues from `start_step` (0: a new run) takes back what a killed run had written past it, so that no step is there
    twice: metrics.jsonl is rewritten atomically, TensorBoard is told to purge. Does nothing where `directory` is None, as on every
    process but the first. `also` gets the same numbers. Raises OSError where it cannot write.
    """

    def __init__(self, directory: str | Path | None, start_step: int = 0, also: Sink | None = None) -> None:
        self._lines, self._events, self._also = None, None, also
        if directory is None:
            return
        path = Path(directory) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        _truncate(path, start_step)
        self._lines = path.open("a")
        self._events = SummaryWriter(str(path.parent / "tensorboard"), purge_step=start_step and start_step + 1, flush_secs=10)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records numbers (float, or anything float() takes). In metrics.jsonl, which stays strict JSON, nan and inf become null."""
        if self._lines is None or self._events is None:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._lines.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self._lines.flush()  # a killed run keeps what it measured
        for name, value in numbers.items():
            self._events.add_scalar(name, value, step)
        if self._also:
            self._also.write(step, numbers)

    def close(self) -> None:
        if self._lines is not None and self._events is not None:
            self._lines.close()
            self._events.close()
        if self._also:
            self._also.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()


def _truncate(path: Path, start_step: int) -> None:
    """Drops lines past `start_step`, and a line that the kill cut short."""
    if not path.exists():
        return
    part = path.with_suffix(".jsonl.part")
    with path.open() as old, part.open("w") as new:
        new.writelines(line.rstrip("\n") + "\n" for line in old if start_step and _step(line) <= start_step)
        new.flush()
        os.fsync(new.fileno())
    part.replace(path)


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf
