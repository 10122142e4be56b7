"""Pictures of studies, from their rows. matplotlib is imported only where one is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from mesh_lm.planning.studies.replica_bytes import BytesRow
from mesh_lm.planning.studies.strategies import (
    TIE,
    StrategyRow,
    best_of,
    points_of,
    winner,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#20262c"
SOFT = "#5d6873"
GRID = "#e6e8e7"
PAPER = "#ffffff"
GIB = 2**30
PREDICTED = "predicted, never measured"
_SMALL = 8.5
"""Size of small text, in points."""

REPLICA_COLOURS = {
    "DDP": "#2f6db3",
    "DDP, bf16 sums": "#6a9bd1",
    "DDP, int8 sums": "#9cc0e6",
    "DDP in two levels": "#1f4f85",
    "ZeRO-1": "#b9504a",
    "ZeRO-2": "#e08e2b",
    "distributed": "#2b9a86",
    "distributed, int8 sums": "#83c9bc",
    "ZeRO-3": "#8a63b8",
    "FSDP": "#c9719f",
}


STRATEGY_COLOURS = {
    "DDP": "#9cc0e6",
    "ZeRO-1": "#6a9bd1",
    "ZeRO-2": "#5488c4",
    "distributed": "#3f76b5",
    "ZeRO-3": "#1f4f85",
    "FSDP": "#2b7f8f",
    "HSDP": "#5aa3a8",
    "TP": "#f3c98b",
    "TP + SP": "#e9a94f",
    "TP + ZeRO": "#d0841f",
    "PP": "#c98f86",
    "3D": "#a8463f",
    "CP + ZeRO-3": "#8a63b8",
}
"""Strategy -> its colour: pure data parallelism is blue, hybrids are orange and red."""
PURE_COLOUR = "#1f4f85"
HYBRID_COLOUR = "#d0841f"
_LIGHT = {"DDP", "TP", "TP + SP", "PP", "HSDP"}
"""Colours on which text is dark."""


class Label(NamedTuple):
    """A text at the end of a line."""

    height: float
    text: str
    colour: str


@contextmanager
def _style() -> Iterator[None]:
    from matplotlib import rc_context

    # DejaVu comes with matplotlib, so that pictures are the same everywhere.
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK}):
        yield


def _new_figure(width: float, height: float, title: str, subtitle: str) -> Figure:
    """Returns a figure, in inches, with a heading."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=160, facecolor=PAPER)
    left = 0.5 / width
    figure.text(left, 1 - 0.3 / height, title, fontsize=12, fontweight="bold", va="center")
    figure.text(left, 1 - 0.55 / height, subtitle, fontsize=_SMALL, color=SOFT, va="center")
    return figure


def _plain(axes: Axes, title: str = "", *, grid: str = "both") -> None:
    axes.grid(axis=grid, color=GRID, linewidth=0.8)  # pyright: ignore[reportArgumentType]
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=SOFT, labelsize=_SMALL)
    if title:
        axes.set_title(title, loc="left", fontsize=9, color=INK, pad=8)


