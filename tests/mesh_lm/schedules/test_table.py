"""A table moves each value where its schedule needs it: an engine on tokens reads the columns
only."""

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


def run(t: Table, side_by_side: bool = False) -> Counter[Op]:
    """The ops that the columns execute. Fails if an op reads a value that is not its own; a token
    is (microbatch, virtual).

    side_by_side: a B reads its residuals and the output of the last stage before the F of its tick
    writes any.
    """
    last, stages = t.stages * t.chunks - 1, t.stages
    inputs, grads, residuals, outputs = (
        np.full((stages, max(n, 1), 2), -9)
        for n in (t.n_inputs, t.n_grads, t.n_residuals, t.n_outputs)
    )
    sent_back = np.full((stages, 2), -9)
    done: Counter[Op] = Counter()
    for tick in range(t.ticks):
        at = {name: column[tick] for name, column in t.columns.items()}
        before = (residuals.copy(), outputs.copy()) if side_by_side else (residuals, outputs)
        sent, arriving, sent_back = (
            np.full((stages, 2), -9),
            np.roll(sent_back, -1, 0),
            np.full((stages, 2), -9),
        )
        for p in range(stages):
            if at["receive_grad"][p] >= 0:
                grads[p, at["receive_grad"][p]] = arriving[p]
            if at["forward_microbatch"][p] >= 0:
                m, s = at["forward_microbatch"][p], at["forward_chunk"][p] * stages + p
                done[Op("F", int(m), int(s))] += 1
                assert (
                    at["forward_input"][p] == -1
                    if s == 0
                    else tuple(inputs[p, at["forward_input"][p]]) == (m, s)
                )
                if at["forward_residual"][p] >= 0:
                    residuals[p, at["forward_residual"][p]] = m, s
                if at["forward_output"][p] >= 0:
                    outputs[p, at["forward_output"][p]] = m, s
                sent[p] = m, s + 1
            if at["backward_microbatch"][p] >= 0:
                m, s = at["backward_microbatch"][p], at["backward_chunk"][p] * stages + p
                done[Op("B", int(m), int(s))] += 1
                no_input = s == 0 or side_by_side
                assert (
                    at["backward_input"][p] == -1
                    if no_input
                    else tuple(inputs[p, at["backward_input"][p]]) == (m, s)
                )
                assert (
                    at["backward_grad"][p] == -1
                    if s == last
                    else tuple(grads[p, at["backward_grad"][p]]) == (m, s)
                )
                if at["backward_residual"][p] >= 0:
                    assert tuple(before[0][p, at["backward_residual"][p]]) == (m, s)
                if side_by_side and s == last:
                    assert tuple(before[1][p, at["backward_output"][p]]) == (m, s)
                sent_back[p] = m, s - 1
        for p in range(stages):
            if at["receive_input"][p] >= 0:
                inputs[p, at["receive_input"][p]] = sent[p - 1]
    return done


@given(schedules(RUN), st.booleans())
def test_every_read_sees_its_own_value(one: Schedule, drop: bool) -> None:
    t = compile_table(one, drop_last_forward=drop)
    wanted = Counter(one.ticks.keys())
    if drop and one.name != "forward":
        wanted -= Counter(
            op for op in one.ticks if op.kind == "F" and op.virtual == one.n_virtual - 1
        )
    assert run(t) == wanted
    residuals = t.columns["backward_residual"] >= 0
    assert int(residuals.sum()) == (
        0 if one.name == "forward" else one.microbatches * (one.n_virtual - drop)
    )
    assert all(
        column.dtype == np.int32 and column.shape == (t.ticks, t.stages)
        for column in t.columns.values()
    )
    assert tuple(t.columns) == COLUMNS


@given(schedules(RUN))
def test_side_by_side_nothing_goes_backward_in_the_tick_of_its_own_forward(one: Schedule) -> None:
    t, before = compile_table(one, False, side_by_side=True), compile_table(one, False)
    assert run(t, side_by_side=True) == Counter(one.ticks.keys())
    backward = [op for op in one.ticks if op.kind == "B"]
    meets = any(one.ticks[op] == one.ticks[op._replace(kind="F")] for op in backward)
    assert t.ticks == before.ticks + meets
    reads = t.columns["backward_residual"]
    assert not ((reads == t.columns["forward_residual"]) & (reads >= 0)).any(), (
        "a slot is written in the tick in which it is read"
    )
    assert (
        t.n_inputs <= before.n_inputs
        and t.n_outputs <= t.n_residuals <= before.n_residuals + t.stages
    )


