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
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.cost import Timeline, in_flight
from mesh_lm.schedules.schedule import WORDS, Op, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#1f2933"
PALE = "#7b8794"
_RAMPS = {"F": ("#a5c8fd", "#1a3fae"), "B": ("#fcc48a", "#a83a08"), "W": ("#9be7b4", "#12652f")}
"""The colours of the first and of the last chunk."""
_CHARACTER_LIMIT = 4
"""The most characters for the shortest op: more would not make it clearer."""
_GAP = " ⋯ "
_LEGEND_CHUNKS = 8
"""The most chunks whose colours the legend shows."""
_ODD_MICROBATCH_WHITE = 0.16
"""The share of white in the colour of odd microbatches, so that neighbours differ."""


def title(schedule: Schedule) -> str:
    """Returns the name of a schedule, with its chunks if it has several."""
    if schedule.chunks == 1:
        return schedule.name
    return f"{schedule.name}, {schedule.chunks} chunks"


def lines(timeline: Timeline, width: int, *, colour: bool = True) -> list[Text]:
    """Returns the chart in at most `width` characters: stages, axis, legend.

    If it does not fit, its middle is left out.

    colour: False uses letters for the kinds of op.
    """
    schedule = timeline.schedule
    label_width = len(f"stage {schedule.stages - 1} ")
    raster = _rasterise(timeline, width - label_width, 2 if colour else 1)
    chart = []
    for stage in range(schedule.stages):
        stage_ops = _StageOps(timeline, stage)
        text = Text(f"stage {stage}".ljust(label_width), style="bold")
        for number, (start, n_samples) in enumerate(raster.windows):
            if number:
                text.append(_GAP, style="dim")
            ops = [stage_ops.at(start + (i + 0.5) * raster.step) for i in range(n_samples)]
            if colour:
                numbered = len(raster.windows) == 1
                text.append_text(_coloured(ops, schedule, numbered=numbered))
            else:
                text.append_text(_lettered(ops))
        chart.append(text)
    chart.append(_axis(timeline, raster, label_width))
    if colour:
        chart.append(_legend(schedule, label_width))
    return chart


class _Window(NamedTuple):
    """A part of the time that is drawn."""

    start: float
    n_samples: int


class _Raster(NamedTuple):
    """The samples of a timeline that fit into a line."""

    windows: list[_Window]
    step: float
    """The time of a sample."""
    samples_per_character: int


def _rasterise(timeline: Timeline, width: int, samples_per_character: int) -> _Raster:
    # The unit is the shortest op, but not much shorter than the mean one.
    lengths = [end - start for start, end in timeline.spans.values()]
    shortest = min(length for length in lengths if length)
    unit = max(shortest, sum(lengths) / len(lengths) / 4)
    n_units = timeline.span / unit
    samples_per_unit = min(
        int(width * samples_per_character / n_units + 1e-9),
        _CHARACTER_LIMIT * samples_per_character,
    )
    if samples_per_unit:
        n_characters = math.ceil(n_units * samples_per_unit / samples_per_character - 1e-9)
        windows = [_Window(0.0, n_characters * samples_per_character)]
        return _Raster(windows, unit / samples_per_unit, samples_per_character)

    # Not even a sample a unit: the beginning and the end.
    half = (width - len(_GAP)) // 2 * samples_per_character
    windows = [_Window(0.0, half), _Window(timeline.span - half * unit, half)]
    return _Raster(windows, unit, samples_per_character)


class _StageOps:
    """The ops of one stage by time; calls of `at` must have increasing times."""

    def __init__(self, timeline: Timeline, stage: int) -> None:
        n_stages = timeline.schedule.stages
        self._spans = sorted(
            (*span, op) for op, span in timeline.spans.items() if op.virtual % n_stages == stage
        )
        self._next = 0

    def at(self, time: float) -> Op | None:
        while self._next < len(self._spans):
            start, end, op = self._spans[self._next]
            if time < end:
                return op if start <= time else None
            self._next += 1
        return None


def _coloured(ops: Sequence[Op | None], schedule: Schedule, numbered: bool) -> Text:
    """Two samples a character: a block in one colour, or half a block of each colour.

    A block has the microbatch's number if there is room.
    """
    text = Text()
    pairs = zip(ops[::2], ops[1::2], strict=True)
    for (left, right), run in groupby(pairs):
        n = len(list(run))
        if left is None:
            if right is None:
                text.append("·" * n, style="bright_black")
            else:
                text.append("▐" * n, style=colour_of(right, schedule))
        elif right is None:
            text.append("▌" * n, style=colour_of(left, schedule))
        elif left != right:
            style = f"{colour_of(left, schedule)} on {colour_of(right, schedule)}"
            text.append("▌" * n, style=style)
        else:
            number = str(left.microbatch)
            if not numbered or len(number) > n:
                number = ""
            text.append(number.center(n), style=_block_style(colour_of(left, schedule)))
    return text


def _lettered(ops: Sequence[Op | None]) -> Text:
    text = Text()
    for op, run in groupby(ops):
        n = len(list(run))
        if op is None:
            text.append("." * n)
        elif n > 1 + len(str(op.microbatch)):
            text.append(f"{op.kind}{op.microbatch}".ljust(n, "-"))
        else:
            text.append(op.kind * n)
    return text


def _axis(timeline: Timeline, raster: _Raster, label_width: int) -> Text:
    parts = []
    for start, n_samples in raster.windows:
        end = f"{min(timeline.span, start + n_samples * raster.step):.4g}"
        n_characters = n_samples // raster.samples_per_character
        parts.append(f"{start:.4g}".ljust(n_characters - len(end)) + end)
    return Text(" " * label_width + (" " * len(_GAP)).join(parts), style="dim")


