"""What each segment of a model costs: its layers' share of the step, of the traffic, of the state.

A trainer says which segments there are (`compile_report(segments=...)`), and runs each in a named
scope of that name.
"""

from __future__ import annotations

import dataclasses
import re

from sharding_rules.lab.report import SCALAR, Argument, Location, Report
from sharding_rules.lab.summary import Unit, duration, over, percent, wire_by_axes

REST = "rest"
"""The row of all that is in no segment: embedding, loss and optimizer, and what XLA has merged from
several segments."""


@dataclasses.dataclass(frozen=True)
class SegmentCost:
    """The layers of one segment, or the rest of the program, on one device in a step."""

    name: str
    """The segment's, or REST."""
    n_layers: int
    """Layers of the segment in the whole model; 0 for the rest."""
    compute: float
    """Predicted microseconds of the compute stream."""
    exposed: float
    """Predicted microseconds during which compute waits for a collective of the segment."""
    wire: dict[tuple[str, ...], float]
    """Bytes that a device sends, by mesh axes."""
    params: int
    """Bytes of the parameters that a device stores."""
    state: int
    """The same with the optimizer's state, where some trainers keep the only full copy of the
    parameters."""

    @property
    def time(self) -> float:
        """Predicted microseconds of the step."""
        return self.compute + self.exposed


def segment_of(report: Report, location: Location) -> str:
    """Returns the segment of layers that a place is in.

    Empty outside of segments, and where XLA has merged several of them.
    """
    return next((word for word in location.part.split("/") if word in report.segments), "")


def segment_of_argument(report: Report, argument: Argument) -> str:
    """Returns the segment that holds a parameter; empty for a parameter outside of segments.

    A word of the parameter's own name says it: first.mlp.up.weight.
    """
    for keys in re.findall(r"\['([^']*)'\]|\.(\w+)$", argument.name):
        for key in keys:
            for word in re.split(r"[./]", key):
                if word in report.segments:
                    return word
    return ""


def by_segment(report: Report) -> tuple[SegmentCost, ...]:
    """Returns what each segment costs, in model order, and then the rest.

    Each column sums to the step's. Empty for fewer than two segments. Without a timeline all times
    are 0. In a pipeline they are those of the slowest stage in each tick, like the step's.
    """
    if len(report.segments) < 2:
        return ()
    names = (*report.segments, "")  # "" is the rest
    compute = dict.fromkeys(names, 0.0)
    exposed = dict.fromkeys(names, 0.0)
    params = dict.fromkeys(names, 0)
    moments = dict.fromkeys(names, 0)
    wire: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in names}
    for one in report.collectives:
        name = segment_of(report, one.where)
        exposed[name] += one.exposed
        wire[name][one.axes] = wire[name].get(one.axes, 0.0) + one.times * one.wire
    for argument in report.arguments:
        if argument.kind == "params":
            params[segment_of_argument(report, argument)] += argument.bytes
        elif argument.kind == "moments":
            moments[segment_of_argument(report, argument)] += argument.bytes
    line = report.timeline
    if line:
        for part, us in line.parts.items():
            compute[segment_of(report, Location(part))] += us
        # A wait for what is no collective of the report, such as a copy between devices, is in no
        # segment.
        exposed[""] += line.exposed - sum(exposed.values())
    return tuple(
        SegmentCost(
            name=name or REST,
            n_layers=report.segments.get(name, 0),
            compute=compute[name],
            exposed=exposed[name],
            wire=wire[name],
            params=params[name],
            state=params[name] + moments[name],
        )
        for name in names
    )


def segment_table(report: Report, most: int = 99) -> list[tuple[str, ...]]:
    """Returns the costs as text: the header, a row for each segment, one for the rest, the step's.

    Empty for fewer than two segments. most: how many columns of mesh axes, those that carry most
    first.
    """
    costs = by_segment(report)
    if not costs:
        return []
    sent = {axes: n for axes, n in wire_by_axes(report).items() if n >= SCALAR}
    columns = list(sent)[:most]
    wire_unit = Unit.of(max((sent[axes] for axes in columns), default=0))
    state_unit = Unit.of(sum(cost.state for cost in costs))
    step = sum(cost.time for cost in costs)

    def row(name: str, *costs: SegmentCost) -> tuple[str, ...]:
        n_layers = sum(cost.n_layers for cost in costs)
        compute = sum(cost.compute for cost in costs)
        exposed = sum(cost.exposed for cost in costs)
        times = ("", "", "")
        if report.timeline:
            times = (duration(compute), duration(exposed), percent(compute + exposed, step))
        traffic = [wire_unit(sum(cost.wire.get(axes, 0.0) for cost in costs)) for axes in columns]
        state = state_unit(sum(cost.state for cost in costs))
        return (name, f"{n_layers:,}" if n_layers else "", *times, *traffic, state)

    header = (
        "segment",
        "layers",
        "compute",
        "exposed",
        "share",
        *(f"{over(axes)}, {wire_unit.name}" for axes in columns),
        f"state, {state_unit.name}",
    )
    return [header, *(row(cost.name, cost) for cost in costs), row("step", *costs)]
