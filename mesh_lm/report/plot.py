"""The loss curve of a run, compared with compressors on the same text, and the loads of its
experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mesh_lm.report.rows import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

INK = "#1f2933"
PALE = "#7b8794"
GRID = "#e4e7eb"
TRAIN = "#2563eb"
HELDOUT = "#dc5a1c"
LABEL_GAP = 0.055
"""The least distance between two labels, as a fraction of the axis' height."""

LOSS_HEIGHT = 5.4
LOADS_HEIGHT = 2.8
"""Inches."""
MAX_ROWS = 128
"""The most experts, of all layers, that the heat map shows in a row each."""
MAX_COLUMNS = 400
"""Columns of the heat map; more are averaged."""


class _Label(NamedTuple):
    height: float
    """In the unit of the axis."""
    text: str
    colour: str


class _Loads(NamedTuple):
    """What the heat map of a run with experts shows."""

    steps: np.ndarray
    """[n]: of the columns."""
    values: np.ndarray
    """[rows, n]: loads over the mean."""
    n_layers: int
    title: str


def loss_curve(metrics_jsonl: Path, png: Path, yardsticks: Mapping[str, float]) -> None:
    """Draws training and held-out loss over the steps, 1800 x 1080 pixels; of a model with experts
    also their loads, in a heat map below.

    In bits per byte if the last row with a loss has train_bpb, with a line for each of `yardsticks`
    (name -> bits per byte on the same text, such as {"gzip -9": 2.31}); else in nats per token,
    without them: the bytes may be unknown from some step on. Damaged rows are left out. Draws
    nothing if there is no loss yet.
    """
    rows, _ = read(metrics_jsonl)
    figure = drawn(rows, yardsticks)
    if figure is None:
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure).print_png(str(png))


def drawn(rows: Sequence[Mapping[str, Any]], yardsticks: Mapping[str, float]) -> Figure | None:
    """Returns the picture of `loss_curve`; None if there is no loss yet."""
    bytewise = _is_bytewise(rows)
    train = _train_series(rows, "train_bpb" if bytewise else "loss")
    heldout = _series(rows, "heldout_bpb" if bytewise else "heldout_loss")
    if not train.size:
        return None
    loads = _loads(rows)

    # imported here, because it takes 0.3 to 0.5 s
    from matplotlib.figure import Figure

    height = LOSS_HEIGHT + LOADS_HEIGHT if loads else LOSS_HEIGHT
    figure = Figure(figsize=(9, height), dpi=200, facecolor="white")
    part = figure
    below = None
    if loads:
        heights = (LOSS_HEIGHT, LOADS_HEIGHT)
        part, below = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]

    axes = part.add_axes((0.065, 0.11, 0.74, 0.76))
    labels = [_plot_train(axes, train)]
    if heldout.size:
        labels.append(_plot_heldout(axes, heldout))
    if bytewise:
        for name, value in yardsticks.items():
            axes.axhline(value, color=PALE, linewidth=1.1, dashes=(5, 4), zorder=1)
            labels.append(_Label(value, f"{name} {value:.3f}", PALE))

    _style(axes)
    unit = "bits per byte" if bytewise else "nats per token"
    part.text(0.022, 0.945, f"Loss, {unit}", fontsize=13, fontweight="bold", color=INK)
    subtitle = "lower is better"
    if bytewise and yardsticks:
        subtitle += "; dashed: the same text, compressed"
    part.text(0.022, 0.9, subtitle, fontsize=9.5, color=PALE)
    _draw_labels(axes, labels)
    if loads and below:
        _draw_loads(below, loads, axes)
    return figure


