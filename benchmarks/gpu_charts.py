"""Draws charts of gpu_suite.py's measurements next to its tables, if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

from record import Record, Row

COLOURS = {
    "ours": "#c2452d", "cudnn": "#3f7a34", "mgpu": "#86b1de", "tokamax": "#2f6db3",
    "torch flash": "#e0a02b", "torch cudnn": "#8fbf87",
    "torch varlen": "#8a63b8", "torch flex": "#b9a0d6", "xla": "#9aa3ab", "mosaic": "#c2452d",
    "torch": "#e0a02b",
}  # fmt: skip
NOT_PEERS = {
    "mask",
    "head_dim",
    "seq",
    "batch",
    "heads",
    "kv_heads",
    "way",
    "best_peer",
    "ratio",
    "roof",
}


def draw(record: Record) -> None:
    """Writes the charts next to the record, and adds their file names to it as `charts`."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    tables = record.data["tables"]
    lines = tables.get("Attention, compared", tables.get("Headline, compared", {"rows": []}))[
        "rows"
    ]
    steps = [
        row for row in tables.get("Train step", {"rows": []})["rows"] if row.get("tokens_per_s")
    ]
    record.directory.mkdir(parents=True, exist_ok=True)
    charts = record.data["charts"] = []
    for name, figure in (("attention", _attention(lines)), ("train-step", _steps(steps))):
        if figure is not None:
            charts.append(f"{record.stem}_{name}.png")
            figure.savefig(record.directory / charts[-1], dpi=140, metadata={"Software": None})


def _figure(**options: Any) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure


def _attention(rows: list[Row]) -> Any:
    """Plots TFLOP/s over length: a column for each head dim, a row for each mask and direction with
    at least two lengths."""
    plain = [row for row in rows if row["heads"] == row["kv_heads"]]
    dims = sorted({row["head_dim"] for row in plain})
    masks = [mask for mask in ("causal", "full") if any(row["mask"] == mask for row in plain)]
    ways = [(mask, way) for mask in masks for way in ("fwd", "bwd")]
    if not dims or not ways:
        return None
    figure = _figure(figsize=(3.6 * len(dims), 2.5 * len(ways)))
    axes = figure.subplots(len(ways), len(dims), squeeze=False, sharey="row")
    for i, (mask, way) in enumerate(ways):
        for j, dim in enumerate(dims):
            _lines(
                axes[i][j],
                [
                    row
                    for row in plain
                    if (row["mask"], row["way"], row["head_dim"]) == (mask, way, dim)
                ],
            )
            axes[i][j].margins(y=0.08)
            axes[i][j].set_title(
                f"{mask}, {'forward' if way == 'fwd' else 'backward'}, head dim {dim}", fontsize=9
            )
    for line in axes.flat:
        line.set_ylim(bottom=0)  # after all plots of a row, which share the axis
    handles = {
        label: line
        for axis in axes.flat
        for line, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=max(1, min(len(handles), 8)),
        frameon=False,
    )
    figure.supylabel("TFLOP/s", fontsize=9)
    return figure


def _lines(axes: Any, rows: list[Row]) -> None:
    for peer in [name for row in rows for name in row if name not in NOT_PEERS]:
        points = sorted((row["seq"], row[peer]) for row in rows if row.get(peer))
        if points and peer not in axes.get_legend_handles_labels()[1]:
            width = 2 if peer == "ours" else 1
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=3,
                label=peer,
                color=COLOURS.get(peer),
                linewidth=width,
            )
    lengths = sorted({row["seq"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        lengths, [f"{length // 1024}k" if length >= 1024 else str(length) for length in lengths]
    )
    axes.grid(color="#e6e8e7")


def _steps(rows: list[Row]) -> Any:
    """Plots each model's tokens per second as a share of the best."""
    if not rows:
        return None
    models = list(dict.fromkeys(row["model"] for row in rows))
    names = list(dict.fromkeys(row["attention"] for row in rows))
    figure = _figure(figsize=(1.8 + 2.2 * len(models), 3.2))
    axes = figure.subplots()
    for i, name in enumerate(names):
        for row in (row for row in rows if row["attention"] == name):
            best = max(other["tokens_per_s"] for other in rows if other["model"] == row["model"])
            at = models.index(row["model"]) + (i - (len(names) - 1) / 2) * 0.8 / len(names)
            axes.bar(
                at,
                row["tokens_per_s"] / best,
                0.75 / len(names),
                color=COLOURS.get(name),
                label=name,
            )
            text = f"{row['mfu']:.1%}" if row.get("mfu") else f"{row['tokens_per_s']:,.0f}/s"
            axes.annotate(
                text,
                (at, row["tokens_per_s"] / best),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7,
            )
    axes.set_xticks(range(len(models)), models)
    axes.set_ylim(0, 1.1)
    axes.set_title("Train step: tokens a second, of the best; above the bars MFU", fontsize=9)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=8,
    )
    return figure
