"""Predicted timelines of schedules as traces for Perfetto (ui.perfetto.dev) and chrome://tracing.
Imports no jax.

The format is Chrome's Trace Event Format, JSON object form: complete events ("X") with times in
microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.cost import Timeline
from mesh_lm.schedules.schedule import WORDS

_COLOURS = {"F": "thread_state_running", "B": "thread_state_iowait", "W": "thread_state_runnable"}
"""Names of colours in chrome://tracing; Perfetto colours events by their name."""


def chrome_trace(timelines: Sequence[Timeline], seconds: float = 1.0) -> dict[str, Any]:
    """The trace of several timelines: a process for each, a thread for each stage. seconds: length
    of one unit of time.
    """
    events = [
        event
        for number, timeline in enumerate(timelines)
        for event in _events(timeline, number, 1e6 * seconds)
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(timelines: Sequence[Timeline], file: str, seconds: float = 1.0) -> None:
    """Writes `chrome_trace` to a file. Raises ConfigError if it cannot be written."""
    try:
        Path(file).expanduser().write_text(
            json.dumps(chrome_trace(timelines, seconds)), encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(f"{file}: cannot write: {error.strerror}") from error


def _events(timeline: Timeline, process: int, scale: float) -> Iterator[dict[str, Any]]:
    schedule = timeline.schedule
    name = (
        f"{schedule.name}, {schedule.microbatches} microbatches, {schedule.chunks} chunks, "
        f"{timeline.clock}"
    )
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for stage in range(schedule.stages):
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": process,
            "tid": stage,
            "args": {"name": f"stage {stage}"},
        }
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": process,
            "tid": stage,
            "args": {"sort_index": stage},
        }
    for op, (start, end) in sorted(timeline.spans.items(), key=lambda item: item[1]):
        yield {
            "ph": "X", "pid": process, "tid": op.virtual % schedule.stages, "ts": start * scale,
            "dur": (end - start) * scale,
            "name": f"{op.kind}{op.microbatch}" + (f" chunk {op.virtual // schedule.stages}" if schedule.chunks > 1 else ""),
            "cat": WORDS[op.kind], "cname": _COLOURS[op.kind],
            "args": {"microbatch": op.microbatch, "virtual stage": op.virtual, "tick": schedule.ticks[op]},
        }  # fmt: skip
