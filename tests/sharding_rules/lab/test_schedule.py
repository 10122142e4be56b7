"""The timeline cut into pieces."""

from __future__ import annotations

import dataclasses

import lab_report
import pytest

from sharding_rules.lab.charts import ticks
from sharding_rules.lab.report import Location, Span, Timeline
from sharding_rules.lab.schedule import pieces


def test_loops_that_matter_are_pieces_of_their_own() -> None:
    line = lab_report.timeline()
    found = pieces(line)
    assert [(one.name, one.times) for one in found] == [
        ("forward of embed", 4),
        ("forward of layers", 384),
        ("backward and forward of loss", 4),
        ("backward and recompute of layers", 384),
        ("optimizer", 1),
    ]
    assert found[1].duration == 3900 and found[3].duration == 11_700


def test_the_pieces_are_the_step() -> None:
    line = lab_report.timeline()
    assert sum(one.total for one in pieces(line)) == pytest.approx(line.step)
    assert sum(one.waiting for one in pieces(line)) == pytest.approx(line.exposed)


def test_waits_are_what_compute_does_not_cover() -> None:
    spans = [
        ("network", 0.0, 10.0),
        ("compute", 2.0, 3.0),
        ("compute", 4.0, 2.0),
        ("compute", 9.0, 4.0),
        ("network", 14.0, 1.0),
    ]
    line = Timeline(
        15,
        9,
        11,
        6,
        tuple(
            Span("x", stream, "matmul", start, us, (), Location()) for stream, start, us in spans
        ),
    )  # pyright: ignore[reportArgumentType]
    (piece,) = pieces(line)
    assert piece.waits == [(0, 2), (6, 9), (14, 15)] and piece.name == "unnamed"


def test_small_loops_stay_inside_with_all_their_trips() -> None:
    work = [(0.0, 90.0, (4,)), (90.0, 1.0, (4, 10)), (91.0, 9.0, (4,))]
    line = Timeline(
        4 * 109,
        4 * 109,
        0,
        0,
        tuple(Span("x", "compute", "matmul", at, us, loops, Location()) for at, us, loops in work),
    )
    (piece,) = pieces(line)
    assert piece.loops == (4,) and piece.duration == 100 and piece.total == line.step


def test_nothing_scheduled() -> None:
    assert pieces(dataclasses.replace(lab_report.timeline(), spans=())) == []


@pytest.mark.parametrize(
    ("length", "step"), [(11.2, 2), (24_500, 5000), (8, 1), (0.7, 0.1), (1, 0.2)]
)
def test_ticks_are_round(length: float, step: float) -> None:
    found = ticks(length)
    assert (
        found[1] == pytest.approx(step)
        and found[-1] <= length < found[-1] + step + 1e-9
        and len(found) <= 9
    )
