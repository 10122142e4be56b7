"""Layouts that were priced on paper and compiled: rows of the results of `best_layouts` and
`random_layouts`, from which `fit_formulas` fits the formulas again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from record import RESULTS, Row

PROGRAMS = "The programs"
"""The title of the table of programs."""
PROGRAMS_NOTE = (
    "paper: the formulas' price before anything was compiled. A layout's columns are those of "
    "mesh_lm.planning.paper.layouts."
)


class Paper(NamedTuple):
    """A layout's price, before it was compiled."""

    seconds: float
    peak: float
    """Bytes."""


def priced(sizes: Any, row: Mapping[str, float]) -> Paper:
    """Returns the price of one layout on the benchmarks' GPU."""
    from plan_table import TARGET

    from mesh_lm.planning.best import hardware_of
    from mesh_lm.planning.paper.layouts import Layouts
    from mesh_lm.planning.paper.price import price

    paper = price(sizes, Layouts.of([dict(row)]), hardware_of(TARGET))
    return Paper(float(paper.seconds[0]), float(paper.peak[0]))


def program_row(
    name: str, n_devices: int, sizes: Any, row: Mapping[str, float], report: Any
) -> Row:
    """Returns a compiled layout as a row of `PROGRAMS`."""
    paper = priced(sizes, row)
    timeline = report.timeline
    return {
        "config": name,
        "devices": n_devices,
        "step_s": timeline.step / 1e6 if timeline else None,
        "paper_step_s": paper.seconds,
        "peak_gib": report.peak_bytes / 2**30,
        "paper_peak_gib": paper.peak / 2**30,
        "fits": report.fits,
        **row,
    }


def newest(name: str) -> dict[str, list[Row]]:
    """Returns the tables of the newest results of a benchmark; empty without any."""
    files = sorted(RESULTS.glob(f"{name}_2*.json"))
    if not files:
        return {}
    tables = json.loads(files[-1].read_text(encoding="utf-8"))["tables"]
    return {title: table["rows"] for title, table in tables.items()}
