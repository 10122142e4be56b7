"""The rows of studies as tables for the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.table import Table

from mesh_lm.planning.studies.replica_bytes import BytesRow
from mesh_lm.planning.studies.scaling import ScalingRow
from mesh_lm.planning.studies.strategies import NAMES, StrategyRow, points_of, winner

GIB = 2**30


def replica_bytes_table(rows: Sequence[BytesRow]) -> Table:
    """Returns GiB by strategy and number of GPUs; "-" where a strategy does not serve them."""
    counts = sorted({row.gpus for row in rows})
    largest = max(row.sent for row in rows) / GIB
    digits = max(0, 2 - math.floor(math.log10(max(largest, 1))))
    table = new_table("GiB sent on", right=[f"{gpus:,}" for gpus in counts])
    by_strategy: dict[str, list[str]] = {}
    for row in rows:
        cell = "-" if row.status else f"{row.sent / GIB:,.{digits}f}"
        by_strategy.setdefault(row.strategy, []).append(cell)
    for strategy, cells in by_strategy.items():
        table.add_row(strategy, *cells)
    return table


def winners_table(rows: Sequence[StrategyRow]) -> Table:
    """Returns the strategy to use by number of GPUs and size, with the MFU at the fast end; "-"
    where nothing fits.
    """
    points = points_of(rows)
    sizes = list(dict.fromkeys(size for size, _ in points))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("GPUs", justify="right", no_wrap=True)
    for size in sizes:
        table.add_column(size)
    for gpus in sorted({gpus for _, gpus in points}):
        cells = []
        for size in sizes:
            best = winner(points[size, gpus])
            cells.append(f"{best.strategy}\n{best.mfu[1]:.0%}" if best and best.mfu else "-")
        table.add_row(f"{gpus:,}", *cells)
    return table


def strategies_table(rows: Sequence[StrategyRow]) -> Table:
    """Returns all strategies of one point, in the order of `NAMES`."""
    headers = ("state,\nGiB", "peak,\nGiB", "sent in a\nnode, GiB", "between\nnodes, GiB")
    table = new_table(f"{rows[0].size} on\n{rows[0].gpus:,} GPUs", right=headers)
    table.add_column("step, s, and MFU", overflow="fold")
    for row in sorted(rows, key=lambda row: NAMES.index(row.strategy)):
        table.add_row(
            row.strategy,
            _number(row.state_gib),
            _number(row.peak_gib),
            _number(row.inside_gib),
            _number(row.between_gib),
            _outcome(row),
        )
    return table


def _outcome(row: StrategyRow) -> str:
    """Returns the step and the MFU of a strategy, or why there are none."""
    if not row.fits:
        return row.status.partition(":")[0]
    step = _range(row.step_fast_s, row.step_slow_s, "{:.3g}")
    text = f"{step}, {_range(row.mfu_slow, row.mfu_fast, '{:.0%}')}"
    if row.compiled_fits is None:
        return text
    compiled = _range(row.compiled_fast_s, row.compiled_slow_s, "{:.3g}")
    verb = "fits" if row.compiled_fits else "does not fit"
    return f"{text}\ncompiled: {compiled}, {verb}"


def scaling_table(rows: Sequence[ScalingRow]) -> Table:
    """Returns the points with their bands, beside what is published."""
    headers = ("GPUs", "step, s", "TFLOP/s", "published", "MFU", "peak,\nGiB")
    table = new_table("", right=headers)
    for row in rows:
        step = "no layout" if row.status else _range(row.step_fast_s, row.step_slow_s, "{:.3g}")
        table.add_row(
            row.config,
            f"{row.gpus:,}",
            step,
            _range(row.tflops_slow, row.tflops_fast, "{:.0f}"),
            "" if row.published_tflops is None else f"{row.published_tflops:.0f}",
            _range(row.mfu_slow, row.mfu_fast, "{:.0%}"),
            _number(row.peak_gib),
        )
    return table


def layout_lines(rows: Sequence[ScalingRow]) -> Iterator[str]:
    """Yields the layout of each point in a line."""
    for row in rows:
        if not row.status:
            yield f"{row.config} on {row.gpus:,}: {row.layout or 'the layout of the config'}"


def _number(n: float | None) -> str:
    return "" if n is None else f"{n:,.1f}"


def _range(first: float | None, last: float | None, form: str) -> str:
    if first is None or last is None:
        return ""
    return f"{form.format(first)} to {form.format(last)}"


def new_table(*left: str, right: Sequence[str] = ()) -> Table:
    """Returns an empty table: columns of words, then columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in left:
        table.add_column(header, no_wrap=True)
    for header in right:
        table.add_column(header, no_wrap=True, justify="right")
    return table
