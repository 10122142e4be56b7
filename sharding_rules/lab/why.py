"""Why one program is predicted to be slower than another: the parts of the step that differ, in a
sentence.
"""

from __future__ import annotations

from sharding_rules.lab.report import Report
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


def why(report: Report, other: Report) -> str:
    """Returns which of two programs is slower, by how much, and what of its step takes longer.

    The step is divided into compute and, by mesh axes, the time that compute waits for collectives.
    Both reports are of one training step; where they have other numbers of devices or tokens, their
    steps are compared as they are.
    """
    if not report.timeline or not other.timeline:
        return f"{report.name} and {other.name}: no times are predicted for these devices"
    slow, fast = (report, other) if report.timeline.step >= other.timeline.step else (other, report)
    names = (
        (slow.name, fast.name)
        if slow.name != fast.name
        else ("this", "the other")
        if slow is report
        else ("the other", "this")
    )
    assert slow.timeline and fast.timeline
    more = slow.timeline.step - fast.timeline.step
    if more <= _EQUAL * fast.timeline.step:
        return (
            f"{names[0]} and {names[1]} take the same time: {duration(slow.timeline.step)} a step "
            f"({PREDICTED})"
        )
    head = (
        f"{names[0]} takes {slow.timeline.step / fast.timeline.step:.2f} x as long as {names[1]}, "
        f"{duration(slow.timeline.step)} for {duration(fast.timeline.step)} a step ({PREDICTED})"
    )
    parts = [
        (_compute(slow, fast), slow.timeline.compute - fast.timeline.compute),
        *_waits(slow, fast),
    ]
    named = sorted(
        ((longer, text) for text, longer in parts if longer >= _PART * more), reverse=True
    )
    saved = sum(-longer for _, longer in parts if longer < 0)
    reasons = " and ".join(
        f"{text} ({percent(longer, more)} of the difference)" for longer, text in named
    )
    back = f"; other parts are {duration(saved)} shorter" if saved >= _PART * more else ""
    return f"{head}: {reasons}{back}" if reasons else head


def _compute(slow: Report, fast: Report) -> str:
    """Returns how much longer the matmuls and the rest of the compute take, with the phase in which
    there are more FLOPs.
    """
    assert slow.timeline and fast.timeline
    text = f"it computes {duration(slow.timeline.compute - fast.timeline.compute)} longer"
    more = {phase: n - fast.flops.get(phase, 0) for phase, n in slow.flops.items()}
    phase = max(more, key=lambda name: more[name], default="")
    if more.get(phase, 0) > _EQUAL * sum(fast.flops.values()):
        return f"{text}, with {flop(more[phase])} more in {phase or 'other parts'}"
    return f"{text}, for as many FLOPs"


def _waits(slow: Report, fast: Report) -> list[tuple[str, float]]:
    """Returns, by mesh axes, how much longer compute waits, and how many more bytes are sent
    there.
    """
    sent, sent_by_other = (
        {over(axes): n for axes, n in wire_by_axes(each).items()} for each in (slow, fast)
    )
    waits, waits_of_other = exposed_by_axes(slow), exposed_by_axes(fast)
    found = []
    for axes in dict.fromkeys([*waits, *waits_of_other]):
        longer = waits.get(axes, 0.0) - waits_of_other.get(axes, 0.0)
        more = sent.get(axes, 0.0) - sent_by_other.get(axes, 0.0)
        amount = (
            f"which sends {size(more)} more"
            if more > 0
            else f"which sends {size(-more)} less"
            if more < 0
            else "for as many bytes"
        )
        found.append((f"waits {duration(longer)} longer for {axes}, {amount}", longer))
    return found
