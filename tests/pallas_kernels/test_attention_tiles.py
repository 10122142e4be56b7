"""Tiles: every visible pair of query and key is in exactly one tile, and every tile has a visible
pair."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pallas_kernels.attention.problem import AttentionProblem
from pallas_kernels.attention.tiles import TilePlan

COMPILE_BUDGET = 0

lengths = st.integers(1, 90)


def plan_of(S: int, T: int, q_chunk: int, kv_chunk: int, **features) -> TilePlan:
    q_shape = (1, S, 1, 8)
    k_shape = (1, T, 1, 8)
    problem = AttentionProblem(
        platform="cpu",
        capability=(8, 0),
        dtype="float32",
        q_shape=q_shape,
        k_shape=k_shape,
        v_shape=k_shape,
        scale=1.0,
        **features,
    )
    return TilePlan.of(problem, q_chunk, kv_chunk)


@settings(deadline=None)
@given(
    lengths,
    lengths,
    st.integers(1, 100),
    st.integers(1, 100),
    st.integers(-100, 100),
    st.none() | st.integers(1, 100),
    st.booleans(),
)
# unrolled, and in tiles: the oldest key of a window is seen by a tile's first row alone
@example(90, 90, 100, 100, 0, 10, True)
@example(64, 64, 16, 16, 0, 2, True)
def test_tiles_cover_what_is_visible_once_and_nothing_else(
    S: int, T: int, q_chunk: int, kv_chunk: int, q_offset: int, window: int | None, causal: bool
) -> None:
    window = window if causal else None
    plan = plan_of(S, T, q_chunk, kv_chunk, causal=causal, window=window, q_offset=q_offset)
    row = q_offset + np.arange(S)[:, None]
    key = np.arange(T)
    visible = np.ones((S, T), bool)
    if causal:
        visible &= row >= key
    if window is not None:
        visible &= row - key < window
    covered = np.zeros((S, T), int)
    for tile in plan.tiles():
        rows = slice(tile.i * plan.q_chunk, (tile.i + 1) * plan.q_chunk)
        keys = slice(tile.j * plan.kv_chunk + tile.start, tile.j * plan.kv_chunk + tile.stop)
        covered[rows, keys] += 1
        assert visible[rows, keys].any()
    assert covered.max(initial=0) <= 1
    assert (covered[visible] == 1).all()


@settings(deadline=None)
@given(lengths, lengths, st.integers(1, 100), st.integers(1, 100))
def test_a_traced_offset_walks_the_whole_square(
    S: int, T: int, q_chunk: int, kv_chunk: int
) -> None:
    plan = plan_of(S, T, q_chunk, kv_chunk, q_offset=None)
    assert len(plan.tiles()) == plan.n_q * plan.n_kv


@settings(deadline=None)
@given(lengths, st.integers(1, 100))
def test_chunks_pad_less_than_a_chunk_and_are_not_larger_than_asked(
    length: int, chunk: int
) -> None:
    plan = plan_of(length, 90, chunk, 16, q_offset=None)
    assert plan.q_chunk <= max(chunk, 1)
    assert 0 <= plan.n_q * plan.q_chunk - length < plan.q_chunk


def test_a_causal_square_of_one_chunk_skips_three_eighths() -> None:
    plan = plan_of(256, 256, 512, 512)
    assert plan.unrolled
    assert [(tile.start, tile.stop) for tile in plan.tiles()] == [
        (0, 64),
        (0, 128),
        (0, 192),
        (0, 256),
    ]


def test_a_long_causal_square_walks_its_triangle() -> None:
    plan = plan_of(4096, 4096, 512, 512)
    assert not plan.unrolled
    assert len(plan.tiles()) == 8 * 9 // 2
