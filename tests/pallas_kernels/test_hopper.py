"""The Hopper kernels against the formula, forward and gradients, every feature, on the CPU with
`pallas_kernels.dev.interpreter`.

It also detects races on the GPU: a missing wait, a buffer overwritten while it is read, a missed
phase of a barrier.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_formula import assert_close, normal, values_and_grads

from pallas_kernels import (
    BlockMask,
    attention_gradients,
    choose_attention,
    describe_attention,
    flash_attention,
    merge,
    reference_attention,
)
from pallas_kernels.attention import occupancy, tuning
from pallas_kernels.attention.hopper import ForwardTiles, Tiles, Tiling, attention
from pallas_kernels.dev.interpreter import interpreted

COMPILE_BUDGET = 100

HOPPER = {"implementation": "mosaic", "platform": "gpu", "capability": (9, 0)}
RUNS = np.sort(np.random.default_rng(1).integers(0, 5, (2, 300)))
SHUFFLED = np.random.default_rng(1).integers(0, 2, (1, 200))

# B = 1, H = Hv = 64, bf16 unless said.
CASES = {
    "causal, groups": {"S": 300, "N": 4, "K": 2},
    "packed documents, window, sinks": {
        "B": 2,
        "S": 300,
        "N": 2,
        "K": 1,
        "segment_ids": RUNS,
        "window": 90,
        "sinks": True,
    },
}
SLOW = {
    "not causal, heads of 128, uneven": {"S": 200, "T": 330, "H": 128, "Hv": 128, "causal": False},
    "one kv head, heads of 256": {"S": 256, "N": 3, "K": 1, "H": 256, "Hv": 256},
    "heads of 192 with values of 128, window": {"S": 260, "N": 2, "K": 1, "H": 192, "Hv": 128, "window": 100},
    "heads of 96, fp16": {"S": 300, "N": 2, "K": 2, "H": 96, "Hv": 96, "dtype": jnp.float16},
    "heads of 128, fp16, groups, softcap": {"S": 256, "N": 2, "K": 1, "H": 128, "Hv": 128, "dtype": jnp.float16, "softcap": 2.0},
    "softcap, sinks, scale": {"S": 256, "N": 2, "K": 2, "softcap": 1.5, "sinks": True, "scale": 0.3},
    "rows that see nothing, sinks": {"S": 200, "T": 260, "N": 2, "K": 1, "q_offset": -70, "sinks": True},
    "rows that see nothing, window": {"S": 300, "T": 200, "q_offset": 60, "window": 50},
    "traced offset, window": {"S": 130, "T": 300, "N": 2, "K": 1, "traced": 150, "window": 140},
    "nothing is visible": {"S": 130, "T": 130, "q_offset": -500},
    "packed documents, not causal": {"B": 2, "S": 300, "segment_ids": RUNS, "causal": False},
    "segments in no order": {"S": 200, "segment_ids": SHUFFLED},
    "other segments on the keys, traced offset": {
        "B": 2,
        "S": 150,
        "T": 300,
        "segment_ids": RUNS[:, 100:250],
        "kv_segment_ids": RUNS,
        "traced": 100,
    },
    "bigbird by head, groups": {"S": 640, "N": 4, "K": 2, "block_mask": BlockMask.bigbird(640, size=128, random_blocks=1, heads=4)},
    "strided, not causal": {"S": 500, "N": 2, "K": 1, "causal": False, "block_mask": BlockMask.strided(500, size=128, stride=2)},
    "fixed, packed documents, window": {
        "B": 2,
        "S": 300,
        "N": 2,
        "K": 2,
        "segment_ids": RUNS,
        "window": 200,
        "block_mask": BlockMask.fixed(300, size=128, stride=2, heads=2),
    },
}  # fmt: skip


def arguments(case: dict) -> tuple[list, dict]:
    """(q, k, v and sinks of a case, its other features)."""
    case = dict(case)
    B, S, N, K, H = (
        case.pop(name, default) for name, default in zip("BSNKH", (1, 256, 1, 1, 64), strict=True)
    )
    T, Hv, dtype = case.pop("T", S), case.pop("Hv", 64), case.pop("dtype", jnp.bfloat16)
    arrays = [
        normal(B, S, N, H).astype(dtype),
        normal(B, T, K, H, seed=3).astype(dtype),
        normal(B, T, K, Hv, seed=1).astype(dtype),
    ]
    return arrays + ([normal(N)] if case.pop("sinks", False) else []), case


def check(
    case: dict,
    ours=functools.partial(flash_attention, return_lse=True, **HOPPER),
    seed: int | None = None,
) -> None:
    """1 % of the largest value: a few roundings of 2^-9 in bf16, of 2^-12 in fp16. The reference
    has the same inputs, in fp32."""
    arrays, case = arguments(case)
    (B, S, N, _), Hv = arrays[0].shape, arrays[2].shape[3]
    weights, traced = (
        (normal(B, S, N, Hv, seed=2), normal(B, S, N, seed=2)),
        case.pop("traced", None),
    )
    ours, dtype = (
        functools.partial(ours, deterministic=case.pop("deterministic", False)),
        arrays[0].dtype,
    )

    def run(attention, offset, *arrays):
        features = case if traced is None else case | {"q_offset": offset}
        return values_and_grads(
            lambda q, k, v, sinks=None: attention(q, k, v, sinks=sinks, **features), weights, arrays
        )

    with interpreted(seed):
        found = jax.block_until_ready(
            jax.jit(functools.partial(run, ours))(np.int32(traced or 0), *arrays)
        )
    (out, lse), grads = found
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    assert [g.dtype for g in grads[:3]] == [dtype] * 3
    wanted = jax.jit(functools.partial(run, reference_attention))(
        np.int32(traced or 0), *(np.asarray(x, np.float32) for x in arrays)
    )
    assert_close(found, wanted, 0.01 if dtype == jnp.bfloat16 else 0.002)
    assert_close(lse, wanted[0][1], 1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_formula(name: str, deterministic: bool) -> None:
    check(CASES[name] | {"deterministic": deterministic})


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", SLOW)
def test_equals_the_formula_in_every_feature(name: str, deterministic: bool) -> None:
    check(SLOW[name] | {"deterministic": deterministic})


def test_heads_that_go_through_their_tiles_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a head reads does not fit the cache, so that each is a section of its own."""
    monkeypatch.setattr(occupancy, "CACHE", 1)
    check({"S": 256, "N": 4, "K": 2})


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_order_the_warpgroups_run_in(seed: int) -> None:
    check({"S": 384, "N": 2, "K": 1, "segment_ids": RUNS[:1].repeat(2, 1)[:, :384]}, seed=seed)
    check(
        {
            "S": 384,
            "N": 2,
            "K": 1,
            "segment_ids": RUNS[:1].repeat(2, 1)[:, :384],
            "deterministic": True,
        },
        seed=seed,
    )


