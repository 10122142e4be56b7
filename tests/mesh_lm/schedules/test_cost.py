"""Time and memory of schedules against the closed forms of the papers (arXiv 2104.04473,
2401.10241)."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_schedules import schedules

from mesh_lm.errors import ConfigError
from mesh_lm.schedules.cost import CLOCKS, Clock, Durations, in_flight, stash_bytes, timeline
from mesh_lm.schedules.schedule import Schedule, make_schedule, needs
from mesh_lm.schedules.table import compile_table

times = st.floats(0.1, 10)


@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), times, times, st.sampled_from(CLOCKS)
)
def test_the_bubble_of_the_default_schedules(
    stages: int, groups: int, chunks: int, forward: float, backward: float, clock: Clock
) -> None:
    """(P-1) / (V M), at any ratio of F to B, even under the lockstep clock.

    M: a multiple of P from 2P on.
    """
    schedule = make_schedule("1f1b", stages, stages * (groups + 1), chunks)
    expected = (stages - 1) / (chunks * schedule.microbatches)
    assert timeline(schedule, Durations(forward, backward), clock).bubble == pytest.approx(expected)


@given(st.integers(1, 6), st.integers(1, 20), times, times, st.sampled_from(CLOCKS))
def test_the_bubble_of_gpipe_and_one_chunk(
    stages: int, microbatches: int, forward: float, backward: float, clock: Clock
) -> None:
    for name in ("gpipe", "1f1b"):
        schedule = make_schedule(name, stages, microbatches)
        bubble = timeline(schedule, Durations(forward, backward), clock).bubble
        assert bubble == pytest.approx((stages - 1) / microbatches)


@pytest.mark.parametrize(
    ("name", "chunks", "backward", "packed", "bubbles"),
    [
        ("gpipe", 1, 2, None, (0.1094, 0.1094, 0.1094)),
        ("classic_1f1b", 1, 2, False, (0.1094, 0.4375, 0.4375)),
        ("classic_1f1b", 1, 3, False, (0.1094, 0.6016, 0.6016)),
        ("classic_1f1b", 1, 2, True, (0.1094, 0.9688, 0.9688)),
        ("1f1b", 1, 2, False, (0.1094, 0.4375, 0.4375)),
        ("1f1b", 1, 3, False, (0.1094, 0.6016, 0.6016)),
        ("1f1b", 1, 2, True, (0.1094, 0.1094, 0.1094)),
        ("1f1b", 1, 3, True, (0.1094, 0.1094, 0.1094)),
        ("1f1b", 2, 2, False, (0.0547, 0.3646, 0.3646)),
        ("1f1b", 2, 2, None, (0.0547, 0.0547, 0.0547)),
        ("1f1b", 4, 2, False, (0.0273, 0.3281, 0.3281)),
        ("1f1b", 4, 2, None, (0.0273, 0.0273, 0.0273)),
        ("zb_h1", 1, 2, False, (0.0365, 0.0365, 0.0365)),
        ("zb_h1", 1, 2, True, (0.0365, 0.9323, 0.9323)),
    ],
)
def test_eight_stages_and_64_microbatches(
    name: str, chunks: int, backward: float, packed: bool | None, bubbles: tuple[float, ...]
) -> None:
    schedule = make_schedule(name, 8, 64, chunks, packed=packed)
    durations = Durations(1, backward)
    measured = [timeline(schedule, durations, clock).bubble for clock in CLOCKS]
    assert measured == pytest.approx(bubbles, abs=5e-5)


@given(st.integers(1, 6), st.integers(1, 4))
def test_what_is_in_flight(stages: int, chunks: int) -> None:
    """On stage p 2(P-1-p) + (V-1) P + 1 forwards wait for their backward, V P + P - 1 at most.

    P - p in classic 1F1B; P in ZB-H1.
    """
    microbatches = 4 * stages

    def passes(name: str, chunks: int = 1) -> tuple[int, ...]:
        return in_flight(make_schedule(name, stages, microbatches, chunks))

    eager = passes("1f1b", chunks)
    for p in range(stages):
        assert eager[p] == 2 * (stages - 1 - p) + (chunks - 1) * stages + 1
    assert max(eager) == chunks * stages + stages - 1
    assert passes("classic_1f1b") == tuple(range(stages, 0, -1))
    assert passes("zb_h1") == (stages,) * stages
    assert passes("gpipe", chunks) == (microbatches * chunks,) * stages
    assert passes("forward") == (0,) * stages


@pytest.mark.parametrize(
    ("chunks", "head", "drop", "excess"),
    [
        (1, 1, False, 0.359),
        (1, 1, True, 0.109),
        (2, 1, False, 0.305),
        (2, 1, True, 0.180),
        (2, 0.5, True, 0.055),
    ],
)
def test_the_head_goes_where_the_last_forward_was(
    chunks: int, head: float, drop: bool, excess: float
) -> None:
    """Free until it costs one virtual stage's F.

    head: its cost in forwards of a stage. excess: time over that of the layers, with B = 3F.
    """
    schedule = make_schedule("1f1b", 8, 64, chunks)
    durations = Durations(1, 3, head=head / 3)
    span = timeline(schedule, durations, drop_last_forward=drop).span
    assert span / (64 * 4) - 1 == pytest.approx(excess, abs=5e-4)


@given(schedules(), times, times, st.floats(0, 1), st.floats(0, 3), st.floats(0, 3), st.booleans())
def test_time_keeps_the_order(
    schedule: Schedule,
    forward: float,
    backward: float,
    share: float,
    embed: float,
    head: float,
    drop: bool,
) -> None:
    durations = Durations(forward, backward, share, embed, head)
    totals = []
    for clock in CLOCKS:
        line = timeline(schedule, durations, clock, drop_last_forward=drop)
        totals.append(line.span)
        spans_by_stage: dict[int, list[tuple[float, float]]] = {}
        for op, (start, end) in line.spans.items():
            spans_by_stage.setdefault(op.virtual % schedule.stages, []).append((start, end))
            for needed, _ in needs(op, schedule.n_virtual):
                if needed in line.spans:
                    assert line.spans[needed][1] <= start + 1e-9
        for spans in spans_by_stage.values():
            for (_, end), (next_start, _) in itertools.pairwise(sorted(spans)):
                assert end <= next_start + 1e-9
        assert line.bubble >= -1e-9
    asynchronous, neighbour, lockstep = totals
    assert asynchronous <= neighbour + 1e-9
    assert neighbour <= lockstep + 1e-9


def test_all_of_the_work_is_there() -> None:
    """Stage 0 has the embedding, the last stage the head.

    A split backward pass takes as long as an unsplit one.
    """
    durations = Durations(1, 3, 0.25, embed=0.5, head=0.1)
    training = (6 * 4 * 1.5, 6 * 4, 6 * (4 + 0.3))
    for name in ("1f1b", "zb_h1"):
        assert timeline(make_schedule(name, 3, 6), durations).busy == pytest.approx(training)
    evaluation = (6 * 1.5, 6, 6 * 1.1)
    schedule = make_schedule("forward", 3, 6, 2)
    assert timeline(schedule, durations).busy == pytest.approx(evaluation)


def test_bytes_of_the_stash() -> None:
    """Eight stages of 1F1B: 13 inputs and one gradient of 32 MiB each."""
    assert stash_bytes(compile_table(make_schedule("1f1b", 8, 64)), 2**25) == 14 * 2**25


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        ({"forward": 0}, "forward=0 must be a finite time above 0"),
        ({"backward": float("nan")}, "backward=nan must be a finite time above 0"),
        ({"head": -1}, "head=-1 must be a finite time of at least 0"),
        ({"weight_share": 1.5}, "weight_share=1.5 must be at least 0 and at most 1"),
    ],
)
def test_times_that_are_none(durations: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Durations(**durations)
    assert str(error.value) == message
