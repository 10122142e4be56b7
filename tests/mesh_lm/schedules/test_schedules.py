"""Named schedules, and the validity of any schedule."""

import dataclasses
import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_schedules import schedules

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.schedule import Op, Schedule, ScheduleError, assign_ticks, make_schedule


def changed(schedule: Schedule, **ticks: int | None) -> Schedule:
    """The schedule with other ticks for some ops; None removes an op.

    f_3_2=5: the forward of microbatch 3 at stage 2.
    """
    new_ticks = dict(schedule.ticks)
    for name, tick in ticks.items():
        kind, m, s = name.split("_")
        op = Op(kind.upper(), int(m), int(s))
        new_ticks.pop(op, None)
        if tick is not None:
            new_ticks[op] = tick
    return dataclasses.replace(schedule, ticks=new_ticks)


@given(schedules())
def test_every_op_runs_once_in_its_slot_after_what_it_needs(schedule: Schedule) -> None:
    kinds = {"forward": "F", "zb_h1": "FBW"}.get(schedule.name, "FB")
    last = schedule.n_virtual - 1
    ticks = schedule.ticks
    every_op = itertools.product(kinds, range(schedule.microbatches), range(schedule.n_virtual))
    assert set(ticks) == {Op(*op) for op in every_op}
    slots = {(tick, op.virtual % schedule.stages, op.kind) for op, tick in ticks.items()}
    assert len(slots) == len(ticks)
    for (kind, m, s), tick in ticks.items():
        if kind == "F" and s:
            assert ticks[Op("F", m, s - 1)] < tick
        if kind == "B":
            assert ticks[Op("F", m, s)] <= tick
            assert s == last or ticks[Op("B", m, s + 1)] < tick
        if kind == "W":
            assert ticks[Op("B", m, s)] <= tick


@given(schedules(), st.data())
def test_a_broken_dependency_is_found(schedule: Schedule, data: st.DataObject) -> None:
    """Moves an op to the tick of one that it needs, or before it, although it must be later."""
    neighbour = {"F": -1, "B": 1}
    hops = []
    for op in schedule.ticks:
        if op.kind in neighbour:
            needed = op._replace(virtual=op.virtual + neighbour[op.kind])
            if needed in schedule.ticks:
                hops.append((op, needed))
    if not hops:
        return
    op, needed = data.draw(st.sampled_from(hops))
    tick = data.draw(st.integers(0, schedule.ticks[needed]))
    with pytest.raises(ScheduleError, match=r"tick \d+, stage \d+: "):
        dataclasses.replace(schedule, ticks={**schedule.ticks, op: tick}).check()


@pytest.mark.parametrize(
    ("ticks", "message"),
    [
        (
            {"b_0_0": 3},
            (
                "tick 3, stage 0: 0B0 needs 1B0, which comes only at tick 5; a stage's output arrives one "
                "tick later"
            ),
        ),
        (
            {"f_1_2": 1},
            (
                "tick 1, stage 2: 2F1 needs 1F1, which comes only at tick 2; a stage's output arrives one "
                "tick later"
            ),
        ),
        ({"b_1_3": 2, "f_1_3": 9}, "tick 2, stage 3: 3B1 needs 3F1, which comes only at tick 9"),
        (
            {"f_1_0": 0},
            "tick 0, stage 0: 0F1 and 0F0 share a tick: a stage does one forward a tick",
        ),
        ({"f_2_1": None}, "tick 4, stage 2: 2F2 needs 1F2, which the schedule lacks"),
        ({"b_4_0": None}, "0B4 (backward on stage 0) is missing from the schedule"),
        (
            {"b_4_0": None, "b_3_0": None, "w_4_3": 99},
            "0B3 (backward on stage 0) and 20 more ops are missing from the schedule",
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
    schedule = changed(make_schedule("1f1b", 4, 5), **ticks)
    with pytest.raises(ScheduleError) as error:
        schedule.check()
    assert str(error.value) == message


def test_an_empty_schedule_is_none() -> None:
    with pytest.raises(
        ScheduleError, match=r"0F0 \(forward on stage 0\) and 3 more ops are missing"
    ):
        Schedule("mine", 2, 2, 1, {}).check()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1f2b", 4, 8), "there is no pipeline schedule '1f2b'; did you mean '1f1b'?"),
        (
            ("interleaved", 4, 8),
            "there is no pipeline schedule 'interleaved'; 1f1b with chunks > 1 is interleaved",
        ),
        (
            ("x", 4, 8),
            "there is no pipeline schedule 'x'; known: 1f1b, gpipe, classic_1f1b, zb_h1, forward",
        ),
        (("gpipe", 0, 8), "pipeline schedule gpipe: stages=0 is too small; it must be at least 1"),
        (
            ("1f1b", 4, -1),
            "pipeline schedule 1f1b: microbatches=-1 is too small; it must be at least 1",
        ),
        (("1f1b", 4, 4, 0), "pipeline schedule 1f1b: chunks=0 is too small; it must be at least 1"),
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
    """Stage 0 has six forwards before the first pair, the last stage none: drawn by hand."""
    ticks = make_schedule("1f1b", 4, 8).ticks
    assert [ticks[Op("F", m, 0)] for m in range(8)] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [ticks[Op("B", m, 0)] for m in range(8)] == [6, 7, 8, 9, 10, 11, 12, 13]
    for m in range(8):
        assert ticks[Op("F", m, 3)] == ticks[Op("B", m, 3)] == 3 + m


def test_stages_that_wait_for_one_another_for_ever() -> None:
    orders = [
        [Op("F", 0, 0), Op("B", 0, 0), Op("F", 1, 0), Op("B", 1, 0)],
        [Op("F", 1, 1), Op("B", 1, 1), Op("F", 0, 1), Op("B", 0, 1)],
    ]
    with pytest.raises(ScheduleError) as error:
        assign_ticks(orders)
    assert str(error.value) == (
        "deadlock at tick 1: every stage waits for another: stage 0 at 0B0, stage 1 at 1F1"
    )


def test_schedules_cost_no_jax() -> None:
    parts = "cost, custom, gantt, schedule, segments, stages, table, trace"
    code = (
        f"from mesh_lm.schedules import {parts}; import sys; "
        "print('jax' in sys.modules, 'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False False\n"