@pytest.mark.parametrize(
    ("number", "deterministic"),
    [
        pytest.param(
            number,
            deterministic,
            # Row 6 takes longer than the others together.
            marks=pytest.mark.slow
            if number % 4 == 2 * deterministic and number != 6
            else pytest.mark.exhaustive,
        )
        for number, deterministic in itertools.product(range(len(tuning.entries())), (False, True))
    ],
)
def test_every_row_of_the_table(number: int, deterministic: bool) -> None:
    """The tiles of an entry, with several tiles in both directions."""
    row = tuning.entries()[number]
    H, Hv = row.head_dims

    def ours(q, k, v, sinks=None, **features):
        return attention(
            q,
            k,
            v,
            describe_attention(
                q, k, v, return_lse=True, platform="gpu", capability=(9, 0), **features
            ),
            row.tiling,
        )

    check(
        {
            "S": 600,
            "N": 2,
            "K": 1,
            "H": H,
            "Hv": Hv,
            "causal": row.causal is not False,
            "deterministic": deterministic,
        },
        ours,
    )


def test_merge_of_two_halves_of_the_keys_is_the_whole() -> None:
    """Merged parts, as in ring attention."""
    q, k, v = (
        x.astype(jnp.bfloat16)
        for x in (
            normal(1, 128, 2, 64),
            normal(1, 256, 1, 64, seed=3),
            normal(1, 256, 1, 64, seed=1),
        )
    )

    def ring(q, k, v):
        parts = [
            flash_attention(
                q, k[:, i : i + 128], v[:, i : i + 128], q_offset=128 - i, return_lse=True, **HOPPER
            )
            for i in (0, 128)
        ]
        return merge(*parts[0], *parts[1])

    with interpreted():
        found = jax.block_until_ready(jax.jit(ring)(q, k, v))
    assert_close(
        found, jax.jit(functools.partial(reference_attention, q_offset=128))(q, k, v), 0.01
    )


