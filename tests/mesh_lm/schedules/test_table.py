"""A table moves each value to where its schedule needs it: an engine on tokens reads the columns
only.
"""

import dataclasses
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_schedules import schedules

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.schedule import Op, Schedule, make_schedule
from mesh_lm.schedules.table import COLUMNS, Table, compile_table

RUN = ("1f1b", "gpipe", "classic_1f1b", "forward")


EMPTY = -9


class TokenEngine:
    """Runs a table on one tick after another. A token is (microbatch, virtual stage).

    Fails if an op reads a value that is not its own. With side_by_side, a B reads its residuals
    and the output of the last stage before the F of its tick writes any.
    """

    def __init__(self, table: Table, side_by_side: bool) -> None:
        self.table = table
        self.side_by_side = side_by_side
        self.last = table.stages * table.chunks - 1
        self.inputs = self.stash(table.n_inputs)
        self.grads = self.stash(table.n_grads)
        self.residuals = self.stash(table.n_residuals)
        self.outputs = self.stash(table.n_outputs)
        self.sent_grads = self.tokens()
        self.done: Counter[Op] = Counter()

    def stash(self, n_slots: int) -> np.ndarray:
        return np.full((self.table.stages, max(n_slots, 1), 2), EMPTY)

    def tokens(self) -> np.ndarray:
        return np.full((self.table.stages, 2), EMPTY)

    def tick(self, row: dict[str, np.ndarray]) -> None:
        """row: each column's values for the stages in this tick."""
        old_residuals = self.residuals.copy() if self.side_by_side else self.residuals
        old_outputs = self.outputs.copy() if self.side_by_side else self.outputs
        arrived_grads = np.roll(self.sent_grads, -1, 0)
        self.sent_grads = self.tokens()
        sent_outputs = self.tokens()
        for p in range(self.table.stages):
            cells = {name: int(values[p]) for name, values in row.items()}
            if cells["receive_grad"] >= 0:
                self.grads[p, cells["receive_grad"]] = arrived_grads[p]
            if cells["forward_microbatch"] >= 0:
                sent_outputs[p] = self.forward(p, cells)
            if cells["backward_microbatch"] >= 0:
                self.sent_grads[p] = self.backward(p, cells, old_residuals[p], old_outputs[p])
        for p in range(self.table.stages):
            slot = int(row["receive_input"][p])
            if slot >= 0:
                self.inputs[p, slot] = sent_outputs[p - 1]

    def forward(self, p: int, cells: dict[str, int]) -> tuple[int, int]:
        m = cells["forward_microbatch"]
        s = cells["forward_chunk"] * self.table.stages + p
        self.done[Op("F", m, s)] += 1
        if s == 0:
            assert cells["forward_input"] == -1
        else:
            assert tuple(self.inputs[p, cells["forward_input"]]) == (m, s)
        if cells["forward_residual"] >= 0:
            self.residuals[p, cells["forward_residual"]] = (m, s)
        if cells["forward_output"] >= 0:
            self.outputs[p, cells["forward_output"]] = (m, s)
        return m, s + 1

    def backward(
        self, p: int, cells: dict[str, int], residuals: np.ndarray, outputs: np.ndarray
    ) -> tuple[int, int]:
        m = cells["backward_microbatch"]
        s = cells["backward_chunk"] * self.table.stages + p
        self.done[Op("B", m, s)] += 1
        if s == 0 or self.side_by_side:
            assert cells["backward_input"] == -1
        else:
            assert tuple(self.inputs[p, cells["backward_input"]]) == (m, s)
        if s == self.last:
            assert cells["backward_grad"] == -1
        else:
            assert tuple(self.grads[p, cells["backward_grad"]]) == (m, s)
        if cells["backward_residual"] >= 0:
            assert tuple(residuals[cells["backward_residual"]]) == (m, s)
        if self.side_by_side and s == self.last:
            assert tuple(outputs[cells["backward_output"]]) == (m, s)
        return m, s - 1


def run(table: Table, side_by_side: bool = False) -> Counter[Op]:
    """Returns the ops that the columns execute."""
    engine = TokenEngine(table, side_by_side)
    for tick in range(table.ticks):
        engine.tick({name: column[tick] for name, column in table.columns.items()})
    return engine.done


@given(schedules(RUN), st.booleans())
def test_every_read_sees_its_own_value(schedule: Schedule, drop: bool) -> None:
    table = compile_table(schedule, drop_last_forward=drop)
    expected = Counter(schedule.ticks.keys())
    has_backward = schedule.name != "forward"
    if drop and has_backward:
        last = schedule.n_virtual - 1
        expected -= Counter(op for op in schedule.ticks if op.kind == "F" and op.virtual == last)
    assert run(table) == expected
    n_residuals = int((table.columns["backward_residual"] >= 0).sum())
    n_forwards = schedule.microbatches * (schedule.n_virtual - drop)
    assert n_residuals == (n_forwards if has_backward else 0)
    assert tuple(table.columns) == COLUMNS
    for column in table.columns.values():
        assert column.dtype == np.int32
        assert column.shape == (table.ticks, table.stages)


