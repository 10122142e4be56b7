"""Sparse patterns: their constructors, and attention under them against the formula."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_formula import assert_close, chunked, normal, values_and_grads
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import (
    BlockMask,
    Unsupported,
    choose_attention,
    describe_attention,
    flash_attention,
    reference_attention,
)
from pallas_kernels.attention.tiles import TilePlan

COMPILE_BUDGET = 6

SIZE = 64
SEGMENTS = np.sort(np.random.default_rng(1).integers(0, 3, (2, 200)))
blocks = st.integers(1, 12)
few = st.integers(1, 5)


def causal_part(mask: BlockMask) -> np.ndarray:
    return mask.visible & np.tri(*mask.visible.shape[1:], dtype=bool)


@settings(deadline=None)
@given(blocks, few, few, st.integers(1, 3))
def test_fixed_sees_its_stretch_and_the_same_summaries_everywhere(
    n: int, stride: int, summary: int, heads: int
) -> None:
    summary = min(summary, stride)
    mask = BlockMask.fixed(n * SIZE, size=SIZE, stride=stride, summary=summary, heads=heads)
    row, key = np.arange(n)[:, None], np.arange(n)
    same = row // stride == key // stride
    assert mask.visible.shape == (heads, n, n)
    assert mask.visible[:, same].all()
    for head in range(heads):
        # Outside its stretch, a query sees the same `summary` blocks of every other stretch.
        for i in range(n):
            seen = {int(j) % stride for j in key[mask.visible[head, i] & ~same[i]]}
            assert len(seen) <= summary
        whole = [
            j
            for j in range(n // stride * stride)
            if any(mask.visible[head, i, j] and not same[i, j] for i in range(n))
        ]
        assert not whole or len({j % stride for j in whole}) == summary
    if heads == 1 and n > stride:
        assert mask.visible[0, :, stride - 1].all()


@settings(deadline=None)
@given(blocks, few)
def test_strided_connects_every_earlier_block_in_two_steps(n: int, stride: int) -> None:
    """The paper's condition on a factorised pattern: any earlier position is reachable through one
    other position."""
    seen = causal_part(BlockMask.strided(n * SIZE, size=SIZE, stride=stride))[0]
    assert ((seen.astype(int) @ seen.astype(int)) > 0)[np.tri(n, dtype=bool)].all()
    assert (seen.sum(1) <= stride + 1 + n // stride).all()


@settings(deadline=None)
@given(blocks, few)
def test_sliding_sees_its_neighbours(n: int, near: int) -> None:
    mask = BlockMask.sliding(n * SIZE, size=SIZE, blocks=near).visible[0]
    assert all(
        set(np.flatnonzero(mask[i])) == set(range(max(0, i - near + 1), min(n, i + near)))
        for i in range(n)
    )


@settings(deadline=None)
@given(
    blocks,
    st.integers(0, 2),
    st.sampled_from([1, 3, 5]),
    st.integers(0, 4),
    st.booleans(),
    few,
    st.integers(0, 3),
)
def test_bigbird_has_each_of_its_three_parts(
    n: int, to_all: int, window: int, random: int, causal: bool, heads: int, seed: int
) -> None:
    kwargs = {
        "global_blocks": to_all,
        "window_blocks": window,
        "random_blocks": random,
        "causal": causal,
        "heads": heads,
    }
    mask = BlockMask.bigbird(n * SIZE, size=SIZE, seed=seed, **kwargs)
    assert mask == BlockMask.bigbird(n * SIZE, size=SIZE, seed=seed, **kwargs)
    assert mask.visible.shape == (heads, n, n)
    assert mask.visible[:, :to_all].all() and mask.visible[:, :, :to_all].all()
    row, key = np.arange(n)[:, None], np.arange(n)
    near = (row < to_all) | (key < to_all) | (np.abs(row - key) <= window // 2)
    assert mask.visible[:, near].all()
    drawn, free = mask.visible & ~near, ~near & (key <= row) if causal else ~near
    assert (drawn.sum(-1) == np.minimum(random, free.sum(-1))).all()
    assert not drawn[:, ~free].any()


@settings(deadline=None)
@given(blocks, few)
def test_every_query_of_a_causal_call_sees_its_own_block(n: int, k: int) -> None:
    S = n * SIZE - 5
    masks = (
        BlockMask.fixed(S, size=SIZE, stride=k),
        BlockMask.strided(S, size=SIZE, stride=k),
        BlockMask.sliding(S, size=SIZE, blocks=k),
        BlockMask.bigbird(S, size=SIZE, causal=True),
    )
    for mask in masks:
        assert mask.faults(S, S, 4) == []
        assert mask.visible[:, np.arange(n), np.arange(n)].all()


def test_heads_draw_differently_and_seeds_too() -> None:
    masks = [BlockMask.bigbird(16 * SIZE, size=SIZE, heads=2, seed=seed) for seed in (0, 1)]
    assert (masks[0].visible[0] != masks[0].visible[1]).any()
    assert masks[0] != masks[1]


def test_equal_patterns_are_one_static_argument() -> None:
    visible = np.eye(3, dtype=bool)[None]
    a, b, c = BlockMask(visible, 64), BlockMask(visible.copy(), 64), BlockMask(visible, 128)
    visible[:] = False
    assert a == b and hash(a) == hash(b) and a != c and a.visible.any()
    with pytest.raises(ValueError, match="read-only"):
        a.visible[0, 0, 0] = False


@settings(deadline=None)
@given(
    st.integers(1, 400),
    st.integers(1, 400),
    st.sampled_from([64, 128, 192]),
    st.integers(1, 300),
    st.booleans(),
    st.integers(0, 9),
)
def test_tiles_are_those_in_which_some_head_sees_something(
    S: int, T: int, size: int, chunk: int, causal: bool, seed: int
) -> None:
    shape = (4, -(-S // size), -(-T // size))
    mask = BlockMask(np.random.default_rng(seed).random(shape) < 0.3, size)
    x = [jax.ShapeDtypeStruct((1, length, 4, 8), jnp.float32) for length in (S, T)]
    problem = describe_attention(x[0], x[1], x[1], causal=causal, block_mask=mask)
    plan = TilePlan.of(problem, chunk, chunk)
    visible = mask.dense(S, T).any(0)
    if causal:
        visible &= np.arange(S)[:, None] >= np.arange(T)
    covered = np.zeros((S, T), int)
    for tile in plan.tiles():
        rows, keys = (
            slice(n * c, (n + 1) * c) for n, c in ((tile.i, plan.q_chunk), (tile.j, plan.kv_chunk))
        )
        covered[rows, keys] += 1
        assert visible[rows, keys].any()
    assert (covered[visible] == 1).all() and covered.max(initial=0) <= 1


# B = 2, N = 4.
CASES = {
    "heads apart, causal, groups, padded": {
        "block_mask": BlockMask.bigbird(
            200, size=64, global_blocks=0, window_blocks=1, random_blocks=1, heads=4
        )
    },
    "documents, sinks, window, one kv head": {
        "K": 1,
        "segment_ids": SEGMENTS,
        "sinks": True,
        "window": 90,
        "block_mask": BlockMask.strided(200, size=64, stride=2),
    },
    "not causal, other keys, softcap, rows that see nothing": {
        "T": 150,
        "causal": False,
        "softcap": 2.0,
        "block_mask": BlockMask(np.array([[[0, 0, 0], [1, 0, 1], [0, 1, 0], [1, 1, 1]]], bool), 64),
    },
    "traced offset, a head that sees nothing, blocks of two tiles": {
        "T": 150,
        "traced": 30,
        "chunk": 64,
        "block_mask": BlockMask(
            np.array(
                [[[1, 0], [1, 1]], [[0, 0], [0, 0]], [[1, 1], [0, 1]], [[0, 1], [1, 0]]], bool
            ),
            128,
        ),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name: str) -> None:
    case = dict(CASES[name])
    S, T, K, chunk, traced = (
        case.pop(key, default)
        for key, default in {"S": 200, "T": 200, "K": 2, "chunk": 512, "traced": None}.items()
    )
    arrays = [normal(2, S, 4, 8), normal(2, T, K, 8, seed=3), normal(2, T, K, 8, seed=1)]
    arrays += [normal(4)] if case.pop("sinks", False) else []
    weights = normal(2, S, 4, 8, seed=2), normal(2, S, 4, seed=2)

    def both(offset, *arrays):
        features = case if traced is None else case | {"q_offset": offset}

        def attention(f, **more):
            return lambda q, k, v, sinks=None: f(q, k, v, sinks=sinks, **features, **more)

        return tuple(
            values_and_grads(f, weights, arrays)
            for f in (attention(chunked, chunk=chunk), attention(reference_attention))
        )

    assert_close(*jax.jit(both)(np.int32(traced or 0), *arrays), 1e-5)


def test_what_is_hidden_is_not_computed() -> None:
    """A pattern with one block per row needs as many tiles as there are rows."""
    x = jax.ShapeDtypeStruct((1, 1024, 1, 8), jnp.float32)

    def trips(mask: BlockMask) -> list[str]:
        return re.findall(
            r"length=(\d+)",
            str(
                jax.make_jaxpr(lambda q: flash_attention(q, q, q, block_mask=mask, platform="cpu"))(
                    x
                )
            ),
        )

    assert trips(BlockMask.sliding(1024, size=128, blocks=1)) == ["8"]
    assert trips(BlockMask.sliding(1024, size=128, blocks=2)) == ["15"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: BlockMask(np.ones((4, 4), bool), 64),
            r"bool \[heads or 1, blocks of queries, blocks of keys\], got bool \[4, 4\]",
        ),
        (lambda: BlockMask(np.ones((1, 4, 4)), 64), "got float64"),
        (
            lambda: BlockMask(np.ones((1, 4, 4), bool), 100),
            "size must be a multiple of 64, got 100",
        ),
        (
            lambda: BlockMask.fixed(256, stride=2, summary=3),
            "summary must be 1 to stride=2 blocks, got 3",
        ),
        (lambda: BlockMask.strided(256, stride=0), "got stride=0, which must be at least 1"),
        (lambda: BlockMask.sliding(256, blocks=0), "got blocks=0, which must be at least 1"),
        (lambda: BlockMask.bigbird(256, window_blocks=2), "window_blocks must be odd, got 2"),
        (
            lambda: BlockMask.bigbird(256, random_blocks=-1),
            "got random_blocks=-1, which must be at least 0",
        ),
    ],
)
def test_wrong_patterns(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (
            BlockMask.sliding(256, blocks=1),
            "block_mask has 2 x 2 blocks of 128; 300 queries and 300 keys need 3 x 3",
        ),
        (
            BlockMask.bigbird(300, heads=3),
            r"block_mask has 3 heads; it must have 1 \(for all\) or 4",
        ),
        (np.ones((1, 3, 3), bool), "block_mask must be a BlockMask, got ndarray"),
    ],
)
def test_a_pattern_that_does_not_fit_the_call(mask, message: str) -> None:
    x = jax.ShapeDtypeStruct((1, 300, 4, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        flash_attention(x, x, x, block_mask=mask)


def test_who_serves_it() -> None:
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    small, large = (
        describe_attention(
            x,
            x,
            x,
            block_mask=BlockMask.sliding(256, size=n, blocks=1),
            platform="gpu",
            capability=(9, 0),
        )
        for n in (64, 128)
    )
    assert "multiples of 128, not 64" in choose_attention(small).rejected["mosaic"]
    assert "no sparse patterns" in choose_attention(large).rejected["cudnn"]
    assert "multiples" not in choose_attention(large).rejected.get("mosaic", "")
    with pytest.raises(Unsupported, match="no block_mask"):
        flash_attention(
            x, x, x, block_mask=large.block_mask, implementation="cudnn", platform="gpu"
        )
