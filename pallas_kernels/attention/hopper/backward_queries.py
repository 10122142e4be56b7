"""The backward pass on Hopper: the gradient of the queries. Sizes as in `spec.py`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.addition import add_from_registers, launch_unrounded
from pallas_kernels.attention.hopper.backward_sweep import Ring, slots, tight, weights
from pallas_kernels.attention.hopper.spec import (
    COMPUTING,
    REGISTERS,
    WARPGROUP,
    Refs,
    Spec,
    Tiles,
    accumulator,
    band_of,
    block_position,
    hidden,
    launch,
    matrix,
    opaque,
    spread,
    transposed,
    vector,
    walk_of,
    warpgroup,
)
from pallas_kernels.attention.hopper.walk import Walk
from pallas_kernels.attention.occupancy import section_of_queries


def dq(
    spec: Spec,
    tiles: Tiles,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    sides: dict[str, Array | None],
) -> Array:
    """The gradient [B, S, N, H] of q [B, S, N, H]; k [B, T, K, H], v [B, T, K, V], dout [B, S, N,
    V], padded to complete tiles.

    In the type of q, or in fp32 if it is not rounded. lse, delta: fp32 [B, N, S]; lse to the base
    2, +inf in rows that are padding or see no key. sides: as in `forward`, without sinks.
    """
    (B, S, N, H), T, V = q.shape, k.shape[1], v.shape[3]
    W, C, stages = COMPUTING, tiles.block, min(tiles.stages, T // tiles.block)
    # Keys are read twice, values once: if memory is short, the values get fewer slots.
    stages, v_stages = slots(stages, tiles.rows * (H + V), C * H, C * V)
    copies = 1 + spec.segments  # ids are loaded with their keys or queries
    scratch = {
        "q_s": matrix(WARPGROUP, H, q.dtype, (W,)),
        "dout_s": matrix(WARPGROUP, V, q.dtype, (W,)),
        "k_s": matrix(C, H, k.dtype, (stages,)),
        "v_s": matrix(C, V, v.dtype, (v_stages,)),
        # Each array takes at least a kilobyte, and wide heads leave only three: lse and delta share
        # one array, and so do all ids.
        "vectors_s": plgpu.SMEM((2, W, WARPGROUP), jnp.float32),
        "ids_s": plgpu.SMEM((tiles.rows + stages * C,), jnp.int32) if spec.segments else None,
        "here": plgpu.Barrier(num_arrivals=3 + copies, num_barriers=W),
        "k_here": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "v_here": plgpu.Barrier(num_barriers=v_stages),
        "k_free": plgpu.Barrier(num_arrivals=W, num_barriers=stages),
        "v_free": plgpu.Barrier(num_arrivals=W, num_barriers=v_stages),
    }

    def body(refs: Refs) -> None:
        # Each warpgroup computes its own position: shared code would need registers before they are
        # distributed.
        wg = warpgroup()
        pl.when(wg == W)(lambda: _Kernel(spec, tiles, N // k.shape[2], refs).fetch())
        pl.when(wg < W)(lambda: _Kernel(spec, tiles, N // k.shape[2], refs).compute(wg))

    inputs = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta, **sides}
    start = launch_unrounded if spec.unrounded else launch
    return start(
        body, inputs, {"dq": jax.ShapeDtypeStruct(q.shape, q.dtype)}, scratch,
        name="flash_attention_dq",
        flops=spec.flops(B, N, 2 * H + V), occupancy=spec.occupancy(B, N, k.shape[2], H + V),
        grid=(B, N, S // tiles.rows), section=section_of_queries(T, N, k.shape[2], H + V),
    ).dq  # fmt: skip


class _Kernel:
    """One tile of queries of one head against the keys that it sees."""

    def __init__(self, spec: Spec, tiles: Tiles, group: int, refs: Refs) -> None:
        self.spec, self.tiles, self.group, self.refs = spec, tiles, group, refs
        self.batch, self.head, tile = block_position()
        # If later queries see more keys, they come first, so that the last tiles of the grid are
        # short.
        self.tile = refs.q.shape[1] // tiles.rows - 1 - tile if spec.causal else tile
        self.keys = Ring(refs.k_here, refs.k_free, refs.k_s.shape[0])
        self.values = Ring(refs.v_here, refs.v_free, refs.v_s.shape[0])
        self.tight = tight(refs.q.shape[3], tiles.block, 1)
        # The slope of a soft cap needs as many registers as dp: if they are few, dp is computed
        # after the slope is used.
        self.late = self.tight and spec.softcap is not None

    def walk(self) -> Walk:
        """The walk of this tile. Each warpgroup computes its own: shared code would need registers
        before they are distributed.
        """
        spec, refs = self.spec, self.refs
        return walk_of(
            self.tiles, band_of(spec, refs), spec.S, spec.T, refs, self.batch, self.head, self.tile
        )

    def q_ids_s(self, wg: Any) -> Any:
        return self.refs.ids_s.at[pl.ds(wg * WARPGROUP, WARPGROUP)]

    def k_ids_s(self, slot: Any) -> Any:
        return self.refs.ids_s.at[
            pl.ds(self.tiles.rows + slot * self.tiles.block, self.tiles.block)
        ]

    def fetch(self) -> None:
        """Loads the keys and values, a few blocks ahead."""
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        refs, walk, C = self.refs, self.walk(), self.tiles.block
        kv_head = lax.div(self.head, jnp.int32(self.group))

        @pl.loop(0, walk.n)
        def _(step: Any) -> None:
            keys = pl.ds(walk.block(step) * C, C)
            ids = [(refs.k_ids.at[self.batch, keys], self.k_ids_s)] if self.spec.segments else []
            self.keys.fill(
                step, (refs.k.at[self.batch, keys, kv_head], lambda slot: refs.k_s.at[slot]), *ids
            )
            self.values.fill(
                step, (refs.v.at[self.batch, keys, kv_head], lambda slot: refs.v_s.at[slot])
            )

    def compute(self, wg: Any) -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        refs, walk = self.refs, self.walk()
        row = self.tile * self.tiles.rows + wg * WARPGROUP
        rows, here = pl.ds(row, WARPGROUP), refs.here.at[wg]
        plgpu.copy_gmem_to_smem(refs.q.at[self.batch, rows, self.head], refs.q_s.at[wg], here)
        plgpu.copy_gmem_to_smem(refs.dout.at[self.batch, rows, self.head], refs.dout_s.at[wg], here)
        plgpu.copy_gmem_to_smem(
            refs.lse.at[self.batch, self.head, rows], refs.vectors_s.at[0, wg], here
        )
        plgpu.copy_gmem_to_smem(
            refs.delta.at[self.batch, self.head, rows], refs.vectors_s.at[1, wg], here
        )
        if self.spec.segments:
            plgpu.copy_gmem_to_smem(refs.q_ids.at[self.batch, rows], self.q_ids_s(wg), here)
        plgpu.barrier_wait(here)
        lse, delta = vector(refs.vectors_s.at[0, wg], 0), vector(refs.vectors_s.at[1, wg], 0)

        def sum_up(acc: Any) -> Array:
            def loop(start: Any, stop: Any, row: Any = None) -> None:
                lax.fori_loop(
                    start,
                    stop,
                    lambda step, _: self.step(acc, walk, step, wg, lse, delta, row),
                    None,
                )

            if self.spec.masks(self.spec.T, self.tiles.block):
                loop(0, walk.n_full)
                loop(walk.n_full, walk.n, row)
            else:
                loop(0, walk.n)
            return acc[...]

        sums = pl.run_scoped(sum_up, accumulator(refs.q.shape[3]))
        if self.spec.unrounded:
            add_from_registers(
                refs.dq.at[self.batch, self.head, self.tile * COMPUTING + wg, 0],
                sums * self.spec.scale,
            )
            return
        refs.q_s.at[wg][...] = (sums * self.spec.scale).astype(refs.dq.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.q_s.at[wg], refs.dq.at[self.batch, rows, self.head])
        plgpu.wait_smem_to_gmem(0)

    def step(
        self, acc: Any, walk: Walk, step: Any, wg: Any, lse: Array, delta: Array, row: Any
    ) -> None:
        """One block of keys; `row`: the first query, where the block needs a mask. The last product
        stays in flight.
        """
        refs, spec, C = self.refs, self.spec, self.tiles.block
        slot = self.keys.take(step)
        wg = opaque(wg)

        def gradient(s_ref: Any, dp_ref: Any) -> Array:
            plgpu.wgmma(s_ref, refs.q_s.at[wg], transposed(refs.k_s.at[slot]))

            def dp() -> None:
                plgpu.wgmma(
                    dp_ref, refs.dout_s.at[wg], transposed(refs.v_s.at[self.values.take(step)])
                )

            if not self.late:
                dp()
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0 if self.late else 1)
            if not self.tight:
                # After this, the product that the previous step left in flight is also done.
                pl.when(step > 0)(lambda: self.keys.give(step - 1))
            mask = None
            if row is not None:
                q_ids = k_ids = None
                if spec.segments:
                    q_ids, k_ids = vector(self.q_ids_s(wg), 0), vector(self.k_ids_s(slot), 1)
                mask = hidden(
                    band_of(spec, refs),
                    (WARPGROUP, C),
                    row,
                    walk.block(step) * C,
                    q_ids,
                    k_ids,
                    spec.T,
                )
            _, w = weights(spec, s, lse, 0, mask)
            if self.late:
                dp()
            ds = w * (dp_ref[...] - spread(delta, s.shape))
            self.values.give(step)
            return ds.astype(refs.k.dtype)

        ds = pl.run_scoped(gradient, accumulator(C), accumulator(C))
        plgpu.wgmma(acc, ds, refs.k_s.at[slot])
        if self.tight:
            plgpu.wgmma_wait(0)
            self.keys.give(step)
