"""The backward pass on Hopper: the gradient of the queries.

A tile of queries visits the keys that it sees.

    loading warpgroup    shared memory    computing warpgroups, 64 queries each
    TMA of K  -------->  k_s[slot]  --->  S = Q K^T,  dQ += dS K
    TMA of V  -------->  v_s[slot]  --->  dP = dO V^T

A computing warpgroup loads its own Q, dO, lse and delta, once. dQ of a step stays in flight during
S of the next one, which then gives the slot of its keys back. Sizes as in `spec.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.addition import add_from_registers, launch_unrounded
from pallas_kernels.attention.hopper.backward_sweep import (
    Ring,
    probabilities,
    registers_are_short,
    ring_sizes,
)
from pallas_kernels.attention.hopper.spec import (
    COMPUTING,
    REGISTERS,
    WARPGROUP,
    Refs,
    Spec,
    Tiles,
    accumulator,
    block_position,
    hidden,
    kernel_band,
    launch,
    matrix,
    opaque,
    spread,
    tile_walk,
    transposed,
    vector,
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
    """Returns the gradient of q [B, S, N, H], in its type, or in fp32 if it is not rounded.

    Args:
      q, k, v, dout: [B, S, N, H], [B, T, K, H], [B, T, K, V], [B, S, N, V], padded to complete
        tiles.
      lse: fp32 [B, N, S], to the base 2; +inf in rows that are padding or see no key.
      delta: fp32 [B, N, S].
      sides: as in `forward`, without sinks.
    """
    B, S, N, H = q.shape
    T, K = k.shape[1:3]
    V = v.shape[3]
    W = COMPUTING
    C = tiles.block
    # Keys are read twice, values once: if memory is short, the values get fewer slots.
    n_turns = min(tiles.stages, T // C)
    k_stages, v_stages = ring_sizes(n_turns, tiles.rows * (H + V), C * H, C * V)
    n_copies = 1 + spec.segments  # ids are loaded with their keys or queries
    scratch = {
        "q_s": matrix(WARPGROUP, H, q.dtype, (W,)),
        "dout_s": matrix(WARPGROUP, V, q.dtype, (W,)),
        "k_s": matrix(C, H, k.dtype, (k_stages,)),
        "v_s": matrix(C, V, v.dtype, (v_stages,)),
        # Each array takes at least a kilobyte, and wide heads leave only three: lse and delta share
        # one array, and so do all ids.
        "vectors_s": plgpu.SMEM((2, W, WARPGROUP), jnp.float32),
        "ids_s": plgpu.SMEM((tiles.rows + k_stages * C,), jnp.int32) if spec.segments else None,
        # The operands that stay: Q, dO, lse, delta, and ids.
        "fixed_ready": plgpu.Barrier(num_arrivals=3 + n_copies, num_barriers=W),
        "k_ready": plgpu.Barrier(num_arrivals=n_copies, num_barriers=k_stages),
        "v_ready": plgpu.Barrier(num_barriers=v_stages),
        "k_free": plgpu.Barrier(num_arrivals=W, num_barriers=k_stages),
        "v_free": plgpu.Barrier(num_arrivals=W, num_barriers=v_stages),
    }

    def body(refs: Refs) -> None:
        # Each warpgroup computes its own position: shared code would need registers before they are
        # distributed.
        wg = warpgroup()
        pl.when(wg == W)(lambda: _Kernel(spec, tiles, N // K, refs).fetch())
        pl.when(wg < W)(lambda: _Kernel(spec, tiles, N // K, refs).compute(wg))

    launch_kernel = launch_unrounded if spec.unrounded else launch
    results = launch_kernel(
        body,
        {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta, **sides},
        {"dq": jax.ShapeDtypeStruct(q.shape, q.dtype)},
        scratch,
        name="flash_attention_dq",
        flops=spec.flops(B, N, 2 * H + V),
        occupancy=spec.occupancy(B, N, K, H + V),
        grid=(B, N, S // tiles.rows),
        section=section_of_queries(T, N, K, H + V),
    )
    return results.dq


class _Kernel:
    """One tile of queries of one head against the keys that it sees."""

    def __init__(self, spec: Spec, tiles: Tiles, group: int, refs: Refs) -> None:
        """group: query heads of a kv head."""
        self.spec = spec
        self.tiles = tiles
        self.group = group
        self.refs = refs
        self.batch, self.head, tile = block_position()
        # If later queries see more keys, they come first, so that the last tiles of the grid are
        # short.
        self.tile = refs.q.shape[1] // tiles.rows - 1 - tile if spec.causal else tile
        self.keys = Ring(refs.k_ready, refs.k_free, refs.k_s.shape[0])
        self.values = Ring(refs.v_ready, refs.v_free, refs.v_s.shape[0])
        self.short = registers_are_short(refs.q.shape[3], tiles.block, 1)
        # The slope of a soft cap needs as many registers as dp: if they are few, dp is computed
        # after the slope is used.
        self.dp_after_slope = self.short and spec.softcap is not None

    def walk(self) -> Walk:
        """The walk of this tile.

        Each warpgroup computes its own: shared code would need registers before they are
        distributed.
        """
        return tile_walk(
            self.tiles,
            kernel_band(self.spec, self.refs),
            self.spec.S,
            self.spec.T,
            self.refs,
            self.batch,
            self.head,
            self.tile,
        )

    def q_ids_s(self, wg: Any) -> Any:
        return self.refs.ids_s.at[pl.ds(wg * WARPGROUP, WARPGROUP)]

    def k_ids_s(self, slot: Any) -> Any:
        C = self.tiles.block
        return self.refs.ids_s.at[pl.ds(self.tiles.rows + slot * C, C)]

    def fetch(self) -> None:
        """Loads the keys and values, a few blocks ahead."""
        plgpu.set_max_registers(REGISTERS.load, action="decrease")
        refs = self.refs
        walk = self.walk()
        C = self.tiles.block
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
        """Loads this warpgroup's queries, visits the keys and stores the gradient."""
        plgpu.set_max_registers(REGISTERS.compute, action="increase")
        refs = self.refs
        batch = self.batch
        head = self.head
        walk = self.walk()
        row = self.tile * self.tiles.rows + wg * WARPGROUP
        rows = pl.ds(row, WARPGROUP)
        ready = refs.fixed_ready.at[wg]
        lse_s = refs.vectors_s.at[0, wg]
        delta_s = refs.vectors_s.at[1, wg]
        plgpu.copy_gmem_to_smem(refs.q.at[batch, rows, head], refs.q_s.at[wg], ready)
        plgpu.copy_gmem_to_smem(refs.dout.at[batch, rows, head], refs.dout_s.at[wg], ready)
        plgpu.copy_gmem_to_smem(refs.lse.at[batch, head, rows], lse_s, ready)
        plgpu.copy_gmem_to_smem(refs.delta.at[batch, head, rows], delta_s, ready)
        if self.spec.segments:
            plgpu.copy_gmem_to_smem(refs.q_ids.at[batch, rows], self.q_ids_s(wg), ready)
        plgpu.barrier_wait(ready)
        lse = vector(lse_s, 0)
        delta = vector(delta_s, 0)

        def sum_up(acc: Any) -> Array:
            def visit(start: Any, stop: Any, row: Any = None) -> None:
                def visit_block(step: Any, _: None) -> None:
                    self.step(acc, walk, step, wg, lse, delta, row)

                lax.fori_loop(start, stop, visit_block, None)

            if self.spec.masks(self.spec.T, self.tiles.block):
                visit(0, walk.n_full)
                visit(walk.n_full, walk.n, row)
            else:
                visit(0, walk.n)
            return acc[...]

        dq = pl.run_scoped(sum_up, accumulator(refs.q.shape[3]))
        if self.spec.unrounded:
            target = refs.dq.at[batch, head, self.tile * COMPUTING + wg, 0]
            add_from_registers(target, dq * self.spec.scale)
            return
        # The queries are no longer needed: their memory stages the gradient.
        refs.q_s.at[wg][...] = (dq * self.spec.scale).astype(refs.dq.dtype)
        # TMA must see the stores of all threads before it copies.
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.q_s.at[wg], refs.dq.at[batch, rows, head])
        # The block's shared memory must last until it is copied.
        plgpu.wait_smem_to_gmem(0)

    def step(
        self, acc: Any, walk: Walk, step: Any, wg: Any, lse: Array, delta: Array, row: Any
    ) -> None:
        """One block of keys. The last product stays in flight.

        row: the first query, where the block needs a mask; else None.
        """
        refs = self.refs
        spec = self.spec
        C = self.tiles.block
        slot = self.keys.take(step)
        wg = opaque(wg)

        def gradient(s_ref: Any, dp_ref: Any) -> Array:
            plgpu.wgmma(s_ref, refs.q_s.at[wg], transposed(refs.k_s.at[slot]))

            def issue_dp() -> None:
                v_slot = self.values.take(step)
                plgpu.wgmma(dp_ref, refs.dout_s.at[wg], transposed(refs.v_s.at[v_slot]))

            if not self.dp_after_slope:
                issue_dp()
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0 if self.dp_after_slope else 1)
            if not self.short:
                # After this, the product that the previous step left in flight is also done.
                pl.when(step > 0)(lambda: self.keys.give(step - 1))
            mask = None
            if row is not None:
                q_ids = k_ids = None
                if spec.segments:
                    q_ids = vector(self.q_ids_s(wg), 0)
                    k_ids = vector(self.k_ids_s(slot), 1)
                band = kernel_band(spec, refs)
                first_key = walk.block(step) * C
                mask = hidden(band, (WARPGROUP, C), row, first_key, q_ids, k_ids, spec.T)
            _, p_slope = probabilities(spec, s, lse, 0, mask)
            if self.dp_after_slope:
                issue_dp()
            ds = p_slope * (dp_ref[...] - spread(delta, s.shape))
            self.values.give(step)
            return ds.astype(refs.k.dtype)

        ds = pl.run_scoped(gradient, accumulator(C), accumulator(C))
        plgpu.wgmma(acc, ds, refs.k_s.at[slot])
        if self.short:
            plgpu.wgmma_wait(0)
            self.keys.give(step)