def _legend(schedule: Schedule, label_width: int) -> Text:
    text = Text(" " * label_width)
    for kind in schedule.kinds:
        for chunk in range(min(schedule.chunks, _LEGEND_CHUNKS)):
            colour = colour_of(Op(kind, 0, chunk * schedule.stages), schedule)
            label = f" {chunk} " if schedule.chunks > 1 else "   "
            text.append(label, style=_block_style(colour))
        chunk_note = " of each chunk" if schedule.chunks > 1 else ""
        text.append(f" {WORDS[kind]}{chunk_note}   ")
    return text.append("·", style="bright_black").append(" idle")


def colour_of(op: Op, schedule: Schedule) -> str:
    """Returns the colour #rrggbb of an op, by kind and chunk.

    Odd microbatches are a little paler, so that neighbours differ.
    """
    first, last = _RAMPS[op.kind]
    share = (op.virtual // schedule.stages + 0.5) / schedule.chunks
    white = _ODD_MICROBATCH_WHITE * (op.microbatch % 2)
    colour = "#"
    for a, b in zip(_channels(first), _channels(last), strict=True):
        channel = a + (b - a) * share
        colour += f"{round(channel + (255 - channel) * white):02x}"
    return colour


def _channels(colour: str) -> list[int]:
    """Red, green and blue of #rrggbb."""
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _block_style(background: str) -> str:
    return f"{_ink(background)} on {background}"


def _ink(background: str) -> str:
    """The colour of text that can be read on a background: dark if that is bright."""
    red, green, blue = _channels(background)
    luma = 0.299 * red + 0.587 * green + 0.114 * blue  # ITU-R BT.601
    return "#111827" if luma > 140 else "#ffffff"


def draw(timelines: Sequence[Timeline], png: str) -> None:
    """Writes a PNG, 2000 pixels wide, with a panel for each timeline on one time scale.

    Raises ConfigError if it cannot be written.
    """
    # Imported here: matplotlib takes 0.3 to 0.5 s, which the terminal does not need.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # In inches.
    panel_heights = [0.62 + 0.2 * timeline.schedule.stages for timeline in timelines]
    height = sum(panel_heights) + 0.45
    width = 10.0
    figure = Figure(figsize=(width, height), dpi=200, facecolor="white")
    longest = max(timeline.span for timeline in timelines)
    top = height
    for timeline, panel_height in zip(timelines, panel_heights, strict=True):
        bottom = top - panel_height
        axes = figure.add_axes((0.07, bottom / height, 0.91, (panel_height - 0.42) / height))
        axes.set_xlim(0, longest)
        _draw_panel(axes, timeline, points=0.91 * width * 72 / longest)
        top = bottom
    numbered = any(axes.texts for axes in figure.axes)
    caption = _caption(timelines, numbered)
    figure.text(0.07, 0.1 / height, caption, fontsize=8, color=PALE)
    try:
        FigureCanvasAgg(figure).print_png(str(Path(png).expanduser()))
    except OSError as error:
        raise ConfigError(f"{png}: cannot write the Gantt chart: {error.strerror}") from error


def _draw_panel(axes: Axes, timeline: Timeline, points: float) -> None:
    """points: the width of one unit of time, in 1/72 inch."""
    schedule = timeline.schedule
    bars: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for op, (start, end) in sorted(timeline.spans.items()):
        key = (colour_of(op, schedule), op.virtual % schedule.stages)
        bars.setdefault(key, []).append((start, end - start))
    for (colour, stage), spans in sorted(bars.items()):
        axes.broken_barh(
            spans,
            (stage - 0.46, 0.92),
            facecolors=colour,
            edgecolor="white",
            linewidth=min(0.6, 0.15 * points * min(length for _, length in spans)),
        )
    for op, (start, end) in timeline.spans.items():
        number = str(op.microbatch)
        if (end - start) * points > 4.5 * len(number) + 2:
            axes.text(
                (start + end) / 2,
                op.virtual % schedule.stages + 0.04,
                number,
                fontsize=6,
                color=_ink(colour_of(op, schedule)),
                ha="center",
                va="center",
            )

    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.set_facecolor("#f1f3f5")
    axes.set_yticks(range(schedule.stages), [f"stage {stage}" for stage in range(schedule.stages)])
    axes.tick_params(length=0, labelsize=7, colors=PALE, pad=3)
    axes.spines[:].set_visible(False)
    facts = f"bubble {timeline.bubble:.1%}"
    most_in_flight = max(in_flight(schedule))
    if most_in_flight:
        facts += f"   {most_in_flight} in flight"
    axes.set_title(title(schedule), loc="left", fontsize=9.5, fontweight="bold", color=INK, pad=4)
    axes.set_title(facts, loc="right", fontsize=8.5, color=INK, pad=4)


def _caption(timelines: Sequence[Timeline], numbered: bool) -> str:
    hues = {"F": "blue", "B": "orange", "W": "green"}
    kinds = dict.fromkeys(kind for timeline in timelines for kind in timeline.schedule.kinds)
    caption = ", ".join(f"{hues[kind]}: {WORDS[kind]}" for kind in kinds)
    if any(timeline.schedule.chunks > 1 for timeline in timelines):
        caption += "; darker: later chunks"
    if numbered:
        caption += "; numbers are microbatches"
    clocks = dict.fromkeys(timeline.clock for timeline in timelines)
    return f"{caption}; clock: {', '.join(clocks)}"
