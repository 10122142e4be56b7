"""The forward pass on Hopper: the algorithm of FlashAttention-3 (Shah et al., arXiv 2407.08608) in
Pallas Mosaic GPU.

One warpgroup loads keys and values by TMA, two or three compute 64 queries each (or 128), on one of
two schedules:

Overlapped: a warpgroup issues S = QK of a block, then PV of the block before, and computes its
softmax while PV is still in flight. The warpgroups take turns at issuing alone, so that none waits
for the softmax of another. Alternating, for tiles whose registers do not suffice: while one
warpgroup uses the tensor cores, the other computes its softmax.

Sizes as in `spec.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper import named_barrier
from pallas_kernels.attention.hopper.forward_tile import Tile, tile_scratch
from pallas_kernels.attention.hopper.spec import (
    ForwardTiles,
    Refs,
    Spec,
    accumulator,
    launch,
    opaque,
    spread,
    transposed,
)
from pallas_kernels.attention.hopper.walk import Walk
from pallas_kernels.attention.occupancy import section_of_queries

ORDER = 8
"""The first of the named barriers at which warpgroups take turns. Pallas uses 0, and one for each
warpgroup from 1 on."""


def forward(
    spec: Spec, tiles: ForwardTiles, q: Array, k: Array, v: Array, sides: dict[str, Array | None]
) -> tuple[Array, Array]:
    """out [B, S, N, V] and the log-sum-exp fp32 [B, N, S] of q [B, S, N, H], k [B, T, K, H], v [B,
    T, K, V], padded to complete tiles.

    sides: those that the spec needs of `table`, or `counts` and `blocks` (see `walk.py`), `offset`
    int32 [1], `q_ids` int32 [B, S], `k_ids` int32 [B, T], `sinks` fp32 [N].
    """
    (B, S, N, H), T, V = q.shape, k.shape[1], v.shape[3]
    schedule = Overlapped if tiles.overlapped else Alternating
    stages, scratch = tile_scratch(spec, tiles, T, H, V, q.dtype)
    scratch |= schedule.barriers(tiles)
    out = {
        "out": jax.ShapeDtypeStruct((B, S, N, V), q.dtype),
        "lse": jax.ShapeDtypeStruct((B, N, S), jnp.float32),
    }

    def body(refs: Refs) -> None:
        schedule(spec, tiles, stages, N // k.shape[2], refs).run()

    results = launch(
        body, {"q": q, "k": k, "v": v, **sides}, out, scratch,
        name="flash_attention_forward", flops=spec.flops(B, N, H + V),
        occupancy=spec.occupancy(B, N, k.shape[2], H + V),
        computing=tiles.warpgroups, automatic_barriers=tiles.automatic_barriers,
        grid=(B, N, S // tiles.rows), section=section_of_queries(T, N, k.shape[2], H + V),
    )  # fmt: skip
    return results.out, results.lse


class Overlapped(Tile):
    """QK of a block is issued before PV of the block before it, which is in flight during the
    softmax.
    """

    @staticmethod
    def barriers(tiles: ForwardTiles) -> dict[str, Any]:
        """`order`: one barrier for each warpgroup, at which it waits until the one before it has
        issued. None: named barriers.
        """
        return {
            "order": None
            if tiles.named_barriers
            else plgpu.Barrier(num_arrivals=1, num_barriers=tiles.warpgroups)
        }

    def visit(
        self, walk: Walk, wg: Any, row: Any, m: Array, l: Array
    ) -> tuple[Array, Array, Array]:
        """Visits the blocks of `walk`; see `Tile.visit`."""
        V = self.refs.v.shape[3]
        # warpgroup 0 issues first
        pl.when(wg == self.tiles.warpgroups - 1)(lambda: self.pass_turn(wg))

        def some(m: Array, l: Array) -> tuple[Array, Array, Array]:
            return pl.run_scoped(
                lambda acc: self.sums(acc, walk, wg, row, m, l), accumulator(V, self.tiles.height)
            )

        def none(m: Array, l: Array) -> tuple[Array, Array, Array]:
            return (
                plgpu.layout_cast(
                    jnp.full((self.tiles.height, V), 0, jnp.float32), plgpu.Layout.WGMMA
                ),
                m,
                l,
            )

        return lax.cond(walk.n > 0, some, none, m, l)

    def sums(
        self, acc: Any, walk: Walk, wg: Any, row: Any, m: Array, l: Array
    ) -> tuple[Array, Array, Array]:
        """`visit` for at least one block, with the accumulator for PV."""
        refs = self.refs
        plgpu.barrier_wait(refs.k_here.at[0])
        s = self.products(acc, None, jnp.int32(0), wg)
        self.await_keys(walk, 1)
        m, l, _, p = self.softmax(walk, jnp.int32(0), s, m, l, row, wg)

        def one(step: Any, state: tuple) -> tuple:
            m, l, p16 = state
            s = self.products(acc, p16, step, wg)
            # Without the barrier the compiler sinks the softmax below the wait for PV, and nothing
            # overlaps. p crosses it in fp32: as 16-bit operands of the next wgmma, ptxas would
            # serialise the wgmmas (C7513).
            m, l, keep, p = lax.optimization_barrier(self.softmax(walk, step, s, m, l, row, wg))
            # A wait for a barrier ends a basic block, so ptxas, which moves arithmetic too, leaves
            # the softmax above it.
            self.await_keys(walk, step + 1)
            old = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            plgpu.barrier_arrive(refs.v_free.at[self.slot(step - 1)])
            acc[...] = old * spread(keep, old.shape)
            return m, l, p.astype(refs.v.dtype)

        m, l, p16 = lax.fori_loop(1, walk.n, one, (m, l, p.astype(refs.v.dtype)))
        slot = self.slot(walk.n - 1)
        plgpu.barrier_wait(refs.v_here.at[slot])
        plgpu.wgmma(acc, p16, refs.v_s.at[slot])
        total = plgpu.wgmma_accumulator_load(acc, wait_n=0)
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return total, m, l

    def products(self, acc: Any, p16: Array | None, step: Any, wg: Any) -> Array:
        """QK of a step. Also issues PV of the step before, unless p16 is None, and leaves it in
        flight.
        """
        refs, wg, slot = self.refs, opaque(wg), self.slot(step)

        def both(s_ref: Any) -> Array:
            self.take_turn(wg)
            plgpu.wgmma(s_ref, refs.q_s.at[wg], transposed(refs.k_s.at[slot]))
            if p16 is not None:
                before = self.slot(step - 1)
                plgpu.barrier_wait(refs.v_here.at[before])
                plgpu.wgmma(acc, p16, refs.v_s.at[before])
            self.pass_turn(wg)
            return plgpu.wgmma_accumulator_load(s_ref, wait_n=0 if p16 is None else 1)

        s = pl.run_scoped(both, accumulator(self.tiles.block, self.tiles.height))
        if not self.spec.segments:  # else the mask reads ids of the same slot
            plgpu.barrier_arrive(refs.k_free.at[slot])
        return s

    def take_turn(self, wg: Any) -> None:
        """Waits until this warpgroup may issue."""
        if self.tiles.named_barriers:
            named_barrier.wait(ORDER + wg)
        else:
            plgpu.barrier_wait(self.refs.order.at[wg])

    def pass_turn(self, wg: Any) -> None:
        """Lets the next warpgroup issue."""
        after = lax.rem(wg + 1, jnp.int32(self.tiles.warpgroups))
        if self.tiles.named_barriers:
            named_barrier.arrive(ORDER + after)
        else:
            plgpu.barrier_arrive(self.refs.order.at[after])

    def await_keys(self, walk: Walk, step: Any) -> None:
        """Waits for the keys of a step, if there is one."""
        pl.when(step < walk.n)(lambda: plgpu.barrier_wait(self.refs.k_here.at[self.slot(step)]))

    def softmax(
        self, walk: Walk, step: Any, s: Array, m: Array, l: Array, row: Any, wg: Any
    ) -> tuple[Array, Array, Array, Array]:
        """(new maximum, new sum, factor for what was summed before, p in fp32)."""
        spec = self.spec
        if spec.softcap is not None:
            s = jnp.tanh(s * spec.capped)
        if spec.masks(spec.T, self.tiles.block):
            s = lax.cond(
                step >= walk.n_full,
                lambda s: self.masked(s, walk, step, row, self.ids(step, wg)),
                lambda s: s,
                s,
            )
        if spec.segments:
            plgpu.barrier_arrive(self.refs.k_free.at[self.slot(step)])
        m_new = jnp.maximum(m, s.max(axis=1) * spec.to_log2)
        keep = jnp.exp2(m - m_new)
        p = jnp.exp2(s * spec.to_log2 - spread(m_new, s.shape))
        return m_new, l * keep + p.sum(axis=1), keep, p


class Alternating(Tile):
    """While one warpgroup uses the tensor cores, the other computes its softmax."""

    @staticmethod
    def barriers(tiles: ForwardTiles) -> dict[str, Any]:
        """`turn`: where the warpgroups exchange roles."""
        return {"turn": plgpu.Barrier(num_arrivals=tiles.warpgroups, num_barriers=1)}

    def visit(
        self, walk: Walk, wg: Any, row: Any, m: Array, l: Array
    ) -> tuple[Array, Array, Array]:
        """Visits the blocks of `walk`; see `Tile.visit`."""
        refs, V = self.refs, self.refs.v.shape[3]
        state = (
            plgpu.layout_cast(jnp.full((self.tiles.height, V), 0, jnp.float32), plgpu.Layout.WGMMA),
            m,
            l,
        )

        def turn_at(number: int) -> None:
            pl.when(wg == number)(self.turn)

        pl.when(walk.n > 0)(lambda: plgpu.barrier_wait(refs.k_here.at[0]))
        turn_at(1)
        if self.spec.masks(self.spec.T, self.tiles.block):
            state = lax.fori_loop(
                0, walk.n_full, lambda step, state: self.step(walk, step, state, wg), state
            )
            state = lax.fori_loop(
                walk.n_full,
                walk.n,
                lambda step, state: self.step(walk, step, state, wg, row),
                state,
            )
        else:
            state = lax.fori_loop(
                0, walk.n, lambda step, state: self.step(walk, step, state, wg), state
            )
        turn_at(0)
        return state

    def turn(self) -> None:
        """Waits until the other warpgroup reaches its own `turn`."""
        plgpu.barrier_arrive(self.refs.turn)
        plgpu.barrier_wait(self.refs.turn)

    def step(self, walk: Walk, step: Any, state: tuple, wg: Any, row: Any = None) -> tuple:
        """One block of keys; `row`: the first query, where the block needs a mask."""
        refs, spec = self.refs, self.spec
        acc, m, l = state
        wg, slot = opaque(wg), self.slot(step)

        def scores(s_ref: Any) -> Array:
            plgpu.wgmma(s_ref, refs.q_s.at[wg], transposed(refs.k_s.at[slot]))
            self.turn()
            return s_ref[...]

        s = pl.run_scoped(scores, accumulator(self.tiles.block, self.tiles.height))
        ids = None if row is None else self.ids(step, wg)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        if spec.softcap is not None:
            s = jnp.tanh(s * spec.capped)
        s = s if row is None else self.masked(s, walk, step, row, ids)

        m_new = jnp.maximum(m, s.max(axis=1) * spec.to_log2)
        keep = jnp.exp2(m - m_new)
        p = jnp.exp2(s * spec.to_log2 - spread(m_new, s.shape))
        acc, l = acc * spread(keep, acc.shape), l * keep
        p16 = p.astype(refs.v.dtype)

        def value_here() -> None:
            plgpu.barrier_arrive(refs.turn)  # the softmax is done
            plgpu.barrier_wait(refs.v_here.at[slot])
            plgpu.barrier_wait(refs.turn)  # and the tensor cores are free

        if acc.shape[1] <= 128:
            l += p.sum(axis=1)
            acc, l, m_new, p16 = lax.optimization_barrier((acc, l, m_new, p16))
            value_here()
        else:
            value_here()
            l += p.sum(axis=1)

        def values(acc_ref: Any) -> None:
            plgpu.wgmma(acc_ref, p16, refs.v_s.at[slot])
            after = step + 1
            pl.when(after < walk.n)(lambda: plgpu.barrier_wait(refs.k_here.at[self.slot(after)]))

        acc = pl.run_state(values)(plgpu.ACC.init(acc))  # pyright: ignore[reportPrivateImportUsage]
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return acc, m_new, l
