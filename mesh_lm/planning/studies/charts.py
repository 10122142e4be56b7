"""Pictures of studies, from their rows. matplotlib is imported only where one is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh_lm.planning.studies.replica_bytes import BytesRow
from mesh_lm.planning.studies.scaling import ScalingRow, ShareRow
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
_CHARACTER_WIDTH = 0.108
"""Inches of a character of a title in 12 points."""

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
    "EP, gathered": "#d8a24a",
    "EP, padded": "#c77f1a",
    "EP, padded + distributed": "#9c5a10",
    "EP, padded + ZeRO-3": "#6b3d0b",
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
    # Inches that a title in 12 points needs, at most.
    needed = _CHARACTER_WIDTH * len(title)
    points = 12 * min(1, (width - 0.7) / needed)
    figure.text(left, 1 - 0.3 / height, title, fontsize=points, fontweight="bold", va="center")
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
    """Returns at most eleven of the numbers, those that are too near to another left out."""
    counts = sorted(set(counts))
    if len(counts) < 2:
        return counts
    least_ratio = (counts[-1] / counts[0]) ** (1 / 10)
    shown: list[int] = []
    for n in reversed(counts):
        if not shown or shown[-1] / n >= max(1.3, 0.99 * least_ratio):
            shown.append(n)
    return shown[::-1]


def spread(heights: Sequence[float], extents: Sequence[float]) -> list[float]:
    """Returns the middles of texts that do not overlap, as near to the given ones as that allows,
    in the same order.

    heights: the middles, ascending. extents: the height of each text.
    """
    placed = list(heights)
    for _ in range(200):
        moved = False
        for i in range(len(placed) - 1):
            gap = (extents[i] + extents[i + 1]) / 2
            overlap = gap - (placed[i + 1] - placed[i])
            if overlap > 1e-9:
                placed[i] -= overlap / 2
                placed[i + 1] += overlap / 2
                moved = True
        if not moved:
            break
    return placed


def _merged(labels: Iterable[Label], distance: float) -> list[Label]:
    """Returns the labels, ascending; those of lines that look like one are one.

    distance: the least between two lines that look like two.
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
    """Writes labels to the right of the axes, apart from each other.

    gap: the height of a line, as a share of the axes.
    """
    low, high = axes.get_ylim()
    ordered = [
        label._replace(text=textwrap.fill(label.text, 24))
        for label in _merged(labels, 0.01 * (high - low))
    ]
    extents = [gap * (high - low) * (1 + label.text.count("\n")) for label in ordered]
    heights = spread([label.height for label in ordered], extents)
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
            _title_of_bytes(rows),
            f"{config}: each GPU in one step, by closed forms; no program was compiled",
        )
        left = figure.add_axes((0.06, 0.12, 0.355, 0.66))
        right = figure.add_axes((0.73, 0.12, 0.22, 0.66))
        _draw_bytes_over_gpus(left, rows, counts)
        _draw_networks(right, [row for row in rows if row.gpus == counts[-1] and not row.status])
    return figure


def _title_of_bytes(rows: Sequence[BytesRow]) -> str:
    if any(row.strategy.startswith("EP") for row in rows):
        return (
            "A mixture of experts: expert parallelism sends tokens, data parallelism sends weights"
        )
    return "Data parallelism sends hardly more from 16 GPUs on: the type of the sums decides"


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
        *(x, y - 0.22, f"{_fast_mfu(best):.0%}"),
        ha="center", va="center", fontsize=7.2, color=ink,
    )  # fmt: skip


def _fast_mfu(row: StrategyRow) -> float:
    return row.mfu[1] if row.mfu else 0.0


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
        slow = [row.mfu[0] if row.mfu else 0.0 for row in served.values()]
        fast = [_fast_mfu(row) for row in served.values()]
        axes.fill_between(list(served), slow, fast, color=colour, alpha=0.22, linewidth=0)
        axes.plot(list(served), fast, color=colour, linewidth=1.6, marker="o", markersize=2.2)
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
    axes.locator_params(axis="x", nbins=4)
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


# Figures 3, 4 and 5: scaling.

_BAND_COLOUR = "#2f6db3"
_PUBLISHED_COLOUR = "#b9504a"


