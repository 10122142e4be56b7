"""The bubble of stages with different work, by hand; tests/mesh_lm/schedules/test_cost.py covers
equal stages."""

import pytest

from mesh_lm.schedules.cost import CLOCKS, Clock, Durations, timeline
from mesh_lm.schedules.schedule import make_schedule


@pytest.mark.parametrize("clock", CLOCKS)
def test_the_bubble_is_that_of_the_stage_with_most_work(clock: Clock) -> None:
    """One microbatch, two stages: F 1, F 1, B with a head of 1 and its backward of 2, B 2. Of 9 the
    last stage works 6, the first 3."""
    found = timeline(make_schedule("1f1b", 2, 1), Durations(1, 2, head=1), clock)
    assert (found.span, found.busy, found.bubble) == (9, (3, 6), 0.5)
