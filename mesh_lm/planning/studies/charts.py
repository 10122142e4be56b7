"""Pictures of studies, from their rows. matplotlib is imported only where one is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from mesh_lm.planning.studies.replica_bytes import BytesRow

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