def draw_throughput(rows: Sequence[ScalingRow], title: str, about: str) -> Figure:
    """Returns the picture of tokens per second over GPUs, with the line of perfect scaling from the
    first point.
    """
    served = [row for row in rows if row.tokens_fast and row.tokens_slow]
    with _style():
        figure = _new_figure(7.6, 4.8, title, about)
        axes = figure.add_axes((0.11, 0.115, 0.855, 0.685))
        if served:
            first = served[0]
            counts = [row.gpus for row in served]
            fast = [row.tokens_fast or 0 for row in served]
            slow = [row.tokens_slow or 0 for row in served]
            ideal = [(first.tokens_fast or 0) * gpus / first.gpus for gpus in counts]
            axes.plot(counts, ideal, color=SOFT, linewidth=1, linestyle=(0, (4, 3)))
            _draw_band(axes, counts, slow, fast)
            _annotate_end(axes, counts[-1], ideal[-1], "perfect scaling", SOFT)
            axes.set_yscale("log", base=10)
        _mark_unserved(axes, rows)
        _plain(axes, "tokens per second, slow to fast end")
        axes.yaxis.set_major_formatter(_short_number)
        axes.yaxis.set_minor_formatter(_short_number)
        axes.tick_params(which="both", length=0, colors=SOFT, labelsize=_SMALL)
        _gpu_axis(axes, [row.gpus for row in rows])
    return figure


def draw_efficiency(rows: Sequence[ScalingRow], title: str, about: str, *, named: bool) -> Figure:
    """Returns the picture of the TFLOP/s of each GPU over GPUs, beside what is published.

    named: whether each point has the name of its config, as models that grow do.
    """
    served = [row for row in rows if row.tflops_fast and row.tflops_slow]
    published = [row for row in rows if row.published_tflops]
    with _style():
        figure = _new_figure(8.6, 4.8, title, about)
        axes = figure.add_axes((0.075, 0.115, 0.9, 0.64))
        counts = [row.gpus for row in served]
        fast = [row.tflops_fast or 0 for row in served]
        slow = [row.tflops_slow or 0 for row in served]
        _draw_band(axes, counts, slow, fast)
        heights = [row.published_tflops or 0 for row in published]
        axes.plot(
            *([row.gpus for row in published], heights),
            color=_PUBLISHED_COLOUR, marker="D", markersize=5, linestyle="none",
        )  # fmt: skip
        axes.set_ylim(0, 1.18 * max([*fast, *heights, 1]))
        if named:
            _name_points(axes, served)
        _mark_unserved(axes, rows)
        _plain(axes, "TFLOP/s of each GPU, by Megatron-LM's formula")
        _gpu_axis(axes, [row.gpus for row in rows])
        _legend_of_scaling(
            figure,
            has_published=bool(published),
            has_unserved=any(row.status for row in rows),
        )
    return figure


def _draw_band(
    axes: Axes, counts: Sequence[int], slow: Sequence[float], fast: Sequence[float]
) -> None:
    axes.fill_between(counts, slow, fast, color=_BAND_COLOUR, alpha=0.22, linewidth=0)
    for heights in (slow, fast):
        axes.plot(
            *(counts, heights), color=_BAND_COLOUR, linewidth=1.2, marker="o", markersize=3
        )  # fmt: skip


def _mark_unserved(axes: Axes, rows: Sequence[ScalingRow]) -> None:
    """Draws a cross on the axis at each point that no layout serves."""
    gpus = [row.gpus for row in rows if row.status]
    axes.plot(
        *(gpus, [0.02] * len(gpus)), transform=axes.get_xaxis_transform(), color=SOFT, marker="x",
        markersize=5, linestyle="none",
    )  # fmt: skip


def _name_points(axes: Axes, rows: Sequence[ScalingRow]) -> None:
    for row in rows:
        name = row.config.rpartition("megatron_")[2].replace("_", ".").upper()
        highest = max(row.tflops_fast or 0, row.published_tflops or 0)
        axes.annotate(
            name, (row.gpus, highest), (0, 7), textcoords="offset points", ha="center",
            fontsize=_SMALL,
        )  # fmt: skip


def _annotate_end(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    axes.annotate(
        text, (x, y), (-4, 4), textcoords="offset points", ha="right", fontsize=_SMALL,
        color=colour,
    )  # fmt: skip


def _legend_of_scaling(figure: Figure, *, has_published: bool, has_unserved: bool) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    band = Patch(color=_BAND_COLOUR, alpha=0.35, label=f"slow to fast end, {PREDICTED}")
    keys: list[Any] = [band]
    if has_published:
        diamond = Line2D(
            *([], []), color=_PUBLISHED_COLOUR, marker="D", markersize=5, linestyle="none",
            label="Megatron-LM's program, as published",
        )  # fmt: skip
        keys.append(diamond)
    if has_unserved:
        keys.append(Line2D([], [], color=SOFT, marker="x", linestyle="none", label="no layout"))
    figure.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(0.05, 0.865), ncols=3, frameon=False,
        fontsize=_SMALL, borderpad=0,
    )  # fmt: skip


def _short_number(n: float, _: object = None) -> str:
    """Returns 1.2M for 1,200,000; empty for numbers that no tick should have."""
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= scale:
            leading = f"{n:.0e}"[0]
            return f"{n / scale:g}{unit}" if leading in "125" else ""
    return f"{n:g}"


# Figure 8: communication.

