"""When a stage gathers its layers' weights and sums their gradients over the replicas, beside the
ticks of a pipeline.

A stage uses the rows of its stacked parameters chunk by chunk: in the first ticks those of its
first chunk, and the last ticks add to the gradients of its first chunk only. So most rows can be
gathered, one each tick, while stages already go forward, and most gradients can be summed, one each
tick, while stages still go backward. Only the rest is waited for, before the first tick and after
the last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from mesh_lm.schedules.stages import StackLayout
from mesh_lm.schedules.table import Table

_NEVER = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Transfers:
    """The orders in which each stage gathers the rows of a segment's stacked parameters, and sums
    their gradients.

    Rows are numbered within a stage. A row that is gathered in a tick can be used from the next
    tick on; one whose gradient is summed in a tick has received its last gradient in an earlier
    one.
    """

    gather_order: np.ndarray
    """int32 [P, rows]."""
    reduce_order: np.ndarray
    """int32 [P, rows]."""
    n_gathered_first: int
    """The number of rows that are gathered before the first tick; then one in each tick."""
    n_reduced_last: int
    """The number of rows that are summed after the last tick; the others one in each tick before
    that."""
    ticks: int
    """The number of ticks of the table."""

    @property
    def gather_ticks(self) -> int:
        """The number of first ticks that gather a row."""
        return self.gather_order.shape[1] - self.n_gathered_first

    @property
    def reduce_ticks(self) -> int:
        """The number of last ticks that sum a row's gradient."""
        return self.reduce_order.shape[1] - self.n_reduced_last


def plan_transfers(table: Table, stack: StackLayout) -> Transfers:
    """Returns the transfers of a segment that leave the fewest rows for before and after the ticks.

    Rows are gathered only in ticks before the first backward slot, and summed only in those after
    the last forward slot, where stages have less to compute and no collective of the other slot to
    wait for.
    """
    uses = _uses(table, stack)
    gather_order = np.argsort(uses.first_tick, 1, kind="stable")
    reduce_order = np.argsort(uses.last_tick, 1, kind="stable")
    rows = stack.rows_per_stage
    k = np.arange(rows)
    loop_ticks = {slots: ticks.stop - ticks.start for slots, ticks in table.loops()}

    # Row k is gathered in tick k - n_gathered_first, and must be there one tick later.
    first_ticks = np.take_along_axis(uses.first_tick, gather_order, 1)
    n_gathered_first = int((k + 1 - first_ticks).max())
    n_gathered_first = min(rows, max(n_gathered_first, rows - loop_ticks.get("F", 0), 0))

    # Row k is summed in tick `ticks` - (rows - n_reduced_last) + k, which comes after its last use.
    last_ticks = np.take_along_axis(uses.last_tick, reduce_order, 1)
    n_reduced_last = int((last_ticks + 1 - table.ticks + rows - k).max())
    n_reduced_last = min(rows, max(n_reduced_last, rows - loop_ticks.get("B", 0), 0))
    return Transfers(
        gather_order.astype(np.int32),
        reduce_order.astype(np.int32),
        n_gathered_first,
        n_reduced_last,
        table.ticks,
    )


class _Uses(NamedTuple):
    """The ticks that use each row, int64 [P, rows]. Padding has `_NEVER` and -1."""

    first_tick: np.ndarray
    """The first tick that reads a row."""
    last_tick: np.ndarray
    """The last tick that adds to a row's gradient."""


def _uses(table: Table, stack: StackLayout) -> _Uses:
    shape = (table.stages, stack.rows_per_stage)
    first_tick = np.full(shape, _NEVER, np.int64)
    last_tick = np.full(shape, -1, np.int64)
    begin = stack.chunk_start_rows() + stack.chunk_skipped_rows()
    end = begin + stack.chunk_layers()
    for slot in ("forward", "backward"):
        busy = table.columns[f"{slot}_microbatch"] >= 0
        for tick, stage in zip(*np.nonzero(busy), strict=True):
            chunk = table.columns[f"{slot}_chunk"][tick, stage]
            rows = (stage, slice(begin[stage, chunk], end[stage, chunk]))
            first_tick[rows] = np.minimum(first_tick[rows], tick)
            if slot == "backward":
                last_tick[rows] = np.maximum(last_tick[rows], tick)
    return _Uses(first_tick, last_tick)


@dataclasses.dataclass(frozen=True)
class Loop:
    """Consecutive ticks that one loop runs."""

    slots: str
    """The slots that the loop has: "F", "FB" or "B"."""
    first: int
    end: int
    """The tick after the last one."""
    moves: Literal["", "gather", "reduce"] = ""
    """The transfer of one row of each segment in each of the ticks."""


def loops(table: Table, transfers: Sequence[Transfers] = ()) -> list[Loop]:
    """Returns the loops that run a table's ticks, in order.

    They are those of `Table.loops`, divided where the ticks that gather end, and where those that
    reduce begin.
    """
    gather_end = max((plan.gather_ticks for plan in transfers), default=0)
    reduce_begin = table.ticks - max((plan.reduce_ticks for plan in transfers), default=0)
    parts = []
    for slots, ticks in table.loops():
        first = int(ticks.start)
        end = int(ticks.stop)
        first_without = min(max(first, gather_end), end)
        end_without = max(min(end, reduce_begin), first)
        parts += [
            Loop(slots, first, first_without, "gather"),
            Loop(slots, first_without, end_without),
            Loop(slots, end_without, end, "reduce"),
        ]
    return [loop for loop in parts if loop.end > loop.first]