def _gpu_axis(axes: Axes, counts: Sequence[int], label: str = "GPUs") -> None:
    """Makes the horizontal axis one of GPUs, in powers of two."""
    from matplotlib.ticker import NullFormatter, NullLocator

    axes.set_xscale("log", base=2)
    shown = _thinned(counts)
    axes.set_xticks(shown, [f"{n:,}" for n in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(label, fontsize=_SMALL, color=SOFT)


def _thinned(counts: Sequence[int]) -> list[int]:
    """Returns at most nine of the numbers, those that are too near to another left out."""
    counts = sorted(set(counts))
    if len(counts) < 2:
        return counts
    least_ratio = (counts[-1] / counts[0]) ** (1 / 9)
    shown: list[int] = []
    for n in reversed(counts):
        if not shown or shown[-1] / n >= max(1.3, 0.99 * least_ratio):
            shown.append(n)
    return shown[::-1]


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Returns heights that are at least `gap` apart, as near to the given ones as that allows, in
    the same order. heights: ascending.
    """
    placed = list(heights)
    for _ in range(200):
        moved = False
        for i in range(len(placed) - 1):
            overlap = gap - (placed[i + 1] - placed[i])
            if overlap > 1e-9:
                placed[i] -= overlap / 2
                placed[i + 1] += overlap / 2
                moved = True
        if not moved:
            break
    return placed


def _merged(labels: Iterable[Label], distance: float) -> list[Label]:
    """Returns the labels, ascending; those of lines that cannot be told apart are one.

    distance: the least between two lines that can.
    """
    merged: list[Label] = []
    for label in sorted(labels, key=lambda label: label.height):
        if merged and label.height - merged[-1].height < distance:
            text = f"{merged[-1].text}, {label.text}"
            merged[-1] = merged[-1]._replace(text=text, colour=INK)
            continue
        merged.append(label)
    return merged


def _label_ends(axes: Axes, labels: Iterable[Label], gap: float) -> None:
    """Writes labels to the right of the axes, apart from each other. gap: share of its height."""
    low, high = axes.get_ylim()
    ordered = [
        label._replace(text=textwrap.fill(label.text, 22))
        for label in _merged(labels, 0.01 * (high - low))
    ]
    heights = spread([label.height for label in ordered], gap * (high - low))
    across = axes.get_yaxis_transform()
    for label, height in zip(ordered, heights, strict=True):
        axes.text(
            *(1.02, height, label.text),
            transform=across, color=label.colour, fontsize=_SMALL, va="center",
        )  # fmt: skip


# Figure 1: bytes of data parallelism.


def draw_replica_bytes(rows: Sequence[BytesRow], config: str) -> Figure:
    """Returns the picture of `replica_bytes`: bytes per parameter over GPUs, and beside it where
    they go at the largest number of GPUs.
    """
    counts = sorted({row.gpus for row in rows})
    with _style():
        figure = _new_figure(
            *(10.2, 4.6),
            "Data parallelism sends hardly more from 16 GPUs on: the type of the sums decides",
            f"{config}: each GPU in one step, by closed forms; no program was compiled",
        )
        left = figure.add_axes((0.06, 0.12, 0.355, 0.66))
        right = figure.add_axes((0.73, 0.12, 0.22, 0.66))
        _draw_bytes_over_gpus(left, rows, counts)
        _draw_networks(right, [row for row in rows if row.gpus == counts[-1] and not row.status])
    return figure


def _draw_bytes_over_gpus(axes: Axes, rows: Sequence[BytesRow], counts: Sequence[int]) -> None:
    ends: list[Label] = []
    for strategy in dict.fromkeys(row.strategy for row in rows):
        served = [row for row in rows if row.strategy == strategy and not row.status]
        colour = REPLICA_COLOURS.get(strategy, SOFT)
        if not served:
            continue
        heights = [row.per_parameter for row in served]
        axes.plot([row.gpus for row in served], heights, color=colour, linewidth=1.6)
        ends.append(Label(heights[-1], strategy, colour))
    axes.set_ylim(0, 1.05 * max(row.per_parameter for row in rows) or 1)
    _plain(axes, "bytes sent for each parameter of the model")
    _gpu_axis(axes, counts)
    _label_ends(axes, ends, 0.055)


def _draw_networks(axes: Axes, rows: Sequence[BytesRow]) -> None:
    """Draws stacked bars: bytes inside nodes, and between them."""
    rows = sorted(rows, key=lambda row: (row.between, row.sent))
    positions = range(len(rows))
    inside = [row.inside / GIB for row in rows]
    between = [row.between / GIB for row in rows]
    axes.barh(positions, between, 0.62, color="#1f5563", label="groups over several nodes")
    axes.barh(positions, inside, 0.62, left=between, color="#b8cfcf", label="inside a node")
    axes.set_yticks(list(positions), [row.strategy for row in rows])
    axes.invert_yaxis()
    gpus = rows[0].gpus if rows else 0
    _plain(axes, f"GiB on {gpus:,} GPUs, by network", grid="x")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(
        loc="lower right", bbox_to_anchor=(1.04, 1.1), ncols=2, frameon=False, fontsize=_SMALL,
        handlelength=0.9, columnspacing=1.0, borderpad=0,
    )  # fmt: skip


# Figures 2 and 6: strategies.


def draw_winners(rows: Sequence[StrategyRow], about: str, batch: int) -> Figure:
    """Returns the picture of which strategy to use for which model on how many GPUs.

    about: the GPU and the batch, in words. batch: sequences of a step.
    """
    by_point = points_of(rows)
    sizes = list(dict.fromkeys(size for size, _ in by_point))
    counts = sorted({gpus for _, gpus in by_point})
    width = 1.5 + 0.82 * len(counts)
    height = 1.9 + 0.52 * len(sizes)
    with _style():
        figure = _new_figure(
            *(max(width, 7.5), height),
            f"Which strategy to use: the simplest within {TIE:.0%} of the fastest on paper",
            f"{about}; MFU at the fast end, {PREDICTED}",
        )
        axes = figure.add_axes((0.07, 0.62 / height, 0.91, (height - 1.75) / height))
        used: list[str] = []
        for (size, gpus), of_point in by_point.items():
            best = winner(of_point)
            if best:
                used.append(best.strategy)
            _draw_cell(axes, counts.index(gpus), sizes.index(size), best)
        axes.set_xlim(-0.5, len(counts) - 0.5)
        axes.set_ylim(-0.5, len(sizes) - 0.5)
        _mark_batch(axes, sum(gpus <= batch for gpus in counts), len(counts))
        axes.set_xticks(range(len(counts)), [f"{n:,}" for n in counts])
        axes.set_yticks(range(len(sizes)), [size.upper() for size in sizes])
        axes.set_xlabel("GPUs", fontsize=_SMALL, color=SOFT)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, colors=SOFT, labelsize=_SMALL)
        _legend_of_strategies(figure, height, [name for name in STRATEGY_COLOURS if name in used])
    return figure


def _mark_batch(axes: Axes, n_up_to_batch: int, n_counts: int) -> None:
    """Draws a line behind the numbers of GPUs that have a sequence of a step each."""
    if not 0 < n_up_to_batch < n_counts:
        return
    x = n_up_to_batch - 0.5
    axes.axvline(x, ymax=1.06, color=INK, linewidth=1.2, linestyle=(0, (3, 2)), clip_on=False)
    axes.annotate(
        "more GPUs than sequences", (x, 1), (4, 4), xycoords=("data", "axes fraction"),
        textcoords="offset points", fontsize=_SMALL, color=INK,
    )  # fmt: skip


def _draw_cell(axes: Axes, x: int, y: int, best: StrategyRow | None) -> None:
    from matplotlib.patches import Rectangle

    colour = STRATEGY_COLOURS[best.strategy] if best else "#f1f2f1"
    axes.add_patch(Rectangle((x - 0.48, y - 0.47), 0.96, 0.94, facecolor=colour, linewidth=0))
    if best is None:
        axes.text(x, y, "none fits", ha="center", va="center", fontsize=7, color=SOFT)
        return
    ink = INK if best.strategy in _LIGHT else PAPER
    name = best.strategy + ("*" if best.compiled_fits is not None else "")
    axes.text(x, y + 0.16, name, ha="center", va="center", fontsize=7.2, color=ink)
    axes.text(
        *(x, y - 0.22, f"{best.mfu_fast or 0:.0%}"),
        ha="center", va="center", fontsize=7.2, color=ink,
    )  # fmt: skip


def _legend_of_strategies(figure: Figure, height: float, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    keys = [Patch(color=STRATEGY_COLOURS[name], label=name) for name in names]
    figure.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(0.055, 1 - 0.68 / height), ncols=8,
        frameon=False, fontsize=_SMALL, handlelength=0.9, columnspacing=1.2, borderpad=0,
    )  # fmt: skip


def draw_pure_and_hybrid(rows: Sequence[StrategyRow], about: str) -> Figure:
    """Returns the picture of the best of pure data parallelism against the best hybrid, over GPUs,
    a panel for each size of model.
    """
    by_point = points_of(rows)
    sizes = list(dict.fromkeys(size for size, _ in by_point))
    counts = sorted({gpus for _, gpus in by_point})
    n_columns = min(4, len(sizes))
    n_rows = -(-len(sizes) // n_columns)
    height = 1.0 + 2.25 * n_rows
    n_served, n_level = _level_points(by_point)
    with _style():
        figure = _new_figure(
            *(max(2.6 * n_columns, 7.5), height),
            f"Pure data parallelism is within {TIE:.0%} of every hybrid at {n_level} of the "
            f"{n_served} points that it serves",
            f"MFU from the slow to the fast end, on paper, {PREDICTED}; {about}",
        )
        top = 1 - 1.15 / height
        panels = figure.subplots(n_rows, n_columns, sharex=True, sharey=True, squeeze=False)
        figure.subplots_adjust(
            left=0.06, right=0.985, top=top, bottom=0.55 / height, wspace=0.08, hspace=0.32
        )
        for axes in panels.flat[len(sizes) :]:
            axes.set_visible(False)
        for i, (axes, size) in enumerate(zip(panels.flat, sizes, strict=False)):
            points = {gpus: by_point[size, gpus] for gpus in counts}
            _draw_families(axes, points)
            _plain(axes, f"{size.upper()} parameters")
            axes.yaxis.set_major_formatter("{x:.0%}")
            is_lowest = i + n_columns >= len(sizes)
            _gpu_axis(axes, _every_third(counts), "GPUs" if is_lowest else "")
            axes.tick_params(labelbottom=True)
        panels.flat[0].set_ylim(0)
        _legend_of_families(figure, height)
    return figure


def _every_third(counts: Sequence[int]) -> Sequence[int]:
    return counts[::3] if len(counts) > 5 else counts


def _level_points(by_point: Mapping[tuple[str, int], Sequence[StrategyRow]]) -> tuple[int, int]:
    """Returns the points that pure data parallelism serves, and those of them where it is within
    the formulas' error of the best hybrid.
    """
    n_served = 0
    n_level = 0
    for rows in by_point.values():
        pure = best_of(rows, pure=True)
        hybrid = best_of(rows, pure=False)
        if pure is None:
            continue
        n_served += 1
        n_level += hybrid is None or pure.seconds <= (1 + TIE) * hybrid.seconds
    return n_served, n_level


def _draw_families(axes: Axes, points: Mapping[int, Sequence[StrategyRow]]) -> None:
    for pure, colour in ((True, PURE_COLOUR), (False, HYBRID_COLOUR)):
        best = {gpus: best_of(rows, pure=pure) for gpus, rows in points.items()}
        served = {gpus: row for gpus, row in best.items() if row}
        fast = [row.mfu_fast or 0 for row in served.values()]
        slow = [row.mfu_slow or 0 for row in served.values()]
        axes.fill_between(list(served), slow, fast, color=colour, alpha=0.22, linewidth=0)
        axes.plot(list(served), fast, color=colour, linewidth=1.6)
        unserved = [gpus for gpus, row in best.items() if row is None]
        height = 0.012 if pure else 0.045
        axes.plot(
            *(unserved, [height] * len(unserved)),
            color=colour, marker="x", markersize=4, linestyle="none", clip_on=False,
        )  # fmt: skip


def _legend_of_families(figure: Figure, height: float) -> None:
    from matplotlib.lines import Line2D

    keys = [
        Line2D([], [], color=PURE_COLOUR, label="pure: DDP, ZeRO, FSDP, HSDP"),
        Line2D([], [], color=HYBRID_COLOUR, label="hybrid: TP, PP, 3D"),
        Line2D([], [], color=SOFT, marker="x", linestyle="none", label="no layout serves or fits"),
    ]
    figure.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(0.05, 1 - 0.66 / height), ncols=3,
        frameon=False, fontsize=_SMALL, borderpad=0,
    )  # fmt: skip


def draw_side_by_side(rows: Sequence[StrategyRow], limit_gib: float, about: str) -> Figure:
    """Returns the picture of all strategies at one point: memory, bytes by network, efficiency.

    rows: those of one point. limit_gib: the memory that a run may take, its margin deducted.
    """
    n_fitting = sum(row.fits for row in rows)
    n_too_large = sum(row.peak_gib is not None and not row.fits for row in rows)
    first = rows[0]
    height = 1.75 + 0.33 * len(rows)
    positions = list(range(len(rows)))
    with _style():
        figure = _new_figure(
            *(10.6, height),
            f"{first.size.upper()} parameters on {first.gpus:,} GPUs: {n_fitting} strategies fit, "
            f"{n_too_large} do not",
            f"{about}; the fastest layout of each, on paper, {PREDICTED}",
        )
        bottom = 0.4 / height
        tall = (height - 1.75) / height
        memory = figure.add_axes((0.115, bottom, 0.255, tall))
        sent = figure.add_axes((0.415, bottom, 0.255, tall))
        efficiency = figure.add_axes((0.715, bottom, 0.255, tall))
        _draw_memory(memory, rows, limit_gib)
        _draw_sent(sent, rows)
        _draw_mfu(efficiency, rows)
        for axes in (memory, sent, efficiency):
            axes.set_ylim(len(rows) - 0.5, -0.5)
            axes.set_yticks(positions, [row.strategy for row in rows] if axes is memory else [])
    return figure


def _draw_memory(axes: Axes, rows: Sequence[StrategyRow], limit: float) -> None:
    positions = range(len(rows))
    widest = 2.6 * limit
    state = [min(row.state_gib or 0, widest) for row in rows]
    peak = [min(max(row.peak_gib or 0, row.state_gib or 0), widest) for row in rows]
    axes.barh(positions, peak, 0.62, color="#d9c3a5", label="peak")
    axes.barh(positions, state, 0.62, color="#b06a16", label="weights, gradients, moments")
    axes.axvline(limit, color=INK, linewidth=1)
    axes.set_xlim(0, widest)
    for position, row in enumerate(rows):
        if max(row.peak_gib or 0, row.state_gib or 0) > widest:
            text = f"{max(row.peak_gib or 0, row.state_gib or 0):,.0f} "
            axes.text(widest, position, text, ha="right", va="center", fontsize=7.5)
    _plain(axes, grid="x")
    _column_head(axes, f"Memory, GiB on each GPU: {limit:.0f} fit")


def _draw_sent(axes: Axes, rows: Sequence[StrategyRow]) -> None:
    positions = range(len(rows))
    between = [row.between_gib or 0 for row in rows]
    inside = [row.inside_gib or 0 for row in rows]
    axes.barh(positions, between, 0.62, color="#1f5563", label="between nodes")
    axes.barh(positions, inside, 0.62, left=between, color="#b8cfcf", label="inside a node")
    _plain(axes, grid="x")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    _column_head(axes, "Sent in a step, GiB by each GPU")


def _draw_mfu(axes: Axes, rows: Sequence[StrategyRow]) -> None:
    for position, row in enumerate(rows):
        if row.fits and row.mfu_fast and row.mfu_slow:
            colour = STRATEGY_COLOURS[row.strategy]
            axes.barh(position, row.mfu_slow, 0.62, color=colour)
            axes.barh(
                *(position, row.mfu_fast - row.mfu_slow, 0.62),
                left=row.mfu_slow, color=colour, alpha=0.45,
            )  # fmt: skip
            text = f" {row.mfu_slow:.0%} to {row.mfu_fast:.0%}"
            axes.text(row.mfu_fast, position, text, va="center", fontsize=7.5)
            continue
        words = row.status.partition(":")[0]
        axes.text(0.004, position, words, va="center", fontsize=7.5, color=SOFT)
    highest = max((row.mfu_fast or 0 for row in rows if row.fits), default=0.5)
    axes.set_xlim(0, 1.4 * highest)
    _plain(axes, grid="x")
    axes.xaxis.set_major_formatter("{x:.0%}")
    _column_head(axes, "MFU, slow to fast end", legend=False)


def _column_head(axes: Axes, title: str, *, legend: bool = True) -> None:
    axes.annotate(
        title, (0, 1), (0, 30), xycoords="axes fraction", textcoords="offset points", fontsize=9.5,
        fontweight="bold",
    )  # fmt: skip
    if legend:
        axes.legend(
            loc="lower left", bbox_to_anchor=(-0.01, 1.025), ncols=2, frameon=False, fontsize=7.5,
            handlelength=0.8, columnspacing=1.0, borderpad=0,
        )  # fmt: skip
