"""Gantt charts of schedules: a row for each stage, in the terminal (rich) or as a PNG (matplotlib).
Imports no jax.

Forward passes are blue, backward passes orange, weight gradients green; a later chunk is darker.
Numbers are microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.cost import Timeline, in_flight
from mesh_lm.schedules.schedule import WORDS, Op, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, PALE = "#1f2933", "#7b8794"
_RAMPS = {"F": ("#a5c8fd", "#1a3fae"), "B": ("#fcc48a", "#a83a08"), "W": ("#9be7b4", "#12652f")}
"""The colours of the first and of the last chunk."""
_MOST = 4
"""The most characters for the shortest op: more would not make it clearer."""
_GAP = " ⋯ "


def title(schedule: Schedule) -> str:
    """The name of a schedule, with its chunks if it has several."""
    return schedule.name + (f", {schedule.chunks} chunks" if schedule.chunks > 1 else "")


def lines(timeline: Timeline, width: int, *, colour: bool = True) -> list[Text]:
    """The chart in at most `width` characters: stages, axis, legend. If it does not fit, its middle
    is left out.

    colour: False uses letters for the kinds of op.
    """
    stages = timeline.schedule.stages
    label = len(f"stage {stages - 1} ")
    windows, step = _windows(timeline, width - label, 2 if colour else 1)
    rows = [_StageOps(timeline, stage) for stage in range(stages)]
    chart = []
    for stage, row in enumerate(rows):
        text = Text(f"stage {stage}".ljust(label), style="bold")
        for number, (start, samples) in enumerate(windows):
            text.append(_GAP if number else "", style="dim")
            ops = [row.at(start + (i + 0.5) * step) for i in range(samples)]
            text.append_text(
                _coloured(ops, timeline.schedule, numbered=len(windows) == 1)
                if colour
                else _lettered(ops)
            )
        chart.append(text)
    return [
        *chart,
        _axis(timeline, windows, step, label, 2 if colour else 1),
        *([_legend(timeline.schedule, label)] if colour else []),
    ]


def _windows(timeline: Timeline, width: int, per: int) -> tuple[list[tuple[float, int]], float]:
    """(the parts of the time that fit into `width` characters of `per` samples, as (start,
    samples); the time of a sample).
    """
    lengths = [end - start for start, end in timeline.spans.values()]
    unit = max(min(length for length in lengths if length), sum(lengths) / len(lengths) / 4)
    units = timeline.span / unit
    scale = min(int(width * per / units + 1e-9), _MOST * per)
    if scale:
        return [(0.0, math.ceil(units * scale / per - 1e-9) * per)], unit / scale
    half = (width - len(_GAP)) // 2 * per
    return [(0.0, half), (timeline.span - half * unit, half)], unit


class _StageOps:
    """The ops of one stage by time; calls of `at` must have increasing times."""

    def __init__(self, timeline: Timeline, stage: int) -> None:
        stages = timeline.schedule.stages
        self._spans = sorted(
            (*span, op) for op, span in timeline.spans.items() if op.virtual % stages == stage
        )
        self._next = 0

    def at(self, time: float) -> Op | None:
        while self._next < len(self._spans) and self._spans[self._next][1] <= time:
            self._next += 1
        return (
            self._spans[self._next][2]
            if self._next < len(self._spans) and self._spans[self._next][0] <= time
            else None
        )


def _coloured(ops: Sequence[Op | None], schedule: Schedule, numbered: bool) -> Text:
    """Two samples a character: a block in one colour, with the microbatch's number if there is
    room, or half a block of each colour.
    """
    text = Text()
    pairs = list(zip(ops[::2], ops[1::2], strict=True))
    for (left, right), run in groupby(pairs):
        n = len(list(run))
        if left != right:
            first, second = (colour_of(op, schedule) if op else None for op in (left, right))
            block, front, back = ("▌", first, second) if first else ("▐", second, None)
            text.append(block * n, style=f"{front} on {back}" if back else front or "")
        elif left is None:
            text.append("·" * n, style="bright_black")
        else:
            number, back = str(left.microbatch), colour_of(left, schedule)
            text.append(
                (number if numbered and len(number) <= n else "").center(n),
                style=f"{_ink(back)} on {back}",
            )
    return text


def _lettered(ops: Sequence[Op | None]) -> Text:
    text = Text()
    for op, run in groupby(ops):
        n = len(list(run))
        text.append(
            f"{op.kind}{op.microbatch}"[:n].ljust(n, "-")
            if op and n > 1 + len(str(op.microbatch))
            else (op.kind if op else ".") * n
        )
    return text


def _axis(
    timeline: Timeline, windows: Sequence[tuple[float, int]], step: float, label: int, per: int
) -> Text:
    parts = []
    for start, samples in windows:
        end = f"{min(timeline.span, start + samples * step):.4g}"
        parts.append(f"{start:.4g}".ljust(samples // per - len(end)) + end)
    return Text(" " * label + (" " * len(_GAP)).join(parts), style="dim")


def _legend(schedule: Schedule, label: int) -> Text:
    text = Text(" " * label)
    for kind in schedule.kinds:
        for chunk in range(min(schedule.chunks, 8)):
            back = colour_of(Op(kind, 0, chunk * schedule.stages), schedule)
            text.append(
                f" {chunk} " if schedule.chunks > 1 else "   ", style=f"{_ink(back)} on {back}"
            )
        text.append(f" {WORDS[kind]}{' of each chunk' if schedule.chunks > 1 else ''}   ")
    return text.append("·", style="bright_black").append(" idle")


def colour_of(op: Op, schedule: Schedule) -> str:
    """The colour #rrggbb of an op, by kind and chunk. Odd microbatches are a little paler, so that
    neighbours differ.
    """
    first, last = ([int(ramp[i : i + 2], 16) for i in (1, 3, 5)] for ramp in _RAMPS[op.kind])
    share = (op.virtual // schedule.stages + 0.5) / schedule.chunks
    mixed = [a + (b - a) * share for a, b in zip(first, last, strict=True)]
    return "#" + "".join(f"{round(c + (255 - c) * 0.16 * (op.microbatch % 2)):02x}" for c in mixed)


def _ink(back: str) -> str:
    red, green, blue = (int(back[i : i + 2], 16) for i in (1, 3, 5))
    return "#111827" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"


def draw(timelines: Sequence[Timeline], png: str) -> None:
    """Writes a PNG, 2000 pixels wide, with a panel for each timeline on one time scale. Raises
    ConfigError if it cannot be written.
    """
    # here: 0.3 to 0.5 s that the terminal does not need
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [0.62 + 0.2 * timeline.schedule.stages for timeline in timelines]
    height, width = sum(heights) + 0.45, 10.0
    figure = Figure(figsize=(width, height), dpi=200, facecolor="white")
    longest, top = max(timeline.span for timeline in timelines), height
    for timeline, panel in zip(timelines, heights, strict=True):
        axes = figure.add_axes((0.07, (top - panel) / height, 0.91, (panel - 0.42) / height))
        axes.set_xlim(0, longest)
        _panel(axes, timeline, points=0.91 * width * 72 / longest)
        top -= panel
    figure.text(
        0.07,
        0.1 / height,
        _caption(timelines, any(axes.texts for axes in figure.axes)),
        fontsize=8,
        color=PALE,
    )
    try:
        FigureCanvasAgg(figure).print_png(str(Path(png).expanduser()))
    except OSError as error:
        raise ConfigError(f"{png}: cannot write: {error.strerror}") from error


def _panel(axes: Axes, timeline: Timeline, points: float) -> None:
    """points: the width of one unit of time, in 1/72 inch."""
    schedule = timeline.schedule
    by_colour = sorted(
        ((colour_of(op, schedule), op.virtual % schedule.stages), op) for op in timeline.spans
    )
    for (colour, stage), group in groupby(by_colour, key=lambda item: item[0]):
        spans = [timeline.spans[op] for _, op in group]
        edge = min(0.6, 0.15 * points * min(end - start for start, end in spans))
        bars = [(start, end - start) for start, end in spans]
        axes.broken_barh(
            bars, (stage - 0.46, 0.92), facecolors=colour, edgecolor="white", linewidth=edge
        )
    for op, (start, end) in timeline.spans.items():
        number = str(op.microbatch)
        if (end - start) * points > 4.5 * len(number) + 2:
            ink = _ink(colour_of(op, schedule))
            axes.text(
                (start + end) / 2,
                op.virtual % schedule.stages + 0.04,
                number,
                fontsize=6,
                color=ink,
                ha="center",
                va="center",
            )
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_facecolor("#f1f3f5")
    axes.set_yticks(range(schedule.stages), [f"stage {stage}" for stage in range(schedule.stages)])
    axes.tick_params(length=0, labelsize=7, colors=PALE, pad=3)
    axes.spines[:].set_visible(False)
    facts = f"bubble {timeline.bubble:.1%}" + (
        f"   {max(in_flight(schedule))} in flight" if max(in_flight(schedule)) else ""
    )
    axes.set_title(title(schedule), loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=4)
    axes.set_title(facts, loc="right", fontsize=8.5, color=INK, pad=4)


def _caption(timelines: Sequence[Timeline], numbered: bool) -> str:
    clocks = ", ".join(dict.fromkeys(timeline.clock for timeline in timelines))
    kinds = dict.fromkeys(kind for timeline in timelines for kind in timeline.schedule.kinds)
    names = {
        kind: f"{hue}: {WORDS[kind]}"
        for kind, hue in zip("FBW", ("blue", "orange", "green"), strict=True)
    }
    darker = (
        "; darker: later chunks"
        if any(timeline.schedule.chunks > 1 for timeline in timelines)
        else ""
    )
    numbers = "; numbers are microbatches" if numbered else ""
    return f"{', '.join(names[kind] for kind in kinds)}{darker}{numbers}; clock: {clocks}"
