"""Measured times of collectives over sizes, with their fits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sharding_rules.lab.profile import Measured


def write_chart(collectives: Sequence[Measured], title: str, file: Path) -> None:
    """Draws the time and the bus bandwidth of each collective over the bytes that a device sends:
    a column for each mesh axis, dots where it was measured, lines where it was fitted.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    axes_names = list(dict.fromkeys(one.axis for one in collectives))
    figure = Figure(layout="constrained", figsize=(1.5 + 4.2 * max(1, len(axes_names)), 6), dpi=150)
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(2, max(1, len(axes_names)), squeeze=False, sharey="row")
    for column, axis in enumerate(axes_names):
        of_axis = [one for one in collectives if one.axis == axis]
        for colour, one in enumerate(of_axis):
            _draw(panels[0][column], panels[1][column], one, f"C{colour}")
        first = of_axis[0]
        link = f"{first.nodes} nodes" if first.nodes > 1 else "one node"
        panels[0][column].set_title(f"{axis}: {first.group} devices, {link}", fontsize=9)
        panels[1][column].set_xlabel("bytes that a device sends")
    for panel in panels.flat:
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("µs")
    panels[1][0].set_ylabel("bus bandwidth, GB/s")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize=10)
    figure.savefig(file)


def _draw(times: Any, bandwidths: Any, one: Measured, colour: str) -> None:
    wire = np.array([point.wire for point in one.points])
    us = np.array([point.us for point in one.points])
    line = np.geomspace(wire.min(), wire.max(), 60)
    fitted_us = one.fit.latency_us + 1e6 * line / one.fit.bytes_per_s
    times.plot(wire, us, "o", color=colour, markersize=3)
    times.plot(line, fitted_us, color=colour, linewidth=1, label=one.kind)
    bandwidths.plot(wire, wire / us / 1e3, "o", color=colour, markersize=3)
    bandwidths.plot(line, line / fitted_us / 1e3, color=colour, linewidth=1)
