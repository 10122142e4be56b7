"""The backward pass of five matmuls in the interpreter: both ways to add to dq, both grids, and the
order of registers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_formula import assert_close, normal, values_and_grads
from jax.experimental.mosaic.gpu.fragmented_array import WGMMA_LAYOUT
from numpy.lib.stride_tricks import as_strided

from pallas_kernels import describe_attention, flash_attention, reference_attention
from pallas_kernels.attention import tuning
from pallas_kernels.attention.hopper import Tiling, attention, backward_fused
from pallas_kernels.attention.hopper.addition import _add, from_register_order, register_order
from pallas_kernels.attention.hopper.fused_tiles import FusedTiles
from pallas_kernels.dev.interpreter import interpreted

COMPILE_BUDGET = 40

HOPPER = {"platform": "gpu", "capability": (9, 0)}


@pytest.mark.parametrize("columns", [32, 48, 64, 96, 128])
def test_the_order_of_registers_is_that_of_mosaics_layout(columns: int) -> None:
    """Thread t adds its registers 4 i ... 4 i + 3 to the elements from (128 i + t) * 4 on."""
    tile = np.arange(64 * columns).reshape(64, columns)
    shape, strides = (
        WGMMA_LAYOUT.tiling.tile_shape(tile.shape),
        WGMMA_LAYOUT.tiling.tile_strides((columns, 1)),
    )
    tiled = as_strided(tile, shape, [stride * tile.itemsize for stride in strides])
    of_threads = (*WGMMA_LAYOUT.warp_dims, *WGMMA_LAYOUT.lane_dims)
    # the registers of each thread, in order
    held = np.moveaxis(tiled, of_threads, range(len(of_threads))).reshape(128, -1)
    found = np.zeros(tile.size)
    _add.in_numpy(found, tile)
    np.testing.assert_array_equal(found.reshape(-1, 128, 4).swapaxes(0, 1).reshape(128, -1), held)


@pytest.mark.parametrize("wide", [32, 64])
def test_sums_in_the_order_of_registers_become_rows_and_columns(wide: int) -> None:
    x = normal(1, 128, 2, 64)
    sums = np.zeros(register_order(1, 2, 128, 64, wide), np.float32)
    for head, row, part in np.ndindex(2, 2, 64 // wide):
        _add.in_numpy(
            sums[0, head, row, part],
            x[0, row * 64 : row * 64 + 64, head, part * wide : (part + 1) * wide],
        )
    np.testing.assert_array_equal(from_register_order(jnp.asarray(sums)), x)


def gradients_match(
    tiles: FusedTiles, H: int = 128, Hv: int = 0, seed: int | None = None, **case
) -> None:
    """Compares all results with the formula: S, T, N, K, and features."""
    S, N, K = (case.pop(name, default) for name, default in (("S", 256), ("N", 1), ("K", 1)))
    T, Hv = case.pop("T", S), Hv or H
    arrays = [
        x.astype(jnp.bfloat16)
        for x in (normal(1, S, N, H), normal(1, T, K, H, seed=3), normal(1, T, K, Hv, seed=1))
    ]
    weights = (normal(1, S, N, Hv, seed=2), normal(1, S, N, seed=2))
    row = next(row for row in tuning.entries() if row.head_dims == (H, Hv) and not row.plain)

    def ours(q, k, v):
        problem = describe_attention(
            q, k, v, return_lse=True, deterministic=False, **HOPPER, **case
        )
        return attention(
            q, k, v, problem, Tiling(row.tiling.forward, row.tiling.dq, row.tiling.dkv, tiles)
        )

    with interpreted(seed):
        found = jax.block_until_ready(
            jax.jit(functools.partial(values_and_grads, ours, weights))(arrays)
        )
    reference = functools.partial(
        values_and_grads, functools.partial(reference_attention, **case), weights
    )
    wanted = jax.jit(reference)([np.asarray(x, np.float32) for x in arrays])
    assert_close(found, wanted, 0.01)


@pytest.fixture
def by_kv_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were enough tiles for every multiprocessor."""
    monkeypatch.setattr(backward_fused, "by_query_head", lambda *sizes: False)


