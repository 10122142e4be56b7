"""Charts as inline SVG. Widths are percentages, so they follow the page; colours are variables of
page.css, so they follow the reader.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from sharding_rules.lab.report import Span, location_text
from sharding_rules.lab.schedule import Piece
from sharding_rules.lab.summary import duration

PALETTE = 7
"""Colours --c0 to --c6; whatever comes after them is --rest."""


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
    """A colour for each word, in order; the empty word, and those for which none is left, share
    one.
    """
    named = [word for word in dict.fromkeys(words) if word]
    return {"": "--rest"} | {
        word: f"--c{i}" if i < PALETTE else "--rest" for i, word in enumerate(named)
    }


def stack(
    shares: Sequence[Share],
    whole: float,
    *,
    label: str,
    height: int = 26,
    limit: float = 0,
    limit_label: str = "",
) -> str:
    """A stacked bar on a scale of 0 to `whole`, what is large enough labelled below, with a line at
    `limit`.
    """
    drawn, texts, begin, free = [], [], 0.0, 0.0
    for share in shares:
        left, width = 100 * begin / whole, 100 * share.value / whole
        drawn.append(_rect("share", left, width, 0, height, share.colour, share.tip))
        need = 0.58 * len(share.label) + 0.5
        if share.label and width > need and left >= free:
            texts.append(f'<text x="{left:.3f}%" y="{height + 15}">{escape(share.label)}</text>')
            free = left + need
        begin += share.value
    if limit:
        at = 100 * limit / whole
        drawn.append(
            f'<line class="limit" x1="{at:.3f}%" x2="{at:.3f}%" y1="-6" y2="{height + 6}"/>'
        )
        texts.append(
            f'<text class="limit" x="{at:.3f}%" y="{height + 15}" '
            f'text-anchor="end">{escape(limit_label)}</text>'
        )
    tall = height + (22 if texts else 0)
    return (
        f'<svg class="stack" height="{tall}" role="img" '
        f'aria-label="{escape(label)}">{"".join(drawn + texts)}</svg>'
    )


UPPER, AXIS, LOWER, TALL = 34, 38, 42, 92
"""Heights in a schedule: compute ends, the axis, the network begins, all of it. Pixels."""


def schedule(piece: Piece, colour: Mapping[str, str]) -> str:
    """One trip of a piece: compute above the axis (matmuls tall), the network below it, on the axis
    where compute waits.
    """

    def at(time: float) -> float:
        return 100 * (min(max(time, piece.begin), piece.end) - piece.begin) / piece.duration

    drawn = []
    for span in piece.spans:
        left, right = at(span.start), at(span.start + span.duration)
        high = 28 if span.kind in ("matmul", "attention") or span.stream == "network" else 14
        top = UPPER - high if span.stream == "compute" else LOWER
        drawn.append(
            _rect(
                f"span {span.stream}",
                left,
                right - left,
                top,
                high,
                colour.get(span.where.part.split("/")[-1], "--rest"),
                _of(span),
            )
        )
    for begin, end in piece.waits:
        tip = f"compute waits {duration(end - begin)} for the network"
        drawn.append(_rect("wait", at(begin), at(end) - at(begin), UPPER + 1, 6, "--wait", tip))
    marks = "".join(
        _mark(at(piece.begin + t), duration(t) if t else "0") for t in ticks(piece.duration)
    )
    axis = f'<line class="axis" x1="0" x2="100%" y1="{AXIS}" y2="{AXIS}"/>'
    label = f"schedule of {piece.name}: {duration(piece.duration)}, {piece.times} times in a step"
    return (
        f'<svg class="schedule" height="{TALL}" role="img" '
        f'aria-label="{escape(label)}">{axis}{"".join(drawn)}{marks}</svg>'
    )


def ticks(length: float, most: int = 8) -> list[float]:
    """Round numbers from 0 to `length`: steps of 1, 2 or 5 times a power of ten."""
    if length <= 0:
        return [0.0]
    power = 10 ** math.floor(math.log10(length / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * most >= length)
    return [i * step for i in range(int(length / step) + 1)]


def swatch(colour: str) -> str:
    """A small square of a colour, for a legend."""
    square = f'<rect width="10" height="10" rx="2" style="fill:var({colour})"/>'
    return f'<svg class="swatch" width="10" height="10" aria-hidden="true">{square}</svg>'


def legend(colour: Mapping[str, str], none: str) -> str:
    """The words and their colours; those that share --rest are one."""
    named = [(word, c) for word, c in colour.items() if c != "--rest"]
    others = [word or none for word, c in colour.items() if c == "--rest"]
    items = [f"<li>{swatch(c)} {escape(word)}</li>" for word, c in named]
    return (
        f'<ul class="legend">{"".join(items)}<li>{swatch("--rest")} '
        f"{escape(', '.join(others))}</li></ul>"
    )


def _of(span: Span) -> str:
    often = " x ".join(f"{n:,}" for n in span.loops)
    lines = [
        span.name,
        f"{span.kind}, {duration(span.duration)}" + (f", {often} times" if often else ""),
        location_text(span.where),
    ]
    return "\n".join(lines)


def _rect(
    cls: str, left: float, width: float, top: float, height: float, colour: str, tip: str
) -> str:
    """Left and width in percent. `tip`: lines that hovering shows."""
    box = f'x="{left:.3f}%" y="{top}" width="{width:.3f}%" height="{height}"'
    return f'<rect class="{cls}" {box} style="fill:var({colour})" data-tip="{escape(tip)}"/>'


def _mark(at: float, text: str) -> str:
    """A tick of the time axis, at a percentage of its length."""
    anchor = "end" if at > 97 else "middle" if at > 2 else "start"
    line = f'<line class="tick" x1="{at:.3f}%" x2="{at:.3f}%" y1="{LOWER + 28}" y2="{LOWER + 33}"/>'
    return (
        f'{line}<text class="tick" x="{at:.3f}%" y="{LOWER + 46}" '
        f'text-anchor="{anchor}">{text}</text>'
    )
