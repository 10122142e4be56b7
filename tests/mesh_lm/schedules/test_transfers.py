"""Transfers of weights and gradients beside a pipeline's ticks: no row is used before it is
gathered, or summed before its gradient is complete.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_lm.schedules import custom
from mesh_lm.schedules.stages import StackLayout
from mesh_lm.schedules.table import Table, compile_table
from mesh_lm.schedules.transfers import loops, plan_transfers


def make_table(stages: int, microbatches: int, chunks: int, side_by_side: bool = False) -> Table:
    schedule = custom.find_schedule("1f1b", stages, microbatches, chunks)
    return compile_table(schedule, drop_last_forward=False, side_by_side=side_by_side)


@settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(2, 4),
    groups=st.integers(1, 3),
    chunks=st.integers(1, 4),
    side_by_side=st.booleans(),
    counts=st.lists(st.integers(0, 3), min_size=16, max_size=16),
)
def test_rows_are_there_when_used_and_complete_when_summed(
    stages: int, groups: int, chunks: int, side_by_side: bool, counts: list[int]
) -> None:
    table = make_table(stages, stages * groups, chunks, side_by_side)
    layers = tuple(counts[: stages * chunks])
    stack = StackLayout(stages, layers if max(layers) else (1,) * len(layers))
    transfers = plan_transfers(table, stack)
    begin = stack.chunk_start_rows() + stack.chunk_skipped_rows()
    end = begin + stack.chunk_layers()
    first_sum_tick = table.ticks - transfers.reduce_ticks
    for stage in range(stages):
        gathers = transfers.gather_order[stage]
        sums = transfers.reduce_order[stage]
        assert sorted(gathers) == sorted(sums) == list(range(stack.rows_per_stage))
        usable = {row: max(0, k - transfers.n_gathered_first + 1) for k, row in enumerate(gathers)}
        summed = {row: first_sum_tick + k for k, row in enumerate(sums)}
        for slot in ("forward", "backward"):
            busy = table.columns[f"{slot}_microbatch"][:, stage] >= 0
            for tick in np.flatnonzero(busy):
                chunk = table.columns[f"{slot}_chunk"][tick, stage]
                for row in range(begin[stage, chunk], end[stage, chunk]):
                    assert usable[row] <= tick
                    assert slot == "forward" or tick < summed[row]


def test_all_but_the_first_chunk_moves_beside_ticks() -> None:
    """gpt_175b's schedule: of 12 layers a stage waits for 2 before its first tick, and for 2 after
    its last."""
    transfers = plan_transfers(make_table(8, 24, 6), StackLayout(8, (2,) * 48))
    assert (transfers.n_gathered_first, transfers.n_reduced_last) == (2, 2)
    assert (transfers.gather_ticks, transfers.reduce_ticks) == (10, 10)


def test_loops_cover_each_tick_once() -> None:
    table = make_table(4, 8, 3)
    parts = loops(table, [plan_transfers(table, StackLayout(4, (1,) * 12))])
    assert [(loop.slots, loop.moves) for loop in parts] == [
        ("F", "gather"),
        ("F", ""),
        ("FB", ""),
        ("B", ""),
        ("B", "reduce"),
    ]
    ticks = [tick for loop in parts for tick in range(loop.first, loop.end)]
    assert ticks == list(range(table.ticks))
    assert [(loop.slots, slice(loop.first, loop.end)) for loop in loops(table)] == table.loops()


@pytest.mark.parametrize("chunks", [1, 2])
def test_one_chunk_has_nothing_to_hide(chunks: int) -> None:
    transfers = plan_transfers(make_table(2, 4, chunks), StackLayout(2, (4,) * (2 * chunks)))
    assert (transfers.n_gathered_first == 4 * chunks) is (chunks == 1)