AXES_COLOURS = ("#1f5563", "#2f6db3", "#8a63b8", "#b06a16", "#2b9a86", "#b9504a", "#8f9432")
_SMALL_SHARE = 0.02
"""Share of all bytes below which kinds are drawn as one."""
_OTHERS = "others"


def draw_communication(shares: Sequence[ShareRow], about: str) -> Figure:
    """Returns the picture of communication by kind and axes: the bytes of each, and the share of
    the step that waits for it, a bar for each point.
    """
    points = list(dict.fromkeys((row.config, row.gpus) for row in shares))
    labels = _communication_labels(shares)
    n_legend_rows = -(-len(labels) // 3)
    height = 1.55 + 0.36 * len(points) + 0.19 * n_legend_rows
    waits = {
        point: sum(row.waits_share for row in shares if (row.config, row.gpus) == point)
        for point in points
    }
    least = min(waits.values())
    most = max(waits.values())
    with _style():
        figure = _new_figure(
            *(10.2, height),
            f"Compute waits for communication during {least:.0%} to {most:.0%} of a step",
            f"{about}; {PREDICTED}, at the fast end",
        )
        tall = 0.36 * len(points) / height
        bottom = 0.45 / height
        left = figure.add_axes((0.165, bottom, 0.37, tall))
        right = figure.add_axes((0.6, bottom, 0.37, tall))
        _draw_parts(left, shares, points, labels, waits=False)
        _draw_parts(right, shares, points, labels, waits=True)
        is_one_model = len({name for name, _ in points}) == 1
        names = [f"{gpus:,} GPUs" if is_one_model else f"{name}, {gpus:,}" for name, gpus in points]
        left.set_yticks(range(len(points)), names)
        right.set_yticks([])
        _plain(left, "share of the bytes that a GPU sends", grid="x")
        _plain(right, "share of the step that waits", grid="x")
        left.xaxis.set_major_formatter("{x:.0%}")
        right.xaxis.set_major_formatter("{x:.0%}" if most > 0.06 else "{x:.1%}")
        left.set_xlim(0, 1)
        _legend_of_communication(figure, labels, height)
    return figure


def _communication_labels(shares: Sequence[ShareRow]) -> dict[str, str]:
    """Returns a label -> its colour, for what is more than a small share of a point's bytes or of
    its step; then what remains.
    """
    sent_by_point: dict[tuple[str, int], float] = {}
    for row in shares:
        point = (row.config, row.gpus)
        sent_by_point[point] = sent_by_point.get(point, 0.0) + row.sent_gib
    axes_names: list[str] = []
    names: list[tuple[str, str]] = []
    for row in shares:
        sent = sent_by_point[row.config, row.gpus]
        is_large = row.waits_share >= 0.01 or (sent and row.sent_gib / sent >= _SMALL_SHARE)
        if is_large and (row.axes, row.kind) not in names:
            names.append((row.axes, row.kind))
            if row.axes not in axes_names:
                axes_names.append(row.axes)
    labels: dict[str, str] = {}
    for axes in axes_names:
        kinds = sorted(kind for name, kind in names if name == axes)
        base = AXES_COLOURS[axes_names.index(axes) % len(AXES_COLOURS)]
        for i, kind in enumerate(kinds):
            labels[f"{kind} over {axes}"] = _lighter(base, 0.24 * i)
    labels[_OTHERS] = "#c9cdd1"
    return labels


def _lighter(colour: str, share: float) -> str:
    """Returns a colour mixed with a share of white."""
    share = min(share, 0.75)
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(c + (255 - c) * share):02x}" for c in channels)


def _draw_parts(
    axes: Axes,
    shares: Sequence[ShareRow],
    points: Sequence[tuple[str, int]],
    labels: Mapping[str, str],
    *,
    waits: bool,
) -> None:
    """Draws a stacked bar for each point."""
    for position, point in enumerate(points):
        parts = dict.fromkeys(labels, 0.0)
        for row in shares:
            if (row.config, row.gpus) != point:
                continue
            label = f"{row.kind} over {row.axes}"
            value = row.waits_share if waits else row.sent_gib
            parts[label if label in parts else _OTHERS] += value
        total = 1.0 if waits else sum(parts.values()) or 1.0
        begin = 0.0
        for label, value in parts.items():
            axes.barh(position, value / total, 0.66, left=begin, color=labels[label], linewidth=0)
            begin += value / total
    axes.set_ylim(len(points) - 0.5, -0.5)


def _legend_of_communication(figure: Figure, labels: Mapping[str, str], height: float) -> None:
    from matplotlib.patches import Patch

    keys = [Patch(color=colour, label=label) for label, colour in labels.items()]
    figure.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(0.045, 1 - 0.7 / height), ncols=3,
        frameon=False, fontsize=_SMALL, handlelength=0.9, columnspacing=1.4, borderpad=0,
    )  # fmt: skip
