"""The loss curve of a run, compared with compressors on the same text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mesh_lm.report.rows import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, PALE, GRID = "#1f2933", "#7b8794", "#e4e7eb"
TRAIN, HELDOUT = "#2563eb", "#dc5a1c"
LABEL_GAP = 0.055
"""The least distance between two labels, as a fraction of the axis' height."""


def loss_curve(metrics_jsonl: Path, png: Path, yardsticks: Mapping[str, float]) -> None:
    """Draws training and held-out loss over the steps, 1800 x 1080 pixels.

    In bits per byte if the last row with a loss has train_bpb, with a line for each of `yardsticks`
    (name -> bits per byte on the same text, such as {"gzip -9": 2.31}); else in nats per token,
    without them: the bytes may be unknown from some step on. Damaged rows are left out. Draws
    nothing if there is no loss yet.
    """
    rows, _ = read(metrics_jsonl)
    bytewise = "train_bpb" in next(
        (row for row in reversed(rows) if row.get("loss") is not None or "train_bpb" in row), {}
    )
    unit = "bits per byte" if bytewise else "nats per token"
    name = "train_bpb" if bytewise else "loss"
    train = _series(
        [
            {name: row.get(name), **row}
            | ({name: row[f"mean_{name}"]} if row.get(f"mean_{name}") else {})
            for row in rows
        ],
        name,
    )
    heldout = _series(rows, "heldout_bpb" if bytewise else "heldout_loss")
    if not train.size:
        return

    # imported here, because it takes 0.3 to 0.5 s
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.4), dpi=200, facecolor="white")
    axes = figure.add_axes((0.065, 0.11, 0.74, 0.76))
    labels: list[tuple[float, str, str]] = []  # height, text, colour

    smooth = _smooth(train)
    axes.plot(*train.T, color=TRAIN, alpha=0.25, linewidth=0.8)
    axes.plot(*smooth.T, color=TRAIN, linewidth=2, solid_capstyle="round")
    labels.append((smooth[-1, 1], f"training {smooth[-1, 1]:.3f}", TRAIN))
    if heldout.size:
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
        labels.append((heldout[-1, 1], f"held-out {heldout[-1, 1]:.3f}", HELDOUT))
    for name, value in yardsticks.items() if bytewise else ():
        axes.axhline(value, color=PALE, linewidth=1.1, dashes=(5, 4), zorder=1)
        labels.append((value, f"{name} {value:.3f}", PALE))

    _style(axes)
    figure.text(0.022, 0.945, f"Loss, {unit}", fontsize=13, fontweight="bold", color=INK)
    subtitle = "lower is better" + (
        "; dashed: the same text, compressed" if bytewise and yardsticks else ""
    )
    figure.text(0.022, 0.9, subtitle, fontsize=9.5, color=PALE)
    _label_right(axes, labels)
    FigureCanvasAgg(figure).print_png(str(png))


def _series(rows: Sequence[Mapping[str, float | None]], name: str) -> np.ndarray:
    """Returns [n, 2]: the step and the value of the rows that have one."""
    return np.array(
        [(row["step"], row[name]) for row in rows if row.get(name) is not None], dtype=float
    ).reshape(-1, 2)


def _smooth(points: np.ndarray) -> np.ndarray:
    """Returns the mean over a fiftieth of the points around each; over fewer at the start, where
    the loss falls fast.
    """
    n, reach = len(points), len(points) // 100
    i = np.arange(n)
    first, last = i - np.minimum(i // 3, reach), np.minimum(i + np.minimum(i // 3, reach), n - 1)
    totals = np.concatenate([[0.0], np.cumsum(points[:, 1])])
    return np.stack([points[:, 0], (totals[last + 1] - totals[first]) / (last + 1 - first)], axis=1)


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


def _label_right(axes: Axes, labels: list[tuple[float, str, str]]) -> None:
    """Labels each line at its right end, and pushes labels apart if they would overlap."""
    to_axes = axes.transData + axes.transAxes.inverted()
    placed = -1.0
    for value, text, colour in sorted(labels):
        placed = max(placed + LABEL_GAP, float(to_axes.transform((1.0, value))[1]))
        axes.text(
            1.015, placed, text, transform=axes.transAxes, color=colour, fontsize=10, va="center"
        )