def _is_bytewise(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last row with a loss has it in bits per byte, too."""
    for row in reversed(rows):
        if "train_bpb" in row:
            return True
        if row.get("loss") is not None:
            return False
    return False


def _train_series(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Returns the `_series` of a training loss, with its mean over several steps in rows that have
    one.
    """
    averaged = []
    for row in rows:
        mean = row.get(f"mean_{name}")
        averaged.append({**row, name: mean} if mean else row)
    return _series(averaged, name)


def _series(rows: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Returns [n, 2]: the step and the value of the rows that have one."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return np.array(points, dtype=float).reshape(-1, 2)


def _plot_train(axes: Axes, train: np.ndarray) -> _Label:
    smooth = _smooth(train)
    axes.plot(*train.T, color=TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(*smooth.T, color=TRAIN, linewidth=2, solid_capstyle="round")
    return _Label(smooth[-1, 1], f"training {smooth[-1, 1]:.3f}", TRAIN)


def _plot_heldout(axes: Axes, heldout: np.ndarray) -> _Label:
    size = 6 if len(heldout) <= 20 else 3
    axes.plot(
        *heldout.T,
        color=HELDOUT,
        marker="o",
        markersize=size,
        markeredgecolor="white",
        markeredgewidth=size / 6,
        linewidth=1,
    )
    return _Label(heldout[-1, 1], f"held-out {heldout[-1, 1]:.3f}", HELDOUT)


def _smooth(points: np.ndarray) -> np.ndarray:
    """Returns the mean over a fiftieth of the points around each; over fewer at the start, where
    the loss falls fast.
    """
    n = len(points)
    i = np.arange(n)
    reach = np.minimum(i // 3, n // 100)
    first = i - reach
    last = np.minimum(i + reach, n - 1)
    cumulative = np.concatenate([[0.0], np.cumsum(points[:, 1])])
    means = (cumulative[last + 1] - cumulative[first]) / (last + 1 - first)
    return np.stack([points[:, 0], means], axis=1)


def _style(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator, NullLocator

    # A loss falls fast first and then by hundredths, which would be flat on a linear axis.
    axes.set_yscale("log")
    axes.margins(x=0.01, y=0.06)
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(PALE)
    axes.tick_params(colors=INK, labelsize=9.5, length=0, pad=6)
    axes.set_xlabel("step", color=INK, fontsize=10)


def _draw_labels(axes: Axes, labels: list[_Label]) -> None:
    """Labels each line at its right end, and pushes labels apart if they would overlap."""
    axes_transform = axes.transData + axes.transAxes.inverted()
    y = -1.0
    for label in sorted(labels):
        line_y = float(axes_transform.transform((1.0, label.height))[1])
        y = max(y + LABEL_GAP, line_y)
        axes.text(
            1.015,
            y,
            label.text,
            transform=axes.transAxes,
            color=label.colour,
            fontsize=10,
            va="center",
        )


def _loads(rows: Sequence[Mapping[str, Any]]) -> _Loads | None:
    """Returns the loads of the experts in these rows; None without experts.

    Where they are too many to be seen, a layer has one row, which fades as its router collapses:
    the mean of the less busy half of its experts.
    """
    found = [(row["step"], row["expert_loads"]) for row in rows if "expert_loads" in row]
    if not found:
        return None
    steps_n = np.array([step for step, _ in found], float)
    loads_nLE = np.array([loads for _, loads in found], float)
    n, n_layers, n_experts = loads_nLE.shape

    if n_layers * n_experts <= MAX_ROWS:
        values_nR = loads_nLE.reshape(n, -1)
        title = "Load of each expert"
    else:
        values_nR = np.sort(loads_nLE)[:, :, : (n_experts + 1) // 2].mean(-1)
        title = "Load of the less busy half of each layer's experts"

    starts = np.arange(0, n, -(-n // MAX_COLUMNS))
    lengths = np.diff(starts, append=n)
    steps = np.add.reduceat(steps_n, starts) / lengths
    values = np.add.reduceat(values_nR, starts) / lengths[:, None]
    return _Loads(steps, values.T, n_layers, title)


def _draw_loads(part: SubFigure, loads: _Loads, loss_axes: Axes) -> None:
    """Draws the heat map, with steps at the same places as in the axes of the loss."""
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.ticker import MaxNLocator

    scale = LinearSegmentedColormap.from_list("loads", [TRAIN, "white", HELDOUT])
    colours = scale.with_extremes(bad=GRID)
    axes = part.add_axes((0.065, 0.17, 0.74, 0.57))
    steps = loads.steps
    between = (steps[1:] + steps[:-1]) / 2
    edges = [steps[0] - 0.5, *between, steps[-1] + 0.5]
    # Layers are 1, 2, ... on the axis, each around its number.
    heights = np.linspace(0.5, loads.n_layers + 0.5, len(loads.values) + 1)
    image = axes.pcolormesh(edges, heights, loads.values, cmap=colours, vmin=0, vmax=2)
    if len(loads.values) > loads.n_layers:
        for boundary in range(1, loads.n_layers):
            axes.axhline(boundary + 0.5, color=INK, linewidth=0.6)

    axes.set_xlim(loss_axes.get_xlim())
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10], integer=True))
    axes.set_ylim(loads.n_layers + 0.5, 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9.5, length=0, pad=6)
    axes.set_xlabel("step", color=INK, fontsize=10)
    axes.set_ylabel("layer", color=INK, fontsize=10)

    bar = part.colorbar(image, cax=part.add_axes((0.825, 0.17, 0.012, 0.57)), ticks=[0, 1, 2])
    bar.ax.set_yticklabels(["0: idle", "1: even", "2 and more"])
    bar.ax.tick_params(colors=INK, labelsize=9.5, length=0, pad=6)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]
    part.text(0.022, 0.88, loads.title, fontsize=13, fontweight="bold", color=INK)
    subtitle = "relative to the mean of the layer; layers with experts are counted from 1"
    part.text(0.022, 0.79, subtitle, fontsize=9.5, color=PALE)
