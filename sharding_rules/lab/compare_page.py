"""Two reports beside each other as one HTML file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape

from sharding_rules.lab.diff import Change, diff, flops_table, wire_table
from sharding_rules.lab.markup import code, document, section, table
from sharding_rules.lab.report import KINDS, Report, Timeline
from sharding_rules.lab.summary import (
    PREDICTED,
    duration,
    flop,
    headline,
    mesh_words,
    percent,
    signed,
    size,
)

_NONE = "<p>none</p>"
_UNKNOWN = "not known"


def compare_page(old: Report, new: Report) -> str:
    """Returns the page.

    It has verdicts, memory by class, bytes by axis, collectives that changed, FLOPs and predicted
    times.
    """
    changes = diff(old, new).collectives
    sent = _changes("over", wire_table(old), wire_table(new), size)
    flops = _changes("phase", flops_table(old), flops_table(new), flop)
    sections = [
        section("times", f"The step, {PREDICTED}", _times(old, new)),
        section("memory", "Memory at the peak", _memory(old, new)),
        section("network", "Sent in a step", sent),
        section("collectives", "Collectives that changed", _collectives(changes)),
        section("matmuls", "Matmuls", flops),
    ]
    return document(
        f"{old.name} and {new.name}",
        _head(old, new),
        "".join(sections),
        "<footer></footer>",
    )


def _head(old: Report, new: Report) -> str:
    items = _head_item("before", old) + _head_item("after", new)
    return (
        f"<header>\n<h1>{escape(old.name)} → {escape(new.name)}</h1>\n<dl>{items}</dl>\n</header>"
    )


def _head_item(label: str, report: Report) -> str:
    devices = f"{report.n_devices:,} x {report.target.upper() or 'device'}"
    term = f"{label}: {report.name}, {devices}, {mesh_words(report)}"
    return f"<div><dt>{escape(term)}</dt><dd>{escape(headline(report))}</dd></div>"


def _times(old: Report, new: Report) -> str:
    if not (old.timeline and new.timeline):
        return "<p>There are no estimates for these devices.</p>"
    times = _changes("", _durations(old.timeline), _durations(new.timeline), duration)
    model = "step / the model's matmuls and attention"
    shares = [
        ("MFU", _share(old.mfu), _share(new.mfu), ""),
        ("exposed share", _share(old.exposed_share), _share(new.exposed_share), ""),
        (model, _ratio(old.model_ratio), _ratio(new.model_ratio), ""),
    ]
    return times + table(["", "before", "after", ""], shares)


def _durations(timeline: Timeline) -> dict[str, float]:
    return {
        "step": timeline.step,
        "compute": timeline.compute,
        "network": timeline.network,
        "exposed": timeline.exposed,
    }


def _share(value: float | None) -> str:
    return percent(value, 1) if value is not None else _UNKNOWN


def _ratio(value: float | None) -> str:
    return f"{value:.2f}" if value is not None else _UNKNOWN


def _memory(old: Report, new: Report) -> str:
    old_bytes = old.memory.by_kind
    new_bytes = new.memory.by_kind
    kinds = [kind for kind in KINDS if kind in old_bytes or kind in new_bytes]
    return _changes(
        "class",
        {**{kind: old_bytes.get(kind, 0) for kind in kinds}, "peak": old.peak_bytes},
        {**{kind: new_bytes.get(kind, 0) for kind in kinds}, "peak": new.peak_bytes},
        size,
    )


def _changes(
    name: str,
    old: Mapping[str, float],
    new: Mapping[str, float],
    words: Callable[[float], str],
) -> str:
    """Returns a table with a row for each key of either, in order: both values and the change."""
    rows = []
    for key in dict.fromkeys([*old, *new]):
        a = old.get(key, 0)
        b = new.get(key, 0)
        change = signed(b - a, words) if a != b else ""
        rows.append((escape(key), words(a), words(b), change))
    return table([name, "before", "after", "change"], rows) if rows else _NONE


def _collectives(changes: tuple[Change, ...]) -> str:
    rows = []
    for change in changes:
        # "+ all-gather of ...": the sign has a column of its own.
        sign, _, text = str(change).partition(" ")
        wire = signed(change.wire, size) if change.wire else ""
        rows.append((code(sign), escape(text), wire))
    return table(["", "collective", "bytes sent"], rows) if rows else _NONE
