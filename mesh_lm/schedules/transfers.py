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
from typing import Literal

import numpy as np

from mesh_lm.schedules.stages import StackLayout
from mesh_lm.schedules.table import Table

_NEVER = np.iinfo(np.int32).max


@dataclasses.dataclass(frozen=True)
class Transfers:
    """The order in which each stage gathers the rows of a segment's stacked parameters, and that in
    which it sums their gradients.

    Rows are numbered within a stage. The first `before` rows of `gathers` are gathered before the
    first tick, then one in each tick. The last `after` rows of `sums` are summed after the last
    tick, and those before them one in each of the last ticks. A row that is gathered in a tick can
    be used from the next tick on; one whose gradient is summed in a tick has received its last
    gradient in an earlier one.
    """

    gathers: np.ndarray
    """int32 [P, rows]."""
    sums: np.ndarray
    """int32 [P, rows]."""
    before: int
    after: int
    ticks: int
    """The number of ticks of the table."""

    @property
    def gather_ticks(self) -> int:
        """The number of first ticks that gather a row."""
        return self.gathers.shape[1] - self.before

    @property
    def sum_ticks(self) -> int:
        """The number of last ticks that sum a row's gradient."""
        return self.sums.shape[1] - self.after


def plan_transfers(table: Table, stack: StackLayout) -> Transfers:
    """The transfers of a segment that leave the fewest rows for the time before the first tick and
    after the last.

    Rows are gathered only in ticks before the first backward slot, and summed only in those after
    the last forward slot, where stages have less to compute and no collective of the other slot to
    wait for.
    """
    first, last = _uses(table, stack)
    gathers, sums = np.argsort(first, 1, kind="stable"), np.argsort(last, 1, kind="stable")
    rows, place = stack.rows_per_stage, np.arange(stack.rows_per_stage)
    loops = {slots: ticks.stop - ticks.start for slots, ticks in table.loops()}
    # Row k is gathered in tick k - before, and must be there one tick later.
    before = (place + 1 - np.take_along_axis(first, gathers, 1)).max()
    # Row k is summed in tick `ticks` - (rows - after) + k, which comes after its last use.
    after = (np.take_along_axis(last, sums, 1) + 1 - table.ticks + rows - place).max()
    before = min(rows, max(int(before), rows - loops.get("F", 0), 0))
    after = min(rows, max(int(after), rows - loops.get("B", 0), 0))
    return Transfers(gathers.astype(np.int32), sums.astype(np.int32), before, after, table.ticks)


def _uses(table: Table, stack: StackLayout) -> tuple[np.ndarray, np.ndarray]:
    """(the first tick that reads a row, the last one that adds to its gradient), int64 [P, rows];
    padding: never read, added to at -1.
    """
    shape = table.stages, stack.rows_per_stage
    first, last = np.full(shape, _NEVER, np.int64), np.full(shape, -1, np.int64)
    begin = stack.chunk_start_rows() + stack.chunk_skipped_rows()
    end = begin + stack.chunk_layers()
    for slot in ("forward", "backward"):
        chunks = np.where(
            table.columns[f"{slot}_microbatch"] >= 0, table.columns[f"{slot}_chunk"], -1
        )
        for tick, stage in zip(*np.nonzero(chunks >= 0), strict=True):
            own = slice(begin[stage, chunks[tick, stage]], end[stage, chunks[tick, stage]])
            first[stage, own] = np.minimum(first[stage, own], tick)
            if slot == "backward":
                last[stage, own] = np.maximum(last[stage, own], tick)
    return first, last


@dataclasses.dataclass(frozen=True)
class Loop:
    """Consecutive ticks that one loop runs."""

    slots: str
    """The slots that it has: "F", "FB" or "B"."""
    first: int
    end: int
    """The tick after its last one."""
    moves: Literal["", "gathers", "sums"] = ""
    """What each of its ticks does with one row of each segment."""


def loops(table: Table, transfers: Sequence[Transfers] = ()) -> list[Loop]:
    """The loops that run a table's ticks, in order: those of `Table.loops`, without the ticks with
    transfers, and these.
    """
    gather_end = max((each.gather_ticks for each in transfers), default=0)
    sum_begin = table.ticks - max((each.sum_ticks for each in transfers), default=0)
    out = []
    for slots, ticks in table.loops():
        first, end = int(ticks.start), int(ticks.stop)
        middle = min(max(first, gather_end), end), max(min(end, sum_begin), first)
        out += [
            Loop(slots, first, middle[0], "gathers"),
            Loop(slots, *middle),
            Loop(slots, middle[1], end, "sums"),
        ]
    return [loop for loop in out if loop.end > loop.first]
