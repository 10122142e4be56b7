"""The forward pass on Hopper: the algorithm of FlashAttention-3 (Shah et al., arXiv 2407.08608).

One warpgroup loads keys and values by TMA, two or three compute 64 queries each (or 128), on one of
two schedules.

Overlapped: a warpgroup issues S = QK of a block, then PV of the block before, and computes its
softmax while PV is still in flight (FlashAttention-3, section 3.2). The warpgroups take turns at
issuing alone, so that none waits for the softmax of another (its ping-pong scheduling, section
3.1). With two warpgroups, the step of block j is

    warpgroup 0   | QK_j  PV_j-1 |  softmax_j           | QK_j+1  PV_j |  softmax_j+1
    warpgroup 1   |  softmax_j-1 | QK_j  PV_j-1         |  softmax_j   | QK_j+1  PV_j
    tensor cores  | 0            | 1                    | 0            | 1

Alternating, for tiles whose registers do not suffice: while one warpgroup uses the tensor cores,
the other computes its softmax. A warpgroup's own products and softmax then do not overlap. On an
H200 it was faster for heads of 64 with blocks of 256 keys, and slower for heads of 128
(benchmarks/results/gpu_suite_2026-11-26_h200-jax-0.11.2.md).

tests/pallas_kernels/test_hopper_forward.py finds the overlap in the machine code for each entry of
the tuning table. Sizes as in `spec.py`.
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
MAX_EAGER_SUM_COLUMNS = 128
"""Columns of values up to which `Alternating` sums p before it waits for the tensor cores. It does
so after jax.experimental.pallas.ops.gpu.attention_mgpu, whose authors measured a difference that
they could not fully explain."""


def forward(
    spec: Spec, tiles: ForwardTiles, q: Array, k: Array, v: Array, sides: dict[str, Array | None]
) -> tuple[Array, Array]:
    """Returns out [B, S, N, V] and the log-sum-exp fp32 [B, N, S], padded to complete tiles.

    Args:
      q, k, v: [B, S, N, H], [B, T, K, H], [B, T, K, V], padded to complete tiles.
      sides: the inputs that the spec needs of `table`, or `counts` and `blocks` (see `walk.py`),
        `offset` int32 [1], `q_ids` int32 [B, S], `k_ids` int32 [B, T], `sinks` fp32 [N].
    """
    B, S, N, H = q.shape
    T, K = k.shape[1:3]
    V = v.shape[3]
    schedule = Overlapped if tiles.overlapped else Alternating
    stages, scratch = tile_scratch(spec, tiles, T, H, V, q.dtype)
    scratch |= schedule.barriers(tiles)
    out = {
        "out": jax.ShapeDtypeStruct((B, S, N, V), q.dtype),
        "lse": jax.ShapeDtypeStruct((B, N, S), jnp.float32),
    }

    def body(refs: Refs) -> None:
        schedule(spec, tiles, stages, N // K, refs).run()

    results = launch(
        body,
        {"q": q, "k": k, "v": v, **sides},
        out,
        scratch,
        name="flash_attention_forward",
        flops=spec.flops(B, N, H + V),
        occupancy=spec.occupancy(B, N, K, H + V),
        computing=tiles.warpgroups,
        automatic_barriers=tiles.automatic_barriers,
        grid=(B, N, S // tiles.rows),
        section=section_of_queries(T, N, K, H + V),
    )
    return results.out, results.lse


class Overlapped(Tile):
    """QK of a block is issued before PV of the block before it, which the softmax hides."""

    @staticmethod
    def barriers(tiles: ForwardTiles) -> dict[str, Any]:
        """`order`: a barrier for each warpgroup, which waits there until the one before has issued.

        None: named barriers.
        """
        if tiles.named_barriers:
            return {"order": None}
        return {"order": plgpu.Barrier(num_arrivals=1, num_barriers=tiles.warpgroups)}

    def visit(
        self, walk: Walk, wg: Any, row: Any, m: Array, l: Array
    ) -> tuple[Array, Array, Array]:
        """Visits the blocks of `walk`; see `Tile.visit`."""
        V = self.refs.v.shape[3]
        # Warpgroup 0 issues first: the last warpgroup passes it the turn.
        pl.when(wg == self.tiles.warpgroups - 1)(lambda: self.pass_turn(wg))

        def visit_blocks(m: Array, l: Array) -> tuple[Array, Array, Array]:
            return pl.run_scoped(
                lambda acc: self.sums(acc, walk, wg, row, m, l), accumulator(V, self.tiles.height)
            )

        def visit_nothing(m: Array, l: Array) -> tuple[Array, Array, Array]:
            return zeros(self.tiles.height, V), m, l

        return lax.cond(walk.n > 0, visit_blocks, visit_nothing, m, l)

    def sums(
        self, acc: Any, walk: Walk, wg: Any, row: Any, m: Array, l: Array
    ) -> tuple[Array, Array, Array]:
        """`visit` for at least one block, with the accumulator for PV."""
        refs = self.refs

        # The first block has no PV before it.
        plgpu.barrier_wait(refs.k_ready.at[0])
        s = self.products(acc, None, jnp.int32(0), wg)
        self.await_keys(walk, 1)
        m, l, _, p = self.softmax(walk, jnp.int32(0), s, m, l, row, wg)

        def visit_block(step: Any, state: tuple) -> tuple:
            m, l, p16 = state
            s = self.products(acc, p16, step, wg)
            # Without the barrier the compiler sinks the softmax below the wait for PV, and nothing
            # overlaps. p crosses it in fp32: as 16-bit operands of the next wgmma, ptxas would
            # serialise the wgmmas (C7513).
            m, l, rescale, p = lax.optimization_barrier(self.softmax(walk, step, s, m, l, row, wg))
            # A wait for a barrier ends a basic block, so ptxas, which moves arithmetic too, leaves
            # the softmax above it.
            self.await_keys(walk, step + 1)
            pv = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            plgpu.barrier_arrive(refs.v_free.at[self.slot(step - 1)])
            acc[...] = pv * spread(rescale, pv.shape)
            return m, l, p.astype(refs.v.dtype)

        m, l, p16 = lax.fori_loop(1, walk.n, visit_block, (m, l, p.astype(refs.v.dtype)))

        # PV of the last block.
        slot = self.slot(walk.n - 1)
        plgpu.barrier_wait(refs.v_ready.at[slot])
        plgpu.wgmma(acc, p16, refs.v_s.at[slot])
        pv = plgpu.wgmma_accumulator_load(acc, wait_n=0)
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return pv, m, l

    def products(self, acc: Any, p16: Array | None, step: Any, wg: Any) -> Array:
        """Returns QK of a step. Also issues PV of the step before, and leaves it in flight.

        p16: the probabilities of that step; None: there is none.
        """
        refs = self.refs
        wg = opaque(wg)
        slot = self.slot(step)

        def issue(s_ref: Any) -> Array:
            self.take_turn(wg)
            plgpu.wgmma(s_ref, refs.q_s.at[wg], transposed(refs.k_s.at[slot]))
            if p16 is not None:
                previous_slot = self.slot(step - 1)
                plgpu.barrier_wait(refs.v_ready.at[previous_slot])
                plgpu.wgmma(acc, p16, refs.v_s.at[previous_slot])
            self.pass_turn(wg)
            return plgpu.wgmma_accumulator_load(s_ref, wait_n=0 if p16 is None else 1)

        s = pl.run_scoped(issue, accumulator(self.tiles.block, self.tiles.height))
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
        next_wg = lax.rem(wg + 1, jnp.int32(self.tiles.warpgroups))
        if self.tiles.named_barriers:
            named_barrier.arrive(ORDER + next_wg)
        else:
            plgpu.barrier_arrive(self.refs.order.at[next_wg])

    def await_keys(self, walk: Walk, step: Any) -> None:
        """Waits for the keys of a step, if there is one."""
        pl.when(step < walk.n)(lambda: plgpu.barrier_wait(self.refs.k_ready.at[self.slot(step)]))

    def softmax(
        self, walk: Walk, step: Any, s: Array, m: Array, l: Array, row: Any, wg: Any
    ) -> tuple[Array, Array, Array, Array]:
        """(new maximum, new sum, factor for earlier sums, p in fp32)."""
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
        new_m = jnp.maximum(m, s.max(axis=1) * spec.to_log2)
        rescale = jnp.exp2(m - new_m)
        p = jnp.exp2(s * spec.to_log2 - spread(new_m, s.shape))
        return new_m, l * rescale + p.sum(axis=1), rescale, p


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
        refs = self.refs
        state = (zeros(self.tiles.height, refs.v.shape[3]), m, l)

        def visit_plain(step: Any, state: tuple) -> tuple:
            return self.step(walk, step, state, wg)

        def visit_masked(step: Any, state: tuple) -> tuple:
            return self.step(walk, step, state, wg, row)

        # Warpgroup 1 begins a turn later than warpgroup 0, which waits for it at the end.
        pl.when(walk.n > 0)(lambda: plgpu.barrier_wait(refs.k_ready.at[0]))
        pl.when(wg == 1)(self.turn)
        if self.spec.masks(self.spec.T, self.tiles.block):
            state = lax.fori_loop(0, walk.n_full, visit_plain, state)
            state = lax.fori_loop(walk.n_full, walk.n, visit_masked, state)
        else:
            state = lax.fori_loop(0, walk.n, visit_plain, state)
        pl.when(wg == 0)(self.turn)
        return state

    def turn(self) -> None:
        """Waits until the other warpgroup reaches its own `turn`."""
        plgpu.barrier_arrive(self.refs.turn)
        plgpu.barrier_wait(self.refs.turn)

    def step(self, walk: Walk, step: Any, state: tuple, wg: Any, row: Any = None) -> tuple:
        """One block of keys; `row`: the first query, where the block needs a mask."""
        refs = self.refs
        spec = self.spec
        acc, m, l = state
        wg = opaque(wg)
        slot = self.slot(step)

        def scores(s_ref: Any) -> Array:
            plgpu.wgmma(s_ref, refs.q_s.at[wg], transposed(refs.k_s.at[slot]))
            self.turn()
            return s_ref[...]

        s = pl.run_scoped(scores, accumulator(self.tiles.block, self.tiles.height))
        ids = None if row is None else self.ids(step, wg)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        if spec.softcap is not None:
            s = jnp.tanh(s * spec.capped)
        if row is not None:
            s = self.masked(s, walk, step, row, ids)

        new_m = jnp.maximum(m, s.max(axis=1) * spec.to_log2)
        rescale = jnp.exp2(m - new_m)
        p = jnp.exp2(s * spec.to_log2 - spread(new_m, s.shape))
        acc = acc * spread(rescale, acc.shape)
        l = l * rescale
        p16 = p.astype(refs.v.dtype)

        def take_tensor_cores() -> None:
            plgpu.barrier_arrive(refs.turn)  # the softmax is done
            plgpu.barrier_wait(refs.v_ready.at[slot])
            plgpu.barrier_wait(refs.turn)  # and the tensor cores are free

        if acc.shape[1] <= MAX_EAGER_SUM_COLUMNS:
            l += p.sum(axis=1)
            acc, l, new_m, p16 = lax.optimization_barrier((acc, l, new_m, p16))
            take_tensor_cores()
        else:
            take_tensor_cores()
            l += p.sum(axis=1)

        def values(acc_ref: Any) -> None:
            plgpu.wgmma(acc_ref, p16, refs.v_s.at[slot])
            next_step = step + 1
            pl.when(next_step < walk.n)(
                lambda: plgpu.barrier_wait(refs.k_ready.at[self.slot(next_step)])
            )

        acc = pl.run_state(values)(plgpu.ACC.init(acc))  # pyright: ignore[reportPrivateImportUsage]
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return acc, new_m, l


def zeros(rows: int, columns: int) -> Array:
    """A matrix of zeros in registers, fp32, in the layout of a wgmma's accumulator."""
    return plgpu.layout_cast(jnp.full((rows, columns), 0, jnp.float32), plgpu.Layout.WGMMA)