def test_blocks_beyond_what_is_visible_are_not_read() -> None:
    """NaN in keys that a causal mask or a document hides would be visible if these were visited."""
    q, k, v = (
        x.astype(jnp.bfloat16)
        for x in (
            normal(1, 128, 1, 64),
            normal(1, 256, 1, 64, seed=3),
            normal(1, 256, 1, 64, seed=1),
        )
    )
    k, v = (x.at[:, 128:].set(jnp.nan) for x in (jnp.asarray(k), jnp.asarray(v)))
    with interpreted():
        out = jax.block_until_ready(jax.jit(lambda *x: flash_attention(*x, **HOPPER))(q, k, v))
    assert np.isfinite(np.asarray(out, np.float32)).all()


def test_a_window_wider_than_an_int32_is_no_window() -> None:
    q = normal(1, 128, 1, 64).astype(jnp.bfloat16)
    with interpreted():
        found = [
            jax.jit(functools.partial(flash_attention, window=window, **HOPPER))(q, q, q)
            for window in (2**40, None)
        ]
        found = [np.asarray(x, np.float32) for x in found]
    np.testing.assert_array_equal(*found)


def test_tiles_that_a_kernel_cannot_have_are_refused() -> None:
    for block, stages in ((256, 2), (128, 1)):
        with pytest.raises(ValueError, match="64 or 128 columns"):
            Tiles(block, stages)


def test_a_batch_beyond_the_grid_is_refused() -> None:
    q = jax.ShapeDtypeStruct((70_000, 64, 1, 64), jnp.bfloat16)
    choice = choose_attention(describe_attention(q, q, q, platform="gpu", capability=(9, 0)))
    assert choice.name != "mosaic" and "at most 65,535" in choice.rejected["mosaic"]


def test_tiles_come_from_the_table_for_the_device_and_length() -> None:
    q = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)
    problem = describe_attention(q, q, q, platform="gpu", capability=(9, 0))
    assert tuning.tiling(problem, "") == next(
        row.tiling for row in tuning.entries() if row.head_dims == (128, 128) and row.device is None
    )
    with pytest.raises(LookupError, match="no tiles for head dims 80"):
        tuning.tiling(dataclasses.replace(problem, q_shape=(1, 8, 1, 80)), "")
    row = tuning.TuningEntry(
        (128, 128),
        Tiling(ForwardTiles(64, 2), Tiles(64, 2), Tiles(64, 2)),
        device="H200",
        causal=True,
        length=4096,
    )
    assert row.serves(problem, "NVIDIA H200") and not row.serves(problem, "NVIDIA H100 80GB HBM3")
    assert not row.serves(dataclasses.replace(problem, causal=False), "NVIDIA H200")
    assert not row.serves(dataclasses.replace(problem, k_shape=(1, 2048, 2, 128)), "NVIDIA H200")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("H", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_gradients_that_are_not_rounded(H: int, deterministic: bool) -> None:
    """In fp32, and rounded they are those that the kernels round; beside heads of 256, a kernel of
    its own sums dv."""
    q, k, v, dout = (normal(1, 256, 2, H, seed=seed).astype(jnp.bfloat16) for seed in (0, 3, 1, 2))
    how = HOPPER | {"deterministic": deterministic}

    def run(q, k, v, dout):
        out, lse = reference_attention(q, k, v)
        found = [
            attention_gradients(q, k, v, out.astype(q.dtype), lse, dout, unrounded=wide, **how)[:3]
            for wide in (True, False)
        ]
        return found, jax.vjp(
            lambda *x: reference_attention(*x)[0], *(x.astype(jnp.float32) for x in (q, k, v))
        )[1](dout.astype(jnp.float32))

    with interpreted():
        (wide, rounded), wanted = jax.block_until_ready(jax.jit(run)(q, k, v, dout))
    assert {x.dtype for x in wide} == {jnp.dtype("float32")}
    assert_close(wide, wanted, 0.01)
    for x, y in zip(wide, rounded, strict=True):
        np.testing.assert_array_equal(
            np.asarray(x.astype(jnp.bfloat16), np.float32), np.asarray(y, np.float32)
        )
