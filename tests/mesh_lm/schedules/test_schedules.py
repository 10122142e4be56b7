"""Named schedules, and the validity of any schedule."""

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_schedules import schedules

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.schedule import Op, Schedule, ScheduleError, assign_ticks, make_schedule


def changed(one: Schedule, **ticks: int | None) -> Schedule:
    """The schedule with other ticks for some ops (f_3_2=5: the forward of microbatch 3 at virtual
    stage 2); None removes an op."""
    new = dict(one.ticks)
    for name, tick in ticks.items():
        kind, m, s = name.split("_")
        op = Op(kind.upper(), int(m), int(s))
        new.pop(op, None)
        if tick is not None:
            new[op] = tick
    return dataclasses.replace(one, ticks=new)


@given(schedules())
def test_every_op_runs_once_in_its_slot_after_what_it_needs(one: Schedule) -> None:
    kinds = {"forward": "F", "zb_h1": "FBW"}.get(one.name, "FB")
    last = one.stages * one.chunks - 1
    assert set(one.ticks) == {
        Op(k, m, s) for k in kinds for m in range(one.microbatches) for s in range(last + 1)
    }
    slots = [(tick, op.virtual % one.stages, op.kind) for op, tick in one.ticks.items()]
    assert len(set(slots)) == len(slots)
    for (kind, m, s), tick in one.ticks.items():
        if kind == "F" and s:
            assert one.ticks[Op("F", m, s - 1)] < tick
        if kind == "B":
            assert one.ticks[Op("F", m, s)] <= tick
            assert s == last or one.ticks[Op("B", m, s + 1)] < tick
        if kind == "W":
            assert one.ticks[Op("B", m, s)] <= tick


@given(schedules(), st.data())
def test_a_broken_dependency_is_found(one: Schedule, data: st.DataObject) -> None:
    """Moves an op to the tick of one that it needs, or before it, although it must be later."""
    order = {"F": -1, "B": 1}
    hops = [
        (op, Op(op.kind, op.microbatch, op.virtual + order[op.kind]))
        for op in one.ticks
        if op.kind in order and Op(op.kind, op.microbatch, op.virtual + order[op.kind]) in one.ticks
    ]
    if not hops:
        return
    op, needed = data.draw(st.sampled_from(hops))
    tick = data.draw(st.integers(0, one.ticks[needed]))
    with pytest.raises(ScheduleError, match=r"tick \d+, stage \d+: "):
        dataclasses.replace(one, ticks={**one.ticks, op: tick}).check()


@pytest.mark.parametrize(
    ("ticks", "message"),
    [
        (
            {"b_0_0": 3},
            (
                "tick 3, stage 0: 0B0 needs 1B0, which is at tick 5; a stage's output arrives one "
                "tick later"
            ),
        ),
        (
            {"f_1_2": 1},
            (
                "tick 1, stage 2: 2F1 needs 1F1, which is at tick 2; a stage's output arrives one "
                "tick later"
            ),
        ),
        ({"b_1_3": 2, "f_1_3": 9}, "tick 2, stage 3: 3B1 needs 3F1, which is at tick 9"),
        (
            {"f_1_0": 0},
            "tick 0, stage 0: 0F1 and 0F0 share a tick: a stage does one forward a tick",
        ),
        ({"f_2_1": None}, "tick 4, stage 2: 2F2 needs 1F2, which the schedule lacks"),
        ({"b_4_0": None}, "0B4 (backward on stage 0) is missing"),
        (
            {"b_4_0": None, "b_3_0": None, "w_4_3": 99},
            "0B3 (backward on stage 0) and 20 more ops are missing",
        ),
        (
            {"f_5_0": 50},
            (
                "tick 50, stage 0: 0F5: no such op; there are microbatches 0 to 4, virtual stages "
                "0 to 3, and ticks from 0"
            ),
        ),
        (
            {"f_0_0": -1},
            (
                "tick -1, stage 0: 0F0: no such op; there are microbatches 0 to 4, virtual stages "
                "0 to 3, and ticks from 0"
            ),
        ),
    ],
)
def test_what_a_schedule_lacks(ticks: dict[str, int | None], message: str) -> None:
    one = make_schedule("1f1b", 4, 5)
    with pytest.raises(ScheduleError) as error:
        changed(one, **ticks).check()
    assert str(error.value) == message


def test_an_empty_schedule_is_none() -> None:
    with pytest.raises(
        ScheduleError, match=r"0F0 \(forward on stage 0\) and 3 more ops are missing"
    ):
        Schedule("mine", 2, 2, 1, {}).check()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1f2b", 4, 8), "no pipeline schedule '1f2b'; did you mean '1f1b'?"),
        (
            ("interleaved", 4, 8),
            "no pipeline schedule 'interleaved'; 1f1b with chunks > 1 is interleaved",
        ),
        (("x", 4, 8), "no pipeline schedule 'x'; known: 1f1b, gpipe, classic_1f1b, zb_h1, forward"),
        (("gpipe", 0, 8), "pipeline schedule gpipe: stages=0 must be at least 1"),
        (("1f1b", 4, -1), "pipeline schedule 1f1b: microbatches=-1 must be at least 1"),
        (("1f1b", 4, 4, 0), "pipeline schedule 1f1b: chunks=0 must be at least 1"),
        (
            ("1f1b", 4, 6, 2),
            (
                "pipeline schedule 1f1b: with chunks=2, microbatches=6 must be a multiple of "
                "stages=4, as 4 or 8 is"
            ),
        ),
        (
            ("1f1b", 4, 3, 2),
            (
                "pipeline schedule 1f1b: with chunks=2, microbatches=3 must be a multiple of "
                "stages=4, as 4 is"
            ),
        ),
        (
            ("zb_h1", 4, 8, 2),
            (
                "pipeline schedule zb_h1: chunks=2, but it has one chunk a stage; with more: 1f1b, "
                "gpipe, forward"
            ),
        ),
    ],
)
def test_mistakes(words: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_schedule(*words)
    assert str(error.value) == message


def test_the_ticks_of_four_stages() -> None:
    """A schedule drawn by hand: stage 0 has six forwards before the first pair, the last stage
    none."""
    one = make_schedule("1f1b", 4, 8)
    assert [one.ticks[Op("F", m, 0)] for m in range(8)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [one.ticks[Op("B", m, 0)] for m in range(8)] == [6, 7, 8, 9, 10, 11, 12, 13]
    assert all(one.ticks[Op("F", m, 3)] == one.ticks[Op("B", m, 3)] == 3 + m for m in range(8))


def test_stages_that_wait_for_one_another_for_ever() -> None:
    orders = [
        [Op("F", 0, 0), Op("B", 0, 0), Op("F", 1, 0), Op("B", 1, 0)],
        [Op("F", 1, 1), Op("B", 1, 1), Op("F", 0, 1), Op("B", 0, 1)],
    ]
    with pytest.raises(ScheduleError) as error:
        assign_ticks(orders)
    assert (
        str(error.value)
        == "deadlock at tick 1: every stage waits for another: stage 0 at 0B0, stage 1 at 1F1"
    )


def test_schedules_cost_no_jax() -> None:
    parts = "cost, custom, gantt, schedule, segments, stages, table, trace"
    code = (
        f"from mesh_lm.schedules import {parts}; import sys; print('jax' in sys.modules, "
        "'matplotlib' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "False False\n"
    )
