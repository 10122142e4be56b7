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
    """Returns the trace of several timelines: a process for each, a thread for each stage.

    seconds: the length of one unit of time.
    """
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(timelines):
        events += _events(timeline, process, 1e6 * seconds)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write(timelines: Sequence[Timeline], file: str, seconds: float = 1.0) -> None:
    """Writes `chrome_trace` to a file. Raises ConfigError if it cannot be written."""
    text = json.dumps(chrome_trace(timelines, seconds))
    try:
        Path(file).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot write the Chrome trace: {error.strerror}") from error


def _events(timeline: Timeline, process: int, scale: float) -> Iterator[dict[str, Any]]:
    schedule = timeline.schedule
    name = (
        f"{schedule.name}, {schedule.microbatches} microbatches, {schedule.chunks} chunks, "
        f"{timeline.clock}"
    )
    yield _metadata("process_name", process, 0, {"name": name})
    for stage in range(schedule.stages):
        yield _metadata("thread_name", process, stage, {"name": f"stage {stage}"})
        yield _metadata("thread_sort_index", process, stage, {"sort_index": stage})
    for op, (start, end) in sorted(timeline.spans.items(), key=lambda item: item[1]):
        chunk = f" chunk {op.virtual // schedule.stages}" if schedule.chunks > 1 else ""
        yield {
            "ph": "X",
            "pid": process,
            "tid": op.virtual % schedule.stages,
            "ts": start * scale,
            "dur": (end - start) * scale,
            "name": f"{op.kind}{op.microbatch}{chunk}",
            "cat": WORDS[op.kind],
            "cname": _COLOURS[op.kind],
            "args": {
                "microbatch": op.microbatch,
                "virtual stage": op.virtual,
                "tick": schedule.ticks[op],
            },
        }


def _metadata(name: str, process: int, thread: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}
