"""Charts as inline SVG.

Widths are percentages, so they follow the page; colours are variables of page.css, so they follow
the reader.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from sharding_rules.lab.report import Span, location_text
from sharding_rules.lab.schedule import Piece
from sharding_rules.lab.summary import duration, runs

PALETTE = 7
"""Colours --c0 to --c6; whatever comes after them is --rest."""

# In the percent of a bar's width that a label of a stacked bar needs.
_CHARACTER = 0.58
_LABEL_MARGIN = 0.5

# Heights in a schedule, in pixels.
_COMPUTE_END = 34
_AXIS = 38
_NETWORK_BEGIN = 42
_SCHEDULE_HEIGHT = 92
_HIGH_SPAN = 28
_LOW_SPAN = 14


@dataclasses.dataclass(frozen=True)
class Share:
    """A piece of a stacked bar."""

    label: str
    value: float
    colour: str
    """A variable of page.css: --c0."""
    tip: str
    """Lines that hovering shows."""


def colours(words: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each word, in order.

    The empty word, and those for which none is left, share one.
    """
    colour = {"": "--rest"}
    nonempty_words = [word for word in dict.fromkeys(words) if word]
    for i, word in enumerate(nonempty_words):
        colour[word] = f"--c{i}" if i < PALETTE else "--rest"
    return colour


def stack(
    shares: Sequence[Share],
    full_scale: float,
    *,
    label: str,
    height: int = 26,
    limit: float = 0,
    limit_label: str = "",
) -> str:
    """Returns a stacked bar on a scale of 0 to `full_scale`, with a line at `limit`.

    Shares that are large enough are labelled below.
    """
    shapes = []
    labels = []
    begin = 0.0
    label_end = 0.0
    for share in shares:
        left = 100 * begin / full_scale
        width = 100 * share.value / full_scale
        shapes.append(_rect("share", left, width, 0, height, share.colour, share.tip))
        label_width = _CHARACTER * len(share.label) + _LABEL_MARGIN
        if share.label and width > label_width and left >= label_end:
            labels.append(f'<text x="{left:.3f}%" y="{height + 15}">{escape(share.label)}</text>')
            label_end = left + label_width
        begin += share.value
    if limit:
        x = 100 * limit / full_scale
        shapes.append(
            f'<line class="limit" x1="{x:.3f}%" x2="{x:.3f}%" y1="-6" y2="{height + 6}"/>'
        )
        labels.append(
            f'<text class="limit" x="{x:.3f}%" y="{height + 15}" '
            f'text-anchor="end">{escape(limit_label)}</text>'
        )
    total_height = height + (22 if labels else 0)
    return (
        f'<svg class="stack" height="{total_height}" role="img" '
        f'aria-label="{escape(label)}">{"".join(shapes + labels)}</svg>'
    )


def schedule(piece: Piece, colour: Mapping[str, str]) -> str:
    """Returns one trip of a piece: compute above the axis, the network below it.

    Matmuls are tall. On the axis are the times at which compute waits.
    """

    def percent(time: float) -> float:
        clipped = min(max(time, piece.begin), piece.end)
        return 100 * (clipped - piece.begin) / piece.duration

    shapes = []
    for span in piece.spans:
        left = percent(span.start)
        width = percent(span.start + span.duration) - left
        is_high = span.kind in ("matmul", "attention") or span.stream != "compute"
        height = _HIGH_SPAN if is_high else _LOW_SPAN
        top = _COMPUTE_END - height if span.stream == "compute" else _NETWORK_BEGIN
        span_colour = colour.get(span.where.part.split("/")[-1], "--rest")
        css_class = f"span {span.stream}"
        shapes.append(_rect(css_class, left, width, top, height, span_colour, _tip(span)))
    for begin, end in piece.waits:
        left = percent(begin)
        tip = f"compute waits {duration(end - begin)} for the network or PCIe"
        shapes.append(_rect("wait", left, percent(end) - left, _COMPUTE_END + 1, 6, "--wait", tip))
    marks = []
    for time in ticks(piece.duration):
        marks.append(_mark(percent(piece.begin + time), duration(time) if time else "0"))
    axis = f'<line class="axis" x1="0" x2="100%" y1="{_AXIS}" y2="{_AXIS}"/>'
    label = (
        f"schedule of {piece.name}: {duration(piece.duration)}, {runs(piece.times)} times in a step"
    )
    return (
        f'<svg class="schedule" height="{_SCHEDULE_HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{axis}{"".join(shapes)}{"".join(marks)}</svg>'
    )


def ticks(length: float, most: int = 8) -> list[float]:
    """Returns round numbers from 0 to `length`: steps of 1, 2 or 5 times a power of ten."""
    if length <= 0:
        return [0.0]
    power = 10 ** math.floor(math.log10(length / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * most >= length)
    return [i * step for i in range(int(length / step) + 1)]


def swatch(colour: str) -> str:
    """Returns a small square of a colour, for a legend."""
    square = f'<rect width="10" height="10" rx="2" style="fill:var({colour})"/>'
    return f'<svg class="swatch" width="10" height="10" aria-hidden="true">{square}</svg>'


def legend(colour: Mapping[str, str], none: str) -> str:
    """Returns the words and their colours; those that share --rest are one.

    none: what stands for the empty word.
    """
    items = []
    uncoloured = []
    for word, word_colour in colour.items():
        if word_colour == "--rest":
            uncoloured.append(word or none)
        else:
            items.append(f"<li>{swatch(word_colour)} {escape(word)}</li>")
    items.append(f"<li>{swatch('--rest')} {escape(', '.join(uncoloured))}</li>")
    return f'<ul class="legend">{"".join(items)}</ul>'


def _tip(span: Span) -> str:
    """Returns the lines that hovering over a span shows."""
    loops = " x ".join(map(runs, span.loops))
    times = f", {loops} times" if loops else ""
    kind = f"{span.kind}, {duration(span.duration)}{times}"
    return "\n".join([span.name, kind, location_text(span.where)])


def _rect(
    css_class: str, left: float, width: float, top: float, height: float, colour: str, tip: str
) -> str:
    """Left and width are in percent. tip: lines that hovering shows."""
    box = f'x="{left:.3f}%" y="{top}" width="{width:.3f}%" height="{height}"'
    return f'<rect class="{css_class}" {box} style="fill:var({colour})" data-tip="{escape(tip)}"/>'


def _mark(x: float, text: str) -> str:
    """Returns a tick of the time axis, at a percentage of its length."""
    # At both ends the text stays inside of the chart.
    anchor = "middle"
    if x > 97:
        anchor = "end"
    elif x <= 2:
        anchor = "start"
    top = _NETWORK_BEGIN + _HIGH_SPAN
    return (
        f'<line class="tick" x1="{x:.3f}%" x2="{x:.3f}%" y1="{top}" y2="{top + 5}"/>'
        f'<text class="tick" x="{x:.3f}%" y="{top + 18}" text-anchor="{anchor}">{text}</text>'
    )
