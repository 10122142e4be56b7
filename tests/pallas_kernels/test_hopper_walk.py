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

lengths = st.integers(1, 70)
sizes = st.sampled_from([4, 8, 16])
bands = st.tuples(st.booleans(), st.none() | st.integers(1, 60), st.integers(-80, 80))
"""The arguments of `Band.of`: causal, window, q_offset."""


def square(S: int, T: int, causal: bool, window: int | None, q_offset: int) -> np.ndarray:
    """Whether a query sees a key, bool [S, T]."""
    row = q_offset + np.arange(S)[:, None]
    key = np.arange(T)
    visible = np.ones((S, T), bool)
    if causal:
        visible &= row >= key
        if window is not None:
            visible &= row - key < window
    return visible


def check(
    visible: np.ndarray, tile: int, block: int, walks: list[Walk], pad_is_harmless: bool = False
) -> None:
    """Each tile's walk visits every visible pair, no block twice, and masks what is not full."""
    for i, walk in enumerate(walks):
        rows = visible[i * tile : (i + 1) * tile]
        assert 0 <= walk.n_full <= walk.n
        blocks = [int(walk.block(step)) for step in range(walk.n)]
        assert len(set(blocks)) == len(blocks)
        for step, j in enumerate(blocks):
            part = rows[:, j * block : (j + 1) * block]
            assert part.size
            if step < walk.n_full:
                assert part.all() and (pad_is_harmless or part.shape[1] == block)
        not_visited = np.ones(rows.shape[1], bool)
        for j in blocks:
            not_visited[j * block : (j + 1) * block] = False
        assert not rows[:, not_visited].any()


def walks_of(
    band: Band, n_rows: int, n_columns: int, tile: int, block: int, **options: bool
) -> list[Walk]:
    """The walks of all tiles of rows."""
    walks = []
    for first in range(0, n_rows, tile):
        last = min(first + tile, n_rows) - 1
        walks.append(Walk.of(limits(band, first, last, n_columns, block, **options)))
    return walks


@settings(max_examples=300, deadline=None)
@given(lengths, lengths, sizes, sizes, bands)
def test_limits_cover_what_is_visible(S: int, T: int, tile: int, block: int, mask: tuple) -> None:
    band = Band.of(*mask)
    visible = square(S, T, *mask)
    check(visible, tile, block, walks_of(band, S, T, tile, block))
    walks = walks_of(band.transposed, T, S, tile, block, pad_is_harmless=True)
    check(visible.T, tile, block, walks, pad_is_harmless=True)


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
    S = 50
    T = 41
    rng = np.random.default_rng(seed)
    q_ids = rng.integers(0, 4, (2, S))
    k_ids = rng.integers(0, 4, (2, T))
    if in_runs:
        q_ids = np.sort(q_ids)
        k_ids = np.sort(k_ids)
    run = compiled(S, T, causal, window, transposed)
    tables = np.asarray(run(np.int32(q_offset), np.int32(q_ids), np.int32(k_ids)))
    for b in range(2):
        visible = square(S, T, causal, window, q_offset) & (q_ids[b][:, None] == k_ids[b])
        walks = [Walk.of(Limits(*map(int, row))) for row in tables[b]]
        check(visible.T if transposed else visible, 16, 8, walks, pad_is_harmless=transposed)


def test_documents_in_runs_are_walked_alone() -> None:
    """Four documents of 32: each tile of 16 visits the 4 blocks of its document, none of which
    needs a mask."""
    ids = np.repeat(np.arange(4, dtype=np.int32), 32)[None]
    run = jax.jit(lambda ids: table(Band.of(False, None, 0), 128, 128, 16, 8, ids, ids))
    rows = [Limits(*row) for row in np.asarray(run(ids))[0]]
    assert [row.stop - row.start for row in rows] == [4] * 8
    assert [row.full_stop - row.full_start for row in rows] == [4] * 8


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
    S: int, T: int, block: int, mask: tuple, band_is_known: bool, seed: int
) -> None:
    causal, window, q_offset = mask
    mask = (causal, None if window is None else 5 * window, 5 * q_offset)
    pattern = np.random.default_rng(seed).random((2, -(-S // 128), -(-T // 128))) < 0.6
    visible = BlockMask(pattern, 128).dense(S, T) & square(S, T, *mask)

    def check_lists(visible: np.ndarray, pattern: np.ndarray, band: Band, by_key: bool) -> None:
        _, n_rows, n_columns = visible.shape
        counts, blocks = lists(
            pattern,
            128,
            band if band_is_known else None,
            n_rows,
            n_columns,
            128,
            block,
            pad_is_harmless=by_key,
        )
        for head in range(2):
            walks = []
            for i in range(blocks.shape[1]):
                n_full, n = map(int, counts[head, i])
                walks.append(Walk(n_full, n, lambda step, row=blocks[head, i]: row[step]))
            check(visible[head], 128, block, walks, pad_is_harmless=by_key)

    band = Band.of(*mask)
    check_lists(visible, pattern, band, by_key=False)
    check_lists(visible.swapaxes(1, 2), pattern.swapaxes(1, 2), band.transposed, by_key=True)