@pytest.mark.parametrize(
    ("name", "chunks", "slots"),
    [("1f1b", 1, (1, 1, 16, 2)), ("1f1b", 4, (1, 1, 40, 2)), ("gpipe", 1, (1, 1, 64, 64))],
)
def test_slots_of_eight_stages_side_by_side(
    name: str, chunks: int, slots: tuple[int, int, int, int]
) -> None:
    """Inputs wait for no backward pass; the last stage's output waits for the next tick."""
    t = compile_table(make_schedule(name, 8, 64, chunks), False, side_by_side=True)
    assert (t.n_inputs, t.n_grads, t.n_residuals, t.n_outputs) == slots


@given(schedules(RUN))
def test_slots_are_as_few_as_can_be(one: Schedule) -> None:
    """The most values that are alive at once, each from the tick after it is sent to its last
    use."""
    t = compile_table(one, drop_last_forward=False)
    last, final = one.n_virtual - 1, one.kinds[-1]
    inputs, grads = np.zeros((2, one.stages, one.n_ticks), int)
    for (kind, m, s), tick in one.ticks.items():
        if kind == "F" and s:
            inputs[
                s % one.stages, one.ticks[Op("F", m, s - 1)] + 1 : one.ticks[Op(final, m, s)] + 1
            ] += 1
        if kind == "B" and s < last:
            grads[s % one.stages, one.ticks[Op("B", m, s + 1)] + 1 : tick + 1] += 1
    assert (t.n_inputs, t.n_grads) == (inputs.max(), grads.max())


@pytest.mark.parametrize("name", RUN[:3])
def test_one_stage_is_gradient_accumulation(name: str) -> None:
    t = compile_table(make_schedule(name, 1, 5))
    assert (t.ticks, t.n_inputs, t.n_grads, t.n_residuals) == (5, 0, 0, 0)
    busy = {"backward_microbatch": np.arange(5)[:, None], "backward_chunk": np.zeros((5, 1))}
    for column in COLUMNS:
        np.testing.assert_array_equal(t.columns[column], busy.get(column, np.full((5, 1), -1)))


def test_evaluation_has_forwards_only() -> None:
    t = compile_table(make_schedule("forward", 4, 8, 2))
    used = {name for name, column in t.columns.items() if (column >= 0).any()}
    assert used == {"forward_microbatch", "forward_chunk", "forward_input", "receive_input"}
    assert (t.n_grads, t.n_residuals) == (0, 0)
    assert t.ticks == 8 * 2 + 3


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
    t = compile_table(make_schedule(name, 8, 64, chunks))
    assert (t.n_inputs, t.n_grads, t.n_residuals) == slots


def test_1f1b_needs_no_more_slots_for_more_microbatches() -> None:
    few, many = (compile_table(make_schedule("1f1b", 4, m, 2)) for m in (16, 64))
    assert dataclasses.replace(few, microbatches=0, ticks=0, columns={}) == dataclasses.replace(
        many, microbatches=0, ticks=0, columns={}
    )


def test_split_backward_passes_are_refused() -> None:
    with pytest.raises(ConfigError) as error:
        compile_table(make_schedule("zb_h1", 4, 8))
    assert str(error.value) == (
        "pipeline schedule zb_h1 computes weight gradients separately (W); the engine runs F and B "
        "only"
    )


@given(schedules(RUN), st.booleans())
def test_loops_run_every_tick_with_the_slots_that_it_needs(one: Schedule, drop: bool) -> None:
    t = compile_table(one, drop_last_forward=drop)
    found = t.loops()
    assert [tick for _, ticks in found for tick in range(t.ticks)[ticks]] == list(range(t.ticks))
    assert [slots for slots, _ in found] == [
        slots for slots in ("F", "FB", "B") if slots in dict(found)
    ]
    for slots, ticks in found:
        for slot, name in (("F", "forward"), ("B", "backward")):
            busy = (t.columns[f"{name}_microbatch"][ticks] >= 0).any(axis=1)
            assert slot in slots or not busy.any(), "work in a loop without its slot"
            assert slot not in slots or len(slots) > 1 or busy[0 if slot == "B" else -1], (
                "a loop that another could be part of"
            )
    sent = t.columns["receive_grad"][: dict(found).get("F", slice(0)).stop]
    assert (sent < 0).all(), "the loop of forward slots passes no gradients on"
