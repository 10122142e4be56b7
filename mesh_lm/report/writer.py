"""Metrics on disk: TensorBoard events, and metrics.jsonl for programs."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from mesh_lm import strict_json
from mesh_lm.report.groups import grouped

_FLUSH = 10.0
"""Seconds between two flushes of TensorBoard's file."""


class Sink(Protocol):
    """A further destination of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step."""
        ...

    def close(self) -> None:
        """Called once, after the last step."""
        ...


class Writer:
    """Appends metrics to <directory>/metrics.jsonl, one {"step": 10, "loss": 3.2, ...} per line, and to <directory>/tensorboard.

    A run that continues from `start_step` (0: a new run) removes later rows of a killed run, so that no step is there twice:
    metrics.jsonl is rewritten atomically, and TensorBoard gets a purge event. Does nothing if `directory` is None, as on every
    process but the first. `also` gets the same numbers. Raises OSError if it cannot write.
    """

    def __init__(self, directory: str | Path | None, start_step: int = 0, also: Sink | None = None) -> None:
        self._lines, self._events, self._also = None, None, also
        if directory is None:
            return
        path = Path(directory) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        _truncate(path, start_step)
        self._lines = path.open("a")
        self._events = Events(path.parent / "tensorboard")
        if start_step:
            self._events.purge(start_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Records numbers (float, or anything float() takes). In metrics.jsonl, which stays strict JSON, nan and inf become null."""
        if self._lines is None or self._events is None:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        self._lines.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        charts = grouped(numbers)
        if self._also:
            self._also.write(step, charts)
        self._events.write(step, charts)
        self._lines.flush()  # a killed run keeps what it measured

    def roll_back(self, step: int) -> None:
        """Removes the rows after this step."""
        if self._lines is None or self._events is None:
            return
        self._events.purge(step)
        path = Path(self._lines.name)
        try:
            self._lines.close()
            _truncate(path, step)
        finally:
            self._lines = path.open("a")

    def close(self) -> None:
        """Writes what is buffered, and closes the files and the further destination."""
        if self._lines is not None and self._events is not None:
            self._lines.close()
            self._events.close()
        if self._also:
            self._also.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self.close()


class Events:
    """TensorBoard's event file, written by the caller: the thread of its SummaryWriter dies of a full disk, and its caller then hangs."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file, self._flushed = EventsWriter(str(directory / "events")), 0.0

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Raises OSError if the disk is full; the rest is written later."""
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._file.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        if time.monotonic() > self._flushed + _FLUSH:
            self._flushed = time.monotonic()
            self._file.flush()

    def purge(self, step: int) -> None:
        """Makes TensorBoard drop what came after this step."""
        self._file.write_event(Event(wall_time=time.time(), step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Writes what is buffered and closes the file."""
        self._file.close()


def _truncate(path: Path, start_step: int) -> None:
    """Drops lines after `start_step`, and a line that a kill truncated."""
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
        return strict_json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf
