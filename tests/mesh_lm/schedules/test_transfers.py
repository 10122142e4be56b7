"""Transfers of weights and gradients beside a pipeline's ticks: nothing is used before it is there,
or summed before it is complete."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_lm.schedules import custom
from mesh_lm.schedules.stages import StackLayout
from mesh_lm.schedules.table import Table, compile_table
from mesh_lm.schedules.transfers import loops, plan_transfers


def tables(stages: int, microbatches: int, chunks: int, paired: bool = False) -> Table:
    return compile_table(
        custom.find_schedule("1f1b", stages, microbatches, chunks),
        drop_last_forward=False,
        side_by_side=paired,
    )


@settings(max_examples=60, deadline=None)
@given(
    stages=st.integers(2, 4), times=st.integers(1, 3), chunks=st.integers(1, 4),
    paired=st.booleans(),
    counts=st.lists(st.integers(0, 3), min_size=16, max_size=16),
)  # fmt: skip
def test_rows_are_there_when_used_and_complete_when_summed(
    stages: int, times: int, chunks: int, paired: bool, counts: list[int]
) -> None:
    table = tables(stages, stages * times, chunks, paired)
    layers = tuple(counts[: stages * chunks])
    stack = StackLayout(stages, layers if max(layers) else (1,) * len(layers))
    moved = plan_transfers(table, stack)
    begin = stack.chunk_start_rows() + stack.chunk_skipped_rows()
    for stage in range(stages):
        assert (
            sorted(moved.gathers[stage])
            == sorted(moved.sums[stage])
            == list(range(stack.rows_per_stage))
        )
        there = {row: max(0, k - moved.before + 1) for k, row in enumerate(moved.gathers[stage])}
        summed = {row: table.ticks - moved.sum_ticks + k for k, row in enumerate(moved.sums[stage])}
        for slot in ("forward", "backward"):
            for tick in np.flatnonzero(table.columns[f"{slot}_microbatch"][:, stage] >= 0):
                chunk = table.columns[f"{slot}_chunk"][tick, stage]
                for row in range(
                    begin[stage, chunk], begin[stage, chunk] + stack.chunk_layers()[stage, chunk]
                ):
                    assert there[row] <= tick and (slot == "forward" or tick < summed[row])


def test_all_but_the_first_chunk_moves_beside_ticks() -> None:
    """gpt_175b's schedule: of 12 layers a stage waits for 2 before its first tick, and for 2 after
    its last."""
    moved = plan_transfers(tables(8, 24, 6), StackLayout(8, (2,) * 48))
    assert (moved.before, moved.after, moved.gather_ticks, moved.sum_ticks) == (2, 2, 10, 10)


def test_loops_cover_each_tick_once() -> None:
    table = tables(4, 8, 3)
    moved = plan_transfers(table, StackLayout(4, (1,) * 12))
    found = loops(table, [moved])
    assert [(loop.slots, loop.moves) for loop in found] == [
        ("F", "gathers"),
        ("F", ""),
        ("FB", ""),
        ("B", ""),
        ("B", "sums"),
    ]
    assert [tick for loop in found for tick in range(loop.first, loop.end)] == list(
        range(table.ticks)
    )
    assert [(loop.slots, slice(loop.first, loop.end)) for loop in loops(table)] == table.loops()


@pytest.mark.parametrize("chunks", [1, 2])
def test_one_chunk_has_nothing_to_hide(chunks: int) -> None:
    moved = plan_transfers(tables(2, 4, chunks), StackLayout(2, (4,) * (2 * chunks)))
    assert (moved.before == 4 * chunks) is (chunks == 1)
