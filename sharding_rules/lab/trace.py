"""The predicted timeline as a file for Perfetto (ui.perfetto.dev) and chrome://tracing: Chrome's
trace event format.
"""

from __future__ import annotations

import json
import math

from sharding_rules.lab.report import LabError, Report, location_text
from sharding_rules.lab.summary import PREDICTED

_ROWS = {"compute": 1, "network": 2}


def chrome_trace(report: Report) -> str:
    """JSON with an event for each span of the timeline, in microseconds: one trip of each loop,
    with its trip counts as arguments.

    Raises LabError for a report without a timeline.
    """
    if report.timeline is None:
        raise LabError(f"{report.name} has no timeline: its devices are not a known target")
    exposed = {one.name: one.exposed for one in report.collectives}
    events: list[dict[str, object]] = [
        {
            "ph": "M",
            "pid": 1,
            "name": "process_name",
            "args": {"name": f"{report.name}, {PREDICTED}"},
        }
    ]
    events += [
        {"ph": "M", "pid": 1, "tid": n, "name": "thread_name", "args": {"name": row}}
        for row, n in _ROWS.items()
    ]
    for span in report.timeline.spans:
        about: dict[str, object] = {"instruction": span.name, "where": location_text(span.where)}
        about |= {"times in a step": math.prod(span.loops), "loops": list(span.loops)}
        if span.stream == "network":
            about["exposed in a step, µs"] = round(exposed.get(span.name, 0.0), 3)
        name = f"{span.where.part.split('/')[-1]} {span.kind}".strip()
        event = {
            "ph": "X",
            "pid": 1,
            "tid": _ROWS[span.stream],
            "name": name,
            "cat": span.where.phase or "no phase",
        }
        events.append({**event, "ts": span.start, "dur": span.duration, "args": about})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ns"})
