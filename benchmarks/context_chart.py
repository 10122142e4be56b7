"""Draws docs/images/context.png from the results of context_lengths.py: what attention sends, and
the predicted step, by context length."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullFormatter, NullLocator

INK, SOFT, GRID, PAPER = "#20262c", "#5d6873", "#e6e8e7", "#ffffff"
FORMS = {
    "context_gather": ("#b06a16", "s"),
    "ulysses": ("#2f6db3", "o"),
    "ring": ("#2b9a86", "^"),
    "usp": ("#8a63b8", "D"),
}
"""Form -> its colour and the shape of its points, so that it is known without colour."""
WHOLE = "none"


def draw(data: Mapping[str, Any], to: Path) -> None:
    """Draws the chart. data: the results of record.py. The picture contains their digest, so that a
    test can detect a stale one."""
    tables = charted(data)
    # bundled with matplotlib, so the same everywhere
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK}):
        figure = Figure(figsize=(9.4, 6.2), dpi=200, facecolor=PAPER)
        above, below = figure.subplots(2, len(tables), sharey="row", sharex="col")
        figure.subplots_adjust(
            left=0.07, right=0.985, top=0.83, bottom=0.085, wspace=0.07, hspace=0.16
        )
        for axes, (title, rows) in zip(above, tables.items(), strict=True):
            _lines(axes, rows, "sent_gib")
            axes.set_yscale("log", base=2)
            axes.set_title(title, loc="left", fontsize=9, color=INK, pad=8)
        for axes, rows in zip(below, tables.values(), strict=True):
            _lines(axes, rows, "ratio")
            lengths = sorted({row["tokens"] for row in rows})
            axes.set_xticks(lengths, [_short(n) for n in lengths])
            axes.set_xlabel("tokens of a sequence", fontsize=8.5, color=SOFT)
        above[0].yaxis.set_major_formatter("{x:g}")
        above[0].set_ylabel("GiB that a GPU sends in attention, a step", fontsize=8.5, color=SOFT)
        below[0].set_ylabel("step / the model's own time", fontsize=8.5, color=SOFT)
        for axes in (*above, *below):
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_minor_formatter(NullFormatter())
        figure.text(
            0.07,
            0.955,
            "Context parallelism of Llama 3 8B on 64 H100s",
            fontsize=12,
            fontweight="bold",
        )
        figure.text(
            0.07,
            0.925,
            "1,048,576 tokens a step, 16,384 on each GPU; times are predicted, never measured",
            fontsize=8.5,
            color=SOFT,
        )
        handles = [
            Line2D([], [], color=colour, marker=marker, markersize=4.5, label=name)
            for name, (colour, marker) in FORMS.items()
        ]
        handles.append(
            Line2D([], [], color=INK, marker="_", linestyle="none", label="no sequence is sharded")
        )
        figure.legend(
            handles=handles,
            loc="upper left",
            bbox_to_anchor=(0.06, 0.915),
            ncols=5,
            frameon=False,
            fontsize=8.5,
            borderpad=0,
        )
        FigureCanvasAgg(figure).print_png(
            str(to), metadata={"Software": None, "Source": digest(data)}
        )


def charted(data: Mapping[str, Any]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Returns the tables that have a column in the picture."""
    return {
        title: table["rows"]
        for title, table in data["tables"].items()
        if any("form" in row for row in table["rows"])
    }


def digest(data: Mapping[str, Any]) -> str:
    """Returns the digest of the numbers that the picture shows."""
    return hashlib.sha256(json.dumps(charted(data), sort_keys=True).encode()).hexdigest()[:16]


def _lines(axes: Axes, rows: Sequence[Mapping[str, Any]], key: str) -> None:
    for form, (colour, marker) in FORMS.items():
        points = [(row["tokens"], row[key]) for row in rows if row["form"] == form]
        axes.plot(
            *zip(*points, strict=True), color=colour, marker=marker, markersize=4.5, linewidth=1.4
        ) if points else None
    whole_points = [(row["tokens"], row[key]) for row in rows if row["form"] == WHOLE and row[key]]
    axes.plot(
        *zip(*whole_points, strict=True), color=INK, marker="_", markersize=9, linestyle="none"
    ) if whole_points else None
    axes.set_xscale("log", base=2)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, colors=SOFT, labelsize=8.5)


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens < 2**20 else f"{tokens // 2**20}M"
