"""The blocks that the Hopper kernels visit: every visible pair, no block twice, and a mask unless
everything is visible."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.attention.block_mask import BlockMask
from pallas_kernels.attention.hopper.walk import Band, Limits, Walk, limits, lists, table

COMPILE_BUDGET = 12

lengths, sizes = st.integers(1, 70), st.sampled_from([4, 8, 16])
bands = st.tuples(st.booleans(), st.none() | st.integers(1, 60), st.integers(-80, 80))


def square(S: int, T: int, causal: bool, window: int | None, q_offset: int) -> np.ndarray:
    row, key = q_offset + np.arange(S)[:, None], np.arange(T)
    visible = np.ones((S, T), bool)
    if causal:
        visible &= row >= key
        if window is not None:
            visible &= row - key < window
    return visible


def check(
    visible: np.ndarray, tile: int, block: int, walks: list[Walk], pad_is_harmless: bool = False
) -> None:
    for i, walk in enumerate(walks):
        rows, seen = visible[i * tile : (i + 1) * tile], []
        assert 0 <= walk.n_full <= walk.n
        for step in range(walk.n):
            j = int(walk.block(step))
            part = rows[:, j * block : (j + 1) * block]
            assert part.size
            if step < walk.n_full:
                assert part.all() and (pad_is_harmless or part.shape[1] == block)
            seen.append(j)
        assert len(set(seen)) == len(seen)
        left = np.ones(rows.shape[1], bool)
        for j in seen:
            left[j * block : (j + 1) * block] = False
        assert not rows[:, left].any()


def walks_of(
    band: Band, n_rows: int, n_columns: int, tile: int, block: int, **how: bool
) -> list[Walk]:
    starts = range(0, n_rows, tile)
    return [
        Walk.of(limits(band, first, min(first + tile, n_rows) - 1, n_columns, block, **how))
        for first in starts
    ]


@settings(max_examples=300, deadline=None)
@given(lengths, lengths, sizes, sizes, bands)
def test_limits_cover_what_is_visible(S: int, T: int, tile: int, block: int, how: tuple) -> None:
    band, visible = Band.of(*how), square(S, T, *how)
    check(visible, tile, block, walks_of(band, S, T, tile, block))
    check(
        visible.T,
        tile,
        block,
        walks_of(band.transposed, T, S, tile, block, pad_is_harmless=True),
        pad_is_harmless=True,
    )


def test_a_causal_square_visits_its_triangle_and_masks_its_diagonal() -> None:
    walks = walks_of(Band.of(True, None, 0), 1024, 1024, 128, 128)
    assert [(walk.n_full, walk.n) for walk in walks] == [(i, i + 1) for i in range(8)]


def test_tiles_that_do_not_divide_a_mask_are_refused() -> None:
    with pytest.raises(ValueError, match="128 x 256 do not divide"):
        lists(np.ones((1, 2, 2), bool), 128, None, 256, 256, 128, 256)


@functools.cache
def compiled(S: int, T: int, causal: bool, window: int | None, transposed: bool):
    def run(q_offset, q_ids, k_ids):
        band = Band.of(causal, window, q_offset)
        if transposed:
            return table(band.transposed, T, S, 16, 8, k_ids, q_ids, pad_is_harmless=True)
        return table(band, S, T, 16, 8, q_ids, k_ids)

    return jax.jit(run)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(-50, 50),
    st.booleans(),
    st.none() | st.just(13),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2**30),
)
def test_tables_of_traced_offsets_and_documents(
    q_offset: int, causal: bool, window: int | None, transposed: bool, in_runs: bool, seed: int
) -> None:
    S, T, rng = 50, 41, np.random.default_rng(seed)
    q_ids, k_ids = (rng.integers(0, 4, (2, n)) for n in (S, T))
    if in_runs:
        q_ids, k_ids = np.sort(q_ids), np.sort(k_ids)
    found = np.asarray(
        compiled(S, T, causal, window, transposed)(
            np.int32(q_offset), np.int32(q_ids), np.int32(k_ids)
        )
    )
    for b in range(2):
        visible = square(S, T, causal, window, q_offset) & (q_ids[b][:, None] == k_ids[b])
        walks = [Walk.of(Limits(*map(int, row))) for row in found[b]]
        check(visible.T if transposed else visible, 16, 8, walks, pad_is_harmless=transposed)


def test_documents_in_runs_are_walked_alone() -> None:
    """Four documents of 32: each tile of 16 visits the 4 blocks of its document, none of which
    needs a mask."""
    ids = np.repeat(np.arange(4, dtype=np.int32), 32)[None]
    found = np.asarray(
        jax.jit(lambda ids: table(Band.of(False, None, 0), 128, 128, 16, 8, ids, ids))(ids)
    )
    assert [
        (stop - start, full_stop - full_start) for start, full_start, full_stop, stop in found[0]
    ] == [(4, 4)] * 8


@settings(max_examples=100, deadline=None)
@given(
    st.integers(100, 500),
    st.integers(100, 500),
    st.sampled_from([64, 128]),
    bands,
    st.booleans(),
    st.integers(0, 2**30),
)
def test_lists_of_a_block_mask(
    S: int, T: int, block: int, how: tuple, known: bool, seed: int
) -> None:
    causal, window, q_offset = how
    how = causal, None if window is None else 5 * window, 5 * q_offset
    blocks = np.random.default_rng(seed).random((2, -(-S // 128), -(-T // 128))) < 0.6
    mask = BlockMask(blocks, 128)
    for transposed in (False, True):
        band, pattern, n_rows, n_columns = Band.of(*how), blocks, S, T
        if transposed:
            band, pattern, n_rows, n_columns = band.transposed, blocks.swapaxes(1, 2), T, S
        counts, found = lists(
            pattern,
            128,
            band if known else None,
            n_rows,
            n_columns,
            128,
            block,
            pad_is_harmless=transposed,
        )
        for h in range(2):
            visible = mask.dense(S, T)[h] & square(S, T, *how)
            walks = [
                Walk(*map(int, counts[h, i]), lambda step, row=found[h, i]: row[step])
                for i in range(found.shape[1])
            ]
            check(
                visible.T if transposed else visible, 128, block, walks, pad_is_harmless=transposed
            )
