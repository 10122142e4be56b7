"""What each segment of a model costs: its layers' share of the step, of the bytes that are sent,
and of the state.

A trainer says which segments there are (`compile_report(segments=...)`), and runs each in a named
scope of that name.
"""

from __future__ import annotations

import dataclasses
import re

from sharding_rules.lab.report import SCALAR, Argument, Location, Report
from sharding_rules.lab.summary import Unit, duration, over, percent, wire_by_axes

REST = "rest"
"""The row of what is in no segment: embedding, loss and optimizer, and what XLA has merged from
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


def segment_of(report: Report, where: Location) -> str:
    """The segment of layers that a place is in; empty outside of segments, and where XLA has merged
    several of them.
    """
    return next((word for word in where.part.split("/") if word in report.segments), "")


def segment_of_argument(report: Report, argument: Argument) -> str:
    """The segment that holds a parameter, by the first word of its own name: first.mlp.up.weight;
    empty for those outside of segments.
    """
    keys = re.findall(r"\['([^']*)'\]|\.(\w+)$", argument.name)
    words = (word for key in keys for own in key for word in re.split(r"[./]", own))
    return next((word for word in words if word in report.segments), "")


def by_segment(report: Report) -> tuple[SegmentCost, ...]:
    """What each segment costs, in model order, and then the rest, so that each column sums to the
    step's; () for fewer than two segments.

    Without a timeline all times are 0. In a pipeline they are those of the slowest stage in each
    tick, like the step's.
    """
    if len(report.segments) < 2:
        return ()
    line = report.timeline
    names = (*report.segments, "")
    compute, exposed = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    params, moments = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    wire: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in names}
    for part, us in line.parts.items() if line else ():
        compute[segment_of(report, Location(part))] += us
    for one in report.collectives:
        name = segment_of(report, one.where)
        exposed[name] += one.exposed
        wire[name][one.axes] = wire[name].get(one.axes, 0.0) + one.times * one.wire
    for argument in report.arguments:
        for kind, held in (("params", params), ("moments", moments)):
            held[segment_of_argument(report, argument)] += argument.bytes * (argument.kind == kind)
    # a wait for what is no collective of the report, such as a copy between devices, is in no
    # segment
    if line:
        exposed[""] += line.exposed - sum(exposed.values())
    layers = report.segments.get
    return tuple(
        SegmentCost(
            name or REST,
            layers(name, 0),
            compute[name],
            exposed[name],
            wire[name],
            params[name],
            params[name] + moments[name],
        )
        for name in names
    )


def segment_table(report: Report, most: int = 99) -> list[tuple[str, ...]]:
    """The costs as text: the header, a row for each segment, one for the rest, and the step's; []
    for fewer than two segments.

    most: how many columns of mesh axes, those that carry most first.
    """
    costs = by_segment(report)
    if not costs:
        return []
    sent = dict([(axes, n) for axes, n in wire_by_axes(report).items() if n >= SCALAR][:most])
    wire, held = Unit.of(max(sent.values(), default=0)), Unit.of(sum(cost.state for cost in costs))
    step = sum(cost.time for cost in costs)

    def row(name: str, *of: SegmentCost) -> tuple[str, ...]:
        layers, compute, exposed = (
            sum(getattr(cost, field) for cost in of) for field in ("n_layers", "compute", "exposed")
        )
        times = (
            (duration(compute), duration(exposed), percent(compute + exposed, step))
            if report.timeline
            else ("", "", "")
        )
        over_axes = (wire(sum(cost.wire.get(axes, 0.0) for cost in of)) for axes in sent)
        return (
            name,
            f"{layers:,}" if layers else "",
            *times,
            *over_axes,
            held(sum(cost.state for cost in of)),
        )

    header = (
        "segment",
        "layers",
        "compute",
        "exposed",
        "share",
        *(f"{over(axes)}, {wire.name}" for axes in sent),
        f"state, {held.name}",
    )
    return [header, *(row(cost.name, cost) for cost in costs), row("step", *costs)]
