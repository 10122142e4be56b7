"""The tables of what runs layers and halves of a batch side by side, from the results of
benchmarks/bars.py: tests/docs/made.py writes them into docs/pipeline.md and docs/sharding.md."""

from __future__ import annotations

import functools
from typing import Any

from tests.docs.markdown import table
from tests.docs.planner_tables import tables_of

PAIRS = "--config.pipeline.pair_layers=True"
HALVES = "--config.model.batch_halves=True"


def side_by_side(option: str) -> str:
    """Returns a row for each config that was compiled with and without an option: bands of its
    step, the exposed share and the peak."""
    rows = []
    for row in tables_of("bars")["Compiled"]:
        if row.get("all_on") != option:
            continue
        rows.append([
            f"`{row['config']}`, {row['GPUs']:,}",
            *_cells(row, ""),
            *_cells(row, "all_on_"),
        ])  # fmt: skip
    figures = ["step, s", "exposed", "peak, GiB"]
    field = f"`{option.removeprefix('--config.').partition('=')[0].partition('.')[2]}`"
    return table(["config, H100s", *figures, *(f"{name}, {field}" for name in figures)], rows)


def _cells(row: dict[str, Any], prefix: str) -> list[str]:
    fast = row[f"{prefix}step_s"]
    slow = row[f"{prefix}sustained_step_s"]
    exposed = row[f"{prefix}exposed_share"]
    return [f"{fast:.2f} to {slow:.2f}", f"{exposed:.1%}", f"{row[f'{prefix}peak_gib']:.1f}"]


TABLES = {
    "layers side by side": functools.partial(side_by_side, PAIRS),
    "batch halves": functools.partial(side_by_side, HALVES),
}
