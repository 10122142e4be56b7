"""The predicted timeline as a file for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is Chrome's trace event format.
"""

from __future__ import annotations

import json
import math

from sharding_rules.lab.report import LabError, Report, location_text
from sharding_rules.lab.summary import PREDICTED

_PROCESS = 1
_THREADS = {"compute": 1, "network": 2, "host": 3}


def chrome_trace(report: Report) -> str:
    """Returns JSON with an event for each span of the timeline, in microseconds.

    It has one trip of each loop, with its trip counts as arguments. Raises LabError for a report
    without a timeline.
    """
    if report.timeline is None:
        raise LabError(f"{report.name} has no timeline: its devices are not a known target")

    # "M" are metadata: the names of process and threads.
    process = {"name": f"{report.name}, {PREDICTED}"}
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": process}
    ]
    for stream, thread in _THREADS.items():
        name = {"name": stream}
        events.append(
            {"ph": "M", "pid": _PROCESS, "tid": thread, "name": "thread_name", "args": name}
        )

    # "X" are complete events, with a duration.
    exposed = {collective.name: collective.exposed for collective in report.collectives}
    for span in report.timeline.spans:
        arguments: dict[str, object] = {
            "instruction": span.name,
            "where": location_text(span.where),
            "times in a step": math.prod(span.loops),
            "loops": list(span.loops),
        }
        if span.stream == "network":
            arguments["exposed in a step, µs"] = round(exposed.get(span.name, 0.0), 3)
        innermost_part = span.where.part.split("/")[-1]
        event = {
            "ph": "X",
            "pid": _PROCESS,
            "tid": _THREADS[span.stream],
            "name": f"{innermost_part} {span.kind}".strip(),
            "cat": span.where.phase or "no phase",
            "ts": span.start,
            "dur": span.duration,
            "args": arguments,
        }
        events.append(event)
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})