@given(schedules(RUN))
def test_side_by_side_nothing_goes_backward_in_the_tick_of_its_own_forward(
    schedule: Schedule,
) -> None:
    table = compile_table(schedule, False, side_by_side=True)
    in_turn = compile_table(schedule, False)
    assert run(table, side_by_side=True) == Counter(schedule.ticks.keys())
    meets = any(
        tick == schedule.ticks[op._replace(kind="F")]
        for op, tick in schedule.ticks.items()
        if op.kind == "B"
    )
    assert table.ticks == in_turn.ticks + meets
    reads = table.columns["backward_residual"]
    writes = table.columns["forward_residual"]
    assert not ((reads == writes) & (reads >= 0)).any(), (
        "a slot is written in the tick in which it is read"
    )
    assert table.n_inputs <= in_turn.n_inputs
    assert table.n_outputs <= table.n_residuals <= in_turn.n_residuals + table.stages


@pytest.mark.parametrize(
    ("name", "chunks", "slots"),
    [("1f1b", 1, (1, 1, 16, 2)), ("1f1b", 4, (1, 1, 40, 2)), ("gpipe", 1, (1, 1, 64, 64))],
)
def test_slots_of_eight_stages_side_by_side(
    name: str, chunks: int, slots: tuple[int, int, int, int]
) -> None:
    """Inputs wait for no backward pass; the last stage's output waits for the next tick."""
    table = compile_table(make_schedule(name, 8, 64, chunks), False, side_by_side=True)
    assert (table.n_inputs, table.n_grads, table.n_residuals, table.n_outputs) == slots


@given(schedules(RUN))
def test_slots_are_as_few_as_can_be(schedule: Schedule) -> None:
    """The most values that are alive at once: from the tick after one is sent to its last use."""
    table = compile_table(schedule, drop_last_forward=False)
    last = schedule.n_virtual - 1
    last_kind = schedule.kinds[-1]
    ticks = schedule.ticks
    inputs = np.zeros((schedule.stages, schedule.n_ticks), int)
    grads = np.zeros((schedule.stages, schedule.n_ticks), int)
    for (kind, m, s), tick in ticks.items():
        stage = s % schedule.stages
        if kind == "F" and s:
            arrived = ticks[Op("F", m, s - 1)] + 1
            inputs[stage, arrived : ticks[Op(last_kind, m, s)] + 1] += 1
        if kind == "B" and s < last:
            arrived = ticks[Op("B", m, s + 1)] + 1
            grads[stage, arrived : tick + 1] += 1
    assert (table.n_inputs, table.n_grads) == (inputs.max(), grads.max())


@pytest.mark.parametrize("name", RUN[:3])
def test_one_stage_is_gradient_accumulation(name: str) -> None:
    table = compile_table(make_schedule(name, 1, 5))
    assert (table.ticks, table.n_inputs, table.n_grads, table.n_residuals) == (5, 0, 0, 0)
    busy = {"backward_microbatch": np.arange(5)[:, None], "backward_chunk": np.zeros((5, 1))}
    idle = np.full((5, 1), -1)
    for column in COLUMNS:
        np.testing.assert_array_equal(table.columns[column], busy.get(column, idle))


def test_evaluation_has_forwards_only() -> None:
    table = compile_table(make_schedule("forward", 4, 8, 2))
    used = {name for name, column in table.columns.items() if (column >= 0).any()}
    assert used == {"forward_microbatch", "forward_chunk", "forward_input", "receive_input"}
    assert (table.n_grads, table.n_residuals) == (0, 0)
    assert table.ticks == 8 * 2 + 3


@pytest.mark.parametrize(
    ("name", "chunks", "slots"),
    [
        ("1f1b", 1, (13, 1, 15)),
        ("1f1b", 4, (37, 1, 39)),
        ("classic_1f1b", 1, (8, 1, 8)),
        ("gpipe", 1, (64, 1, 64)),
    ],
)
def test_slots_of_eight_stages(name: str, chunks: int, slots: tuple[int, int, int]) -> None:
    table = compile_table(make_schedule(name, 8, 64, chunks))
    assert (table.n_inputs, table.n_grads, table.n_residuals) == slots


def test_1f1b_needs_no_more_slots_for_more_microbatches() -> None:
    def slots(microbatches: int) -> Table:
        table = compile_table(make_schedule("1f1b", 4, microbatches, 2))
        return dataclasses.replace(table, microbatches=0, ticks=0, columns={})

    assert slots(16) == slots(64)


def test_split_backward_passes_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        compile_table(make_schedule("zb_h1", 4, 8))
    assert str(error.value) == (
        "pipeline schedule zb_h1 computes weight gradients separately (W); the engine runs F and B "
        "only"
    )


@given(schedules(RUN), st.booleans())
def test_loops_run_every_tick_with_the_slots_that_it_needs(schedule: Schedule, drop: bool) -> None:
    table = compile_table(schedule, drop_last_forward=drop)
    loops = table.loops()
    ticks_in_order = [tick for _, ticks in loops for tick in range(table.ticks)[ticks]]
    assert ticks_in_order == list(range(table.ticks))
    ticks_by_slots = dict(loops)
    assert list(ticks_by_slots) == [slots for slots in ("F", "FB", "B") if slots in ticks_by_slots]
    for slots, ticks in loops:
        for slot, name in (("F", "forward"), ("B", "backward")):
            busy = np.any(table.columns[f"{name}_microbatch"][ticks] >= 0, axis=1)
            if slot not in slots:
                assert not busy.any(), "work in a loop without its slot"
            elif slots != "FB":
                edge = 0 if slot == "B" else -1
                assert busy[edge], "a loop that another could be part of"
    forward_ticks = ticks_by_slots.get("F", slice(0))
    sent = table.columns["receive_grad"][: forward_ticks.stop]
    assert (sent < 0).all(), "the loop of forward slots passes no gradients on"
