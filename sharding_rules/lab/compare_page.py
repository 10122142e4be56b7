"""Two reports beside each other as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from sharding_rules.lab.diff import Difference
from sharding_rules.lab.diff import diff as difference
from sharding_rules.lab.markup import code, document, section, table
from sharding_rules.lab.report import KINDS, Report
from sharding_rules.lab.summary import (
    PREDICTED,
    duration,
    flop,
    headline,
    mesh_words,
    over,
    percent,
    signed,
    size,
    wire_by_axes,
)

_NONE = "none"


def compare_page(before: Report, after: Report) -> str:
    """The page: verdicts, memory by class, bytes by axis, collectives that changed, FLOPs and
    predicted times.
    """
    changed = difference(before, after)
    sections = [
        section("times", f"The step, {PREDICTED}", _times(before, after)),
        section("memory", "Memory at the peak", _memory(before, after)),
        section("network", "Sent in a step", _sent(before, after)),
        section("collectives", "Collectives that changed", _collectives(changed)),
        section("matmuls", "Matmuls", _flops(before, after)),
    ]
    return document(
        f"{before.name} and {after.name}",
        _head(before, after),
        "".join(sections),
        "<footer></footer>",
    )


def _head(before: Report, after: Report) -> str:
    items = ""
    for which, one in (("before", before), ("after", after)):
        label = (
            f"{which}: {one.name}, {one.n_devices:,} x {one.target.upper() or 'device'}, "
            f"{mesh_words(one)}"
        )
        items += f"<div><dt>{escape(label)}</dt><dd>{escape(headline(one))}</dd></div>"
    return (
        f"<header>\n<h1>{escape(before.name)} → "
        f"{escape(after.name)}</h1>\n<dl>{items}</dl>\n</header>"
    )


def _both(
    name: str, a: Mapping[str, float], b: Mapping[str, float], words: Callable[[float], str]
) -> str:
    """A row for each key of either, in order: before, after and the change."""
    lines = []
    for key in [*a, *(key for key in b if key not in a)]:
        old, new = a.get(key, 0), b.get(key, 0)
        lines.append(
            (escape(key), words(old), words(new), signed(new - old, words) if old != new else "")
        )
    return table([name, "before", "after", "change"], lines) if lines else f"<p>{_NONE}</p>"


def _memory(before: Report, after: Report) -> str:
    a, b = before.memory.by_kind, after.memory.by_kind
    kinds = [kind for kind in KINDS if kind in a or kind in b]
    a, b = ({kind: one.get(kind, 0) for kind in kinds} for one in (a, b))
    return _both("class", {**a, "peak": before.peak_bytes}, {**b, "peak": after.peak_bytes}, size)


def _sent(before: Report, after: Report) -> str:
    a, b = ({over(axes): n for axes, n in wire_by_axes(one).items()} for one in (before, after))
    return _both("over", a, b, size)


def _flops(before: Report, after: Report) -> str:
    a, b = ({phase or "no phase": n for phase, n in one.flops.items()} for one in (before, after))
    return _both("phase", a, b, flop)


def _times(before: Report, after: Report) -> str:
    if not (before.timeline and after.timeline):
        return "<p>There are no estimates for these devices.</p>"
    a, b = (
        {name: getattr(one.timeline, name) for name in ("step", "compute", "network", "exposed")}
        for one in (before, after)
    )
    shares = [
        (
            name,
            *(
                percent(value, 1) if value is not None else "not known"
                for value in (getattr(before, field), getattr(after, field))
            ),
            "",
        )
        for name, field in (("MFU", "mfu"), ("exposed share", "exposed_share"))
    ]
    ratios = (
        f"{one.model_ratio:.2f}" if one.model_ratio is not None else "not known"
        for one in (before, after)
    )
    shares.append(("step / the model's matmuls and attention", *ratios, ""))
    return _both("", a, b, duration) + table(["", "before", "after", ""], shares)


def _collectives(changed: Difference) -> str:
    lines = [
        (
            code(str(change)[0]),
            escape(str(change)[2:]),
            signed(change.wire, size) if change.wire else "",
        )
        for change in changed.collectives
    ]
    return table(["", "collective", "bytes sent"], lines) if lines else f"<p>{_NONE}</p>"
