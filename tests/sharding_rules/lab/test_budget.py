"""Limits of exposed time in a test: by mesh axis, and of the whole step."""

from __future__ import annotations

import dataclasses

import lab_report
import pytest

from sharding_rules.lab import LabError, assert_exposed
from sharding_rules.lab.report import Report
from sharding_rules.lab.summary import (
    exposed_by_axes,
    exposed_by_phase,
    exposed_words,
    headline,
    ratios,
)


def waiting(**us: float) -> Report:
    """A report with a step of a second, in which compute waits for the first collective along each
    axis."""
    report = lab_report.report(model_us=0.5e6)
    assert report.timeline
    line = dataclasses.replace(report.timeline, step=1e6, exposed=sum(us.values()))
    first = {axis: next(one for one in report.collectives if axis in one.axes) for axis in us}
    sent = tuple(
        dataclasses.replace(first[axis], axes=(axis,), exposed=n, loops=(1,))
        for axis, n in us.items()
    )
    return dataclasses.replace(report, timeline=line, collectives=sent)


def test_a_program_within_its_limits() -> None:
    report = waiting(tensor=50e3, fsdp=20e3)
    assert_exposed(report, tensor=0.05, fsdp=0.02, step=0.07)
    assert_exposed(report, fsdp=0.02)


def test_a_program_that_waits_too_long_says_for_what() -> None:
    with pytest.raises(
        LabError,
        match=(
            r"(?s)waits longer than allowed\n  - tensor: 5\.0% of the step exposed, 4\.0% "
            r"allowed.*1 x "
        ),
    ) as told:
        assert_exposed(waiting(tensor=50e3, fsdp=20e3), tensor=0.04, fsdp=0.02)
    assert "fsdp:" not in str(told.value)
    with pytest.raises(LabError, match=r"step: 7\.0% of the step exposed, 6\.0% allowed"):
        assert_exposed(waiting(tensor=50e3, fsdp=20e3), step=0.06)


def test_what_cannot_be_asserted() -> None:
    with pytest.raises(LabError, match="no mesh axis tensr; the mesh has"):
        assert_exposed(waiting(tensor=1.0), tensr=0.1)
    with pytest.raises(LabError, match="has no timeline"):
        assert_exposed(lab_report.report(timeline=None), tensor=0.1)


def test_exposed_time_by_axes_and_phase_and_the_step_over_the_model() -> None:
    report = waiting(tensor=50e3, fsdp=20e3)
    assert exposed_by_axes(report) == {"tensor": 50e3, "fsdp": 20e3}
    assert sum(exposed_by_phase(report).values()) == pytest.approx(70e3)
    assert report.model_ratio == pytest.approx(
        2
    ) and "2.00 x the model's matmuls and attention" in headline(report)
    assert (
        ratios(report)["exposed_share"] == pytest.approx(0.07)
        and ratios(report)["exposed_us"]["axes"]["tensor"] == 50e3
    )
    assert exposed_words(report).startswith("tensor 5 %, fsdp 2 %; ")
    recompute = dataclasses.replace(
        report.collectives[0],
        where=dataclasses.replace(report.collectives[0].where, phase="recompute"),
    )
    assert list(exposed_by_phase(dataclasses.replace(report, collectives=(recompute,)))) == [
        "backward"
    ]
    assert lab_report.report(model_us=0.0).model_ratio is None
