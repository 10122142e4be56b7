"""The rows of studies as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from mesh_lm.planning.studies.replica_bytes import BytesRow

GIB = 2**30


def replica_bytes_table(rows: Sequence[BytesRow]) -> Table:
    """Returns GiB by strategy and number of GPUs; "-" where a strategy does not serve them."""
    counts = sorted({row.gpus for row in rows})
    digits = 2 if max(row.sent for row in rows) < 10 * GIB else 1
    table = new_table("GiB sent on", right=[f"{gpus:,}" for gpus in counts])
    by_strategy: dict[str, list[str]] = {}
    for row in rows:
        cell = "-" if row.status else f"{row.sent / GIB:,.{digits}f}"
        by_strategy.setdefault(row.strategy, []).append(cell)
    for strategy, cells in by_strategy.items():
        table.add_row(strategy, *cells)
    return table


def new_table(*left: str, right: Sequence[str] = ()) -> Table:
    """Returns an empty table: columns of words, then columns of numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in left:
        table.add_column(header, no_wrap=True)
    for header in right:
        table.add_column(header, no_wrap=True, justify="right")
    return table