def test_a_block_that_walks_all_heads_of_its_group(by_kv_head: None) -> None:
    gradients_match(FusedTiles(64, 2), H=64, S=256, N=2)


@pytest.mark.parametrize("tiles", [FusedTiles(64, 2, "tma"), FusedTiles(128, 2, "tma")], ids=str)
def test_a_reducing_copy_adds_the_same(tiles: FusedTiles) -> None:
    gradients_match(tiles, H=64, N=2, S=200)


def test_padding_keys_with_tiny_normalisers_leave_no_nan() -> None:
    """Where all logits are far below 0, exp(-lse) of a padding key overflows."""
    q, k = np.full((1, 128, 1, 64), 8.0, jnp.bfloat16), np.full((1, 70, 1, 64), -8.0, jnp.bfloat16)
    with interpreted():
        loss = lambda q, k: flash_attention(  # noqa: E731
            q, k, k, causal=False, deterministic=False, implementation="mosaic", **HOPPER
        ).sum()
        found = jax.block_until_ready(
            jax.jit(jax.grad(loss, (0, 1)))(jnp.asarray(q), jnp.asarray(k))
        )
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in found)


def test_a_vmap_of_the_gradient_is_the_gradient_of_each() -> None:
    q = normal(2, 1, 128, 1, 64).astype(jnp.bfloat16)
    loss = lambda q: (  # noqa: E731
        flash_attention(q, q, q, deterministic=False, implementation="mosaic", **HOPPER)
        .astype(jnp.float32)
        .sum()
    )
    with interpreted():
        found = np.asarray(jax.jit(jax.vmap(jax.grad(loss)))(q), np.float32)
        alone = jax.jit(jax.grad(loss))
        wanted = np.stack([np.asarray(alone(x), np.float32) for x in q])
    np.testing.assert_array_equal(found, wanted)


SLOW = {
    "full, one slot": (FusedTiles(64, 1), {"causal": False, "S": 384}),
    "full, more keys than queries": (FusedTiles(64, 2), {"causal": False, "S": 130, "T": 300}),
    "full, more queries than keys, tma": (FusedTiles(64, 3, "tma"), {"causal": False, "S": 300, "T": 130}),
    "window within a tile": (FusedTiles(64, 2), {"window": 30, "S": 384}),
    "window over tiles, groups": (FusedTiles(64, 3), {"window": 200, "S": 384, "N": 2}),
    "64, wide blocks, groups": (FusedTiles(128, 2), {"H": 64, "S": 384, "N": 4, "K": 2}),
    "64, wide blocks, soft cap": (FusedTiles(128, 2), {"H": 64, "softcap": 2.0}),
    "96, tma": (FusedTiles(64, 2, "tma"), {"H": 96, "N": 2}),
    "192, values of 128, tma": (FusedTiles(64, 2, "tma"), {"H": 192, "Hv": 128, "N": 2}),
    "256": (FusedTiles(64, 1), {"H": 256, "N": 2}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("walk", ["a head", "a group"])
@pytest.mark.parametrize("name", SLOW)
def test_equals_the_formula(name: str, walk: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiles, case = SLOW[name]
    if case.get("N", 1) == 1 and walk == "a group":
        pytest.skip("a group of one head")
    monkeypatch.setattr(backward_fused, "by_query_head", lambda *sizes: walk == "a head")
    gradients_match(tiles, **case)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whatever_order_the_warpgroups_run_in(seed: int, by_kv_head: None) -> None:
    gradients_match(FusedTiles(64, 2 + seed % 2, ("red", "tma")[seed // 2]), seed=seed, S=384, N=2)


def test_tiles_that_the_kernel_cannot_have_are_refused() -> None:
    for wrong in ((32, 2, "red"), (64, 0, "red"), (64, 2, "atomic")):
        with pytest.raises(
            ValueError, match="64 or 128 queries, at least 1 stage, and adds by red or tma"
        ):
            FusedTiles(*wrong)
