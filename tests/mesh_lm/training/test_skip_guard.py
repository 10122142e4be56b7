"""Streaks of skipped steps: when a run rolls back, when it ends, and its messages."""

import math
from typing import Any

import numpy as np
import pytest

from mesh_lm.config import HealthConfig
from mesh_lm.training.skip_guard import SkipGuard, TooManySkips

NAN = math.nan


def report(
    n: int, skipped: int, loss: float = 2.0, norm: float = 1.0
) -> tuple[int, dict[str, Any]]:
    return n, {
        "skipped": np.int32(skipped),
        "loss": np.float32(loss),
        "grad_norm": np.float32(norm),
    }


def test_a_row_is_of_steps_that_follow_one_another() -> None:
    guard = SkipGuard(HealthConfig(skip_limit=3, rewinds=1))
    assert guard.step(None) is None
    for n, skipped in enumerate([0, 1, 2, 2, 3, 4], 1):
        assert guard.step(report(n, skipped)) is None
    assert guard.consecutive_skips == 2
    assert guard.step(report(7, 5, NAN)) == 5, "the first of the three"


def test_no_rewind_is_left() -> None:
    lines: list[str] = []
    guard = SkipGuard(HealthConfig(skip_limit=2), lines.append)
    guard.step(report(1, 0))
    guard.step(report(2, 1, NAN, NAN))
    with pytest.raises(
        TooManySkips,
        match=(
            r"2 steps in a row skipped, 2 to 3, the last one with loss 9, gradient norm inf; "
            r".*rewinds=1"
        ),
    ):
        guard.step(report(3, 2, 9.0, math.inf))
    assert lines == [
        "step 2 skipped, 1 in all: loss nan, gradient norm nan",
        "step 3 skipped, 2 in all: loss 9, gradient norm inf",
    ]


def test_after_a_rewind_the_counting_starts_again() -> None:
    """The state's counter rolls back, too, and each rewind is counted."""
    lines: list[str] = []
    guard = SkipGuard(HealthConfig(skip_limit=2, rewinds=1), lines.append)
    assert [guard.step(report(n, skipped, NAN)) for n, skipped in ((11, 5), (12, 6))] == [None, 11]
    words = (
        "rolling back to the checkpoint before step 11, and continuing with the batches after step "
        "12"
    )
    assert lines[-1] == f"2 steps in a row skipped, 11 to 12: {words} (rewind 1 of 1)"
    assert [guard.step(report(n, skipped)) for n, skipped in ((11, 4), (12, 4), (13, 5))] == [
        None
    ] * 3 and guard.consecutive_skips == 1
    with pytest.raises(TooManySkips, match=r"has used 1 of health.rewinds=1"):
        guard.step(report(14, 6, NAN))


def test_numbers_that_fall_begin_anew() -> None:
    """The streak restarts when the counter falls; it never has a negative number of steps."""
    guard = SkipGuard(HealthConfig(skip_limit=2, rewinds=1))
    assert [guard.step(report(n, skipped, NAN)) for n, skipped in ((11, 5), (12, 6))] == [None, 11]
    assert guard.step(report(9, 3)) is None and guard.consecutive_skips == 0


def test_the_first_step_after_a_resume() -> None:
    """The first report's counter is from the past; that the loss is not finite shows that the step
    was skipped."""
    for loss, row in ((2.0, 0), (NAN, 1)):
        guard = SkipGuard(HealthConfig())
        assert guard.step(report(101, 7, loss)) is None and guard.consecutive_skips == row


def test_steps_that_nobody_told_of() -> None:
    """An evaluation reads the metrics of the step before it, so one report is missing; the counter
    shows whether that step was skipped."""
    lines: list[str] = []
    guard = SkipGuard(HealthConfig(skip_limit=4, rewinds=1), lines.append)
    assert [guard.step(report(n, skipped, NAN)) for n, skipped in ((1, 0), (2, 1), (4, 3), (5, 4))][
        -1
    ] == 2
    assert "2 of the 2 steps up to 4 skipped, 3 in all: loss nan, gradient norm 1" in lines
    guard = SkipGuard(HealthConfig(skip_limit=4))
    assert [guard.step(report(n, skipped)) for n, skipped in ((1, 0), (2, 1), (4, 2))] == [
        None
    ] * 3 and guard.consecutive_skips == 0


def test_an_outlier_says_what_made_it_one() -> None:
    lines: list[str] = []
    guard = SkipGuard(HealthConfig(outlier=4.0), lines.append)
    for n, skipped in ((1, 0), (2, 1)):
        guard.step(report(n, skipped, 11.5, 3.0))
    words = "one of them more than 4 standard deviations above recent steps (health.outlier)"
    assert lines == [f"step 2 skipped, 1 in all: loss 11.5, gradient norm 3, {words}"]


def test_one_bad_step_can_be_the_limit() -> None:
    assert SkipGuard(HealthConfig(skip_limit=1, rewinds=1)).step(report(1, 1, NAN)) == 1
    with pytest.raises(TooManySkips, match=r"^step 1 skipped, the last one"):
        SkipGuard(HealthConfig(skip_limit=1)).step(report(1, 1, NAN))
