"""Why one program is predicted to be slower than another.

The answer is a sentence about the parts of the step that differ.
"""

from __future__ import annotations

from typing import NamedTuple

from sharding_rules.lab.report import Report, Timeline
from sharding_rules.lab.summary import (
    PREDICTED,
    duration,
    exposed_by_axes,
    flop,
    over,
    percent,
    size,
    wire_by_axes,
)

_EQUAL = 0.01
"""Share of the step by which two predictions may differ and still be called equal."""
_PART = 0.1
"""Share of the difference that a part must have to be named."""


class _Part(NamedTuple):
    """A part of the step that takes longer in the slow program, or shorter: `us` is negative."""

    us: float
    """Microseconds more."""
    text: str


def why(report: Report, other: Report) -> str:
    """Returns which of two programs is slower, by how much, and what of its step takes longer.

    The step is divided into compute and, by mesh axes, the time that compute waits for collectives.
    Both reports are of one training step; where they have other numbers of devices or tokens, their
    steps are compared as they are.
    """
    if not report.timeline or not other.timeline:
        return f"{report.name} and {other.name}: no times are predicted for these devices"
    if report.timeline.step >= other.timeline.step:
        return _why_slower(report, report.timeline, other, other.timeline, ("this", "the other"))
    return _why_slower(other, other.timeline, report, report.timeline, ("the other", "this"))


def _why_slower(
    slow: Report, slow_line: Timeline, fast: Report, fast_line: Timeline, names: tuple[str, str]
) -> str:
    """Returns the answer. names: those of the programs, if their reports have the same name."""
    slow_name, fast_name = names if slow.name == fast.name else (slow.name, fast.name)
    longer = slow_line.step - fast_line.step
    if longer <= _EQUAL * fast_line.step:
        return (
            f"{slow_name} and {fast_name} take the same time: {duration(slow_line.step)} a step "
            f"({PREDICTED})"
        )
    head = (
        f"{slow_name} takes {slow_line.step / fast_line.step:.2f} x as long as {fast_name}, "
        f"{duration(slow_line.step)} for {duration(fast_line.step)} a step ({PREDICTED})"
    )
    parts = [_compute(slow, fast, slow_line.compute - fast_line.compute), *_waits(slow, fast)]
    large = sorted((part for part in parts if part.us >= _PART * longer), reverse=True)
    if not large:
        return head
    reasons = " and ".join(
        f"{part.text} ({percent(part.us, longer)} of the difference)" for part in large
    )
    saved = sum(-part.us for part in parts if part.us < 0)
    if saved >= _PART * longer:
        return f"{head}: {reasons}; other parts are {duration(saved)} shorter"
    return f"{head}: {reasons}"


def _compute(slow: Report, fast: Report, us: float) -> _Part:
    """Returns how much longer the matmuls and the rest of the compute take.

    Names the phase in which most FLOPs are added.
    """
    text = f"it computes {duration(us)} longer"
    more_flops = {phase: n - fast.flops.get(phase, 0) for phase, n in slow.flops.items()}
    phase = max(more_flops, key=lambda name: more_flops[name], default="")
    if more_flops.get(phase, 0) > _EQUAL * sum(fast.flops.values()):
        return _Part(us, f"{text}, with {flop(more_flops[phase])} more in {phase or 'other parts'}")
    return _Part(us, f"{text}, for as many FLOPs")


def _waits(slow: Report, fast: Report) -> list[_Part]:
    """Returns, by mesh axes, how much longer compute waits, and how many more bytes are sent."""
    slow_bytes = {over(axes): n for axes, n in wire_by_axes(slow).items()}
    fast_bytes = {over(axes): n for axes, n in wire_by_axes(fast).items()}
    slow_waits = exposed_by_axes(slow)
    fast_waits = exposed_by_axes(fast)
    parts = []
    for axes in dict.fromkeys([*slow_waits, *fast_waits]):
        us = slow_waits.get(axes, 0.0) - fast_waits.get(axes, 0.0)
        more_bytes = slow_bytes.get(axes, 0.0) - fast_bytes.get(axes, 0.0)
        if more_bytes > 0:
            traffic = f"which sends {size(more_bytes)} more"
        elif more_bytes < 0:
            traffic = f"which sends {size(-more_bytes)} less"
        else:
            traffic = "for as many bytes"
        parts.append(_Part(us, f"waits {duration(us)} longer for {axes}, {traffic}"))
    return parts
