"""Metrics on disk: TensorBoard events, and metrics.jsonl for programs."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TextIO

import numpy as np

from mesh_lm.report import rows
from mesh_lm.report.groups import grouped


@contextmanager
def _without_torch() -> Iterator[None]:
    """A context in which torch cannot be imported, unless it is already."""
    if "torch" in sys.modules:
        yield
        return
    # An import of None raises ImportError.
    sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules["torch"]


# tensorboardX imports torch where it is installed, for conversions that nothing here uses: a
# quarter of the time of an import of mesh_lm.
with _without_torch():
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import (
        Event,  # pyright: ignore[reportAttributeAccessIssue]
        SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
    )
    from tensorboardX.proto.summary_pb2 import (
        Summary,  # pyright: ignore[reportAttributeAccessIssue]
    )

_FLUSH_SECONDS = 10.0
"""Interval between flushes of TensorBoard's file."""


class Sink(Protocol):
    """A further destination of metrics."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Takes the metrics of a step."""
        ...

    def close(self) -> None:
        """Called once, after the last step."""
        ...


class _Files(NamedTuple):
    rows: TextIO
    digests: TextIO


class Writer:
    """Appends metrics to <directory>/metrics.jsonl, one {"step": 10, "loss": 3.2, ...} per line,
    and to <directory>/tensorboard.

    metrics.sha256 has the rows' digests (`mesh_lm.report.rows`); `damaged` is the number of earlier
    rows that were damaged or missing.

    A run that continues from `start_step` (0: a new run) removes later rows of a killed run, so
    that no step occurs twice: metrics.jsonl is rewritten atomically, and TensorBoard gets a purge
    event. Does nothing if `directory` is None, as on every process but the first. `also` gets the
    same numbers. Raises OSError if it cannot write.
    """

    def __init__(
        self, directory: str | Path | None, start_step: int = 0, also: Sink | None = None
    ) -> None:
        self.damaged = 0
        self._also = also
        self._files: _Files | None = None
        self._events: Events | None = None
        if directory is None:
            return
        path = Path(directory) / rows.METRICS
        path.parent.mkdir(parents=True, exist_ok=True)
        self._truncate(path, start_step)
        self._events = Events(path.parent / "tensorboard")
        if start_step:
            self._events.purge(start_step)

    def write(self, step: int, metrics: Mapping[str, Any], arrays: Mapping[str, Any] = {}) -> None:
        """Records numbers (float, or anything float() takes). In metrics.jsonl, which stays strict
        JSON, nan and inf become null.

        arrays: are recorded in metrics.jsonl alone, as nested lists of three decimals.
        """
        if self._files is None or self._events is None:
            return
        numbers = {name: float(value) for name, value in metrics.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        lists = {name: _rounded(np.asarray(x, float).tolist()) for name, x in arrays.items()}
        row, digest = rows.encoded(step, {**finite, **lists})
        self._files.digests.write(digest)
        self._files.rows.write(row)
        charts = grouped(numbers)
        if self._also:
            self._also.write(step, charts)
        self._events.write(step, charts)
        # The digests come first: a row without its digest would be taken for a damaged one. Both
        # are flushed so that a killed run keeps what it measured.
        self._files.digests.flush()
        self._files.rows.flush()

    def roll_back(self, step: int) -> None:
        """Removes the rows after this step."""
        if self._files is None or self._events is None:
            return
        self._events.purge(step)
        try:
            self._files.digests.close()
            self._files.rows.close()
        finally:
            self._truncate(Path(self._files.rows.name), step)

    def close(self) -> None:
        """Writes buffered rows, and closes the files and the further destination."""
        if self._files is not None and self._events is not None:
            self._files.digests.close()
            self._files.rows.close()
            self._events.close()
        if self._also:
            self._also.close()

    def _truncate(self, path: Path, step: int) -> None:
        """Drops rows after a step, and opens the files, also if that fails."""
        try:
            self.damaged = rows.keep_up_to(path, step)
        finally:
            digests = path.with_name(rows.DIGESTS).open("a", encoding="utf-8")
            self._files = _Files(path.open("a", encoding="utf-8"), digests)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _rounded(values: Any) -> Any:
    """Returns nested lists of numbers with three decimals; None for what is not finite."""
    if isinstance(values, list):
        return [_rounded(value) for value in values]
    return round(values, 3) if math.isfinite(values) else None


class Events:
    """TensorBoard's event file, written by the caller: the thread of its SummaryWriter dies of a
    full disk, and its caller then hangs.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(directory / "events"))
        self._flushed_at = 0.0

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds the numbers of a step. Raises OSError if the disk is full; the remaining bytes are
        written later.
        """
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        self._file.write_event(event)
        if time.monotonic() > self._flushed_at + _FLUSH_SECONDS:
            self._flushed_at = time.monotonic()
            self._file.flush()

    def purge(self, step: int) -> None:
        """Makes TensorBoard drop all later steps."""
        start = SessionLog(status=SessionLog.START)
        self._file.write_event(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def close(self) -> None:
        """Writes buffered events and closes the file."""
        self._file.close()
