"""Draws docs/images/configs.png from the results of plan_table.py: for each config peak memory by
class, and bytes sent by mesh axis."""

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
from matplotlib.patches import Patch

INK, SOFT, GRID, PAPER = "#20262c", "#5d6873", "#e6e8e7", "#ffffff"
MEMORY = {
    "params": "#2f6db3", "moments": "#86b1de", "gradients": "#8a63b8", "weights in use": "#2b9a86",
    "residuals": "#b06a16",
    "activations": "#e08e2b", "logits": "#b9504a", "other": "#9aa3ab",
}  # fmt: skip
"""Class -> colour, as on the page of --plan; `other` here also includes batch and fragmentation."""
NETWORK = {
    "data": "#1f5563",
    "fsdp": "#5aa3a8",
    "pipeline": "#c98a3c",
    "expert": "#e7b7a9",
    "sequence": "#cdbfe3",
    "tensor": "#d3d9d8",
}
"""Colours of axes; NVLink's are pale. fsdp+tensor, which is small, counts as fsdp, and groups of
stages and replicas, or of replicas and shards of sequences or experts, count as data."""
MERGED = {
    "batch": "other",
    "fragmentation": "other",
    "fsdp+tensor": "fsdp",
    "pipeline+data": "data",
    "data+sequence": "data",
    "data+expert": "data",
}
FAMILIES = {
    "gpt": "GPT", "llama3": "Llama 3", "megatron": "Megatron-LM's nine", "mixtral": "Mixtral",
    "qwen3": "Qwen3",
}  # fmt: skip
GAP, BAR = 1.15, 0.6


def draw(data: Mapping[str, Any], to: Path) -> None:
    """Draws the chart. data: the results of record.py. The picture contains their digest, so that a
    test can detect a stale one."""
    rows = data["tables"]["Configs"]["rows"]
    heights, usable = _heights(rows), rows[0]["usable_gib"]
    # bundled with matplotlib, so the same everywhere
    with rc_context({"font.family": "DejaVu Sans", "font.size": 9, "text.color": INK}):
        figure = Figure(figsize=(9.4, 8.1), dpi=200, facecolor=PAPER)
        left, right = (figure.add_axes((at, 0.045, 0.36, 0.8)) for at in (0.225, 0.625))
        _names(left, rows, heights)
        _bars(left, heights, [_parts(row, "{}, GiB", MEMORY) for row in rows], MEMORY)
        ends = _bars(
            right, heights, [_parts(row, "sent over {}, GiB", NETWORK) for row in rows], NETWORK
        )
        left.axvline(usable, color=INK, linewidth=1)
        left.text(usable, -1.3, f"{usable:.1f} usable ", ha="right", va="center", fontsize=8.5)
        for row, height, end in zip(rows, heights, ends, strict=True):
            left.text(
                1.135 * usable,
                height,
                f"{row['peak_gib']:.1f}",
                va="center",
                ha="right",
                fontsize=8.5,
            )
            right.annotate(
                _sent(row),
                (end, height),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8.5,
            )
        left.set_xlim(0, max(1.14 * usable, *(row["peak_gib"] for row in rows)))
        left.set_xticks(range(0, int(usable) + 1, 10))
        right.set_xlim(0, 1.13 * max(ends))
        for axes in (left, right):
            axes.set_ylim(heights[-1] + 0.6, -1.8)
        _head(left, "Memory at the peak", "GiB on each H100", MEMORY)
        _head(
            right,
            "Sent in a step",
            "GiB by each H100, by mesh axis; the pale ones are NVLink",
            NETWORK,
        )
        FigureCanvasAgg(figure).print_png(
            str(to), metadata={"Software": None, "Source": digest(data)}
        )


def digest(data: Mapping[str, Any]) -> str:
    """Returns the digest of the numbers that the picture shows."""
    return hashlib.sha256(
        json.dumps(data["tables"]["Configs"]["rows"], sort_keys=True).encode()
    ).hexdigest()[:16]


def _heights(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the rows' positions from the top down, with a gap for the name of each family."""
    heights, at, last_family = [], 0.0, ""
    for row in rows:
        family = row["name"].partition("_")[0].rstrip("2")
        at += (1 if last_family else 0) + (GAP if last_family not in ("", family) else 0)
        heights.append(at)
        last_family = family
    return heights


def _parts(row: Mapping[str, Any], key: str, classes: Mapping[str, str]) -> dict[str, float]:
    parts = dict.fromkeys(classes, 0.0)
    for name in [*classes, *MERGED]:
        if (home := MERGED.get(name, name)) in parts:
            parts[home] += row.get(key.format(name), 0.0)
    return parts


def _sent(row: Mapping[str, Any]) -> str:
    return f"{row['sent_gib']:,.0f}" if row["sent_gib"] >= 9.95 else f"{row['sent_gib']:.1f}"


def _bars(
    axes: Axes,
    heights: Sequence[float],
    rows: Sequence[dict[str, float]],
    colours: Mapping[str, str],
) -> list[float]:
    """Draws stacked bars. Returns where they end."""
    ends = [0.0] * len(rows)
    for part, colour in colours.items():
        widths = [row[part] for row in rows]
        axes.barh(heights, widths, BAR, left=ends, color=colour, edgecolor=PAPER, linewidth=0.4)
        ends = [end + width for end, width in zip(ends, widths, strict=True)]
    return ends


def _names(axes: Axes, rows: Sequence[Mapping[str, Any]], heights: Sequence[float]) -> None:
    across, last_family = axes.get_yaxis_transform(), ""
    for row, height in zip(rows, heights, strict=True):
        family = next(title for word, title in FAMILIES.items() if row["name"].startswith(word))
        if family != last_family:
            axes.text(
                -0.59,
                height - 0.95,
                family,
                transform=across,
                va="center",
                fontsize=8.5,
                color=SOFT,
            )
        axes.text(-0.59, height, row["name"], transform=across, va="center")
        axes.text(
            -0.03,
            height,
            f"{row['devices']:,}",
            transform=across,
            va="center",
            ha="right",
            color=SOFT,
        )
        last_family = family
    axes.text(
        -0.03,
        heights[0] - 0.95,
        "GPUs",
        transform=across,
        va="center",
        ha="right",
        fontsize=8.5,
        color=SOFT,
    )


def _head(axes: Axes, title: str, unit: str, classes: Mapping[str, str]) -> None:
    axes.set_yticks([])
    axes.grid(axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.tick_params(axis="x", length=0, colors=SOFT, labelsize=8.5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.text(0, 1.142, title, transform=axes.transAxes, fontsize=12, fontweight="bold")
    axes.text(0, 1.102, unit, transform=axes.transAxes, fontsize=8.5, color=SOFT)
    keys = [Patch(color=colour, label=name) for name, colour in classes.items()]
    axes.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(0, 1.085), ncols=4, frameon=False,
        fontsize=8.5, handlelength=0.8,
        handleheight=0.8, handletextpad=0.4, columnspacing=1.0, borderpad=0, borderaxespad=0,
    )  # fmt: skip
