"""The forward pass on Hopper: the algorithm of FlashAttention-3 (Shah et al., arXiv 2407.08608) in Pallas Mosaic GPU.

One warpgroup loads keys and values by TMA, two compute 64 queries each. These alternate ("ping-pong"): while one uses the tensor cores, the
other computes its softmax. Sizes as in `spec.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.spec import (
    COMPUTING,
    FLOOR,
    LOG2E,
    REGISTERS,
    SHARED_MEMORY,
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


def forward(spec: Spec, tiles: Tiles, q: Array, k: Array, v: Array, sides: dict[str, Array | None]) -> tuple[Array, Array]:
    """out [B, S, N, V] and the log-sum-exp fp32 [B, N, S] of q [B, S, N, H], k [B, T, K, H], v [B, T, K, V], padded to complete tiles.

    sides: those that the spec needs of `table`, or `counts` and `blocks` (see `walk.py`), `offset` int32 [1], `q_ids` int32 [B, S], `k_ids`
    int32 [B, T], `sinks` fp32 [N].
    """
    (B, S, N, H), T, V = q.shape, k.shape[1], v.shape[3]
    W, C = COMPUTING, tiles.block
    kept = 2 * tiles.rows * (H if V == H else H + V)
    ids = 3072 if spec.segments else 0  # one kilobyte for queries, at most two for keys
    fitting = (SHARED_MEMORY - kept - ids) // (2 * C * (H + V))
    stages = min(tiles.stages, T // C, max(2, fitting))
    copies = 1 + spec.segments  # ids are loaded with their keys or queries
    free = plgpu.Barrier(num_arrivals=W, num_barriers=stages)
    scratch = {
        "q_s": matrix(WARPGROUP, H, q.dtype, (W,)),
        "k_s": matrix(C, H, k.dtype, (stages,)),
        "v_s": matrix(C, V, v.dtype, (stages,)),
        "out_s": None if V == H else matrix(WARPGROUP, V, q.dtype, (W,)),
        "lse_s": plgpu.SMEM((W, WARPGROUP), jnp.float32),
        "q_ids_s": plgpu.SMEM((W, WARPGROUP), jnp.int32) if spec.segments else None,
        "k_ids_s": plgpu.SMEM((stages, C), jnp.int32) if spec.segments else None,
        "q_here": plgpu.Barrier(num_arrivals=copies, num_barriers=W),
        "k_here": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "v_here": plgpu.Barrier(num_barriers=stages),
        "k_free": free,
        "v_free": free,
        "turn": plgpu.Barrier(num_arrivals=W),
    }
    out = {"out": jax.ShapeDtypeStruct((B, S, N, V), q.dtype), "lse": jax.ShapeDtypeStruct((B, N, S), jnp.float32)}

    def body(refs: Refs) -> None:
        _Kernel(spec, tiles, stages, N // k.shape[2], refs).run()

    results = launch(
        body, {"q": q, "k": k, "v": v, **sides}, out, scratch,
        name="flash_attention_forward", flops=spec.flops(B, N, H + V), occupancy=spec.occupancy(B, N, k.shape[2], H + V),
        grid=(B, N, S // tiles.rows), section=section_of_queries(T, N, k.shape[2], H + V),
    )  # fmt: skip
    return results.out, results.lse


class _Kernel:
    """One tile of queries of one head against the keys that it sees."""

    def __init__(self, spec: Spec, tiles: Tiles, stages: int, group: int, refs: Refs) -> None:
        self.spec, self.tiles, self.stages, self.group, self.refs = spec, tiles, stages, group, refs
        self.batch, self.head, tile = block_position()
        # If later queries see more keys, they come first, so that the last tiles of the grid are short.
        self.tile = refs.q.shape[1] // tiles.rows - 1 - tile if spec.causal else tile
        self.band = band_of(spec, refs)

    def run(self) -> None:
        wg = warpgroup()
        pl.when(wg == COMPUTING)(self.fetch)
        pl.when(wg < COMPUTING)(lambda: self.compute(wg))

    def walk(self) -> Walk:
        """The walk of this tile. Each warpgroup computes its own: shared code would need registers before they are distributed."""
        return walk_of(self.tiles, self.band, self.spec.S, self.spec.T, self.refs, self.batch, self.head, self.tile)

    def fetch(self) -> None:
        """Loads the keys and values, a few blocks ahead."""
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        refs, walk, C = self.refs, self.walk(), self.tiles.block
        kv_head = lax.div(self.head, jnp.int32(self.group))

        @pl.loop(0, walk.n)
        def _(step: Any) -> None:
            slot, again = lax.rem(step, jnp.int32(self.stages)), step >= self.stages
            keys = pl.ds(walk.block(step) * C, C)
            pl.when(again)(lambda: plgpu.barrier_wait(refs.k_free.at[slot]))
            plgpu.copy_gmem_to_smem(refs.k.at[self.batch, keys, kv_head], refs.k_s.at[slot], refs.k_here.at[slot])
            if self.spec.segments:
                plgpu.copy_gmem_to_smem(refs.k_ids.at[self.batch, keys], refs.k_ids_s.at[slot], refs.k_here.at[slot])
            pl.when(again)(lambda: plgpu.barrier_wait(refs.v_free.at[slot]))
            plgpu.copy_gmem_to_smem(refs.v.at[self.batch, keys, kv_head], refs.v_s.at[slot], refs.v_here.at[slot])

    def compute(self, wg: Any) -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        refs, walk, V = self.refs, self.walk(), self.refs.v.shape[3]
        row = self.tile * self.tiles.rows + wg * WARPGROUP
        rows = pl.ds(row, WARPGROUP)
        plgpu.copy_gmem_to_smem(refs.q.at[self.batch, rows, self.head], refs.q_s.at[wg], refs.q_here.at[wg])
        if self.spec.segments:
            plgpu.copy_gmem_to_smem(refs.q_ids.at[self.batch, rows], refs.q_ids_s.at[wg], refs.q_here.at[wg])
        plgpu.barrier_wait(refs.q_here.at[wg])

        # A sink is a key without a value: the state that its rows start from.
        top, total = jnp.float32(FLOOR), jnp.float32(0)
        if self.spec.sinks:
            sink = refs.sinks[self.head] * LOG2E
            top = jnp.maximum(sink, FLOOR)
            total = jnp.exp2(sink - top)
        by_row = plgpu.Layout.WGMMA.reduce(1)
        state = (
            plgpu.layout_cast(jnp.full((WARPGROUP, V), 0, jnp.float32), plgpu.Layout.WGMMA),
            plgpu.layout_cast(lax.broadcast_in_dim(top, (WARPGROUP,), []), by_row),
            plgpu.layout_cast(lax.broadcast_in_dim(total, (WARPGROUP,), []), by_row),
        )

        def turn_at(number: int) -> None:
            pl.when(wg == number)(self.turn)

        pl.when(walk.n > 0)(lambda: plgpu.barrier_wait(refs.k_here.at[0]))
        turn_at(1)
        if self.spec.masks(self.spec.T, self.tiles.block):
            state = lax.fori_loop(0, walk.n_full, lambda step, state: self.step(walk, step, state, wg), state)
            state = lax.fori_loop(walk.n_full, walk.n, lambda step, state: self.step(walk, step, state, wg, row), state)
        else:
            state = lax.fori_loop(0, walk.n, lambda step, state: self.step(walk, step, state, wg), state)
        turn_at(0)
        self.store(wg, rows, *state)

    def turn(self) -> None:
        """Waits until the other warpgroup reaches its own `turn`."""
        plgpu.barrier_arrive(self.refs.turn)
        plgpu.barrier_wait(self.refs.turn)

    def step(self, walk: Walk, step: Any, state: tuple, wg: Any, row: Any = None) -> tuple:
        """One block of keys; `row`: the first query, where the block needs a mask."""
        refs, spec, C = self.refs, self.spec, self.tiles.block
        acc, m, l = state
        wg = opaque(wg)
        slot = lax.rem(step, jnp.int32(self.stages))

        def scores(s_ref: Any) -> Array:
            plgpu.wgmma(s_ref, refs.q_s.at[wg], transposed(refs.k_s.at[slot]))
            self.turn()
            return s_ref[...]

        s = pl.run_scoped(scores, accumulator(C))
        q_ids = k_ids = None
        if spec.segments and row is not None:
            q_ids, k_ids = vector(refs.q_ids_s.at[wg], 0), vector(refs.k_ids_s.at[slot], 1)
        plgpu.barrier_arrive(refs.k_free.at[slot])
        if spec.softcap is not None:
            s = jnp.tanh(s * spec.capped)
        mask = None if row is None else hidden(self.band, (WARPGROUP, C), row, walk.block(step) * C, q_ids, k_ids, spec.T)
        s = s if mask is None else jnp.where(mask, -jnp.inf, s)

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
            pl.when(after < walk.n)(lambda: plgpu.barrier_wait(refs.k_here.at[lax.rem(after, jnp.int32(self.stages))]))

        acc = pl.run_state(values)(plgpu.ACC.init(acc))  # pyright: ignore[reportPrivateImportUsage]
        plgpu.barrier_arrive(refs.v_free.at[slot])
        return acc, m_new, l

    def store(self, wg: Any, rows: Any, acc: Array, m: Array, l: Array) -> None:
        """Normalises and stores the output and the log-sum-exp: 0 and -inf in rows that see no key."""
        refs = self.refs
        empty = l == 0
        l = jnp.where(empty, 1.0, l)
        out_s = (refs.q_s if refs.out_s is None else refs.out_s).at[wg]
        out_s[...] = (acc * spread(1 / l, acc.shape)).astype(refs.out.dtype)
        refs.lse_s.at[wg][...] = jnp.where(empty, -jnp.inf, (m + jnp.log(l) * LOG2E) / LOG2E)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, refs.out.at[self.batch, rows, self.head])
        plgpu.copy_smem_to_gmem(refs.lse_s.at[wg], refs.lse.at[self.batch, self.head, rows])
        plgpu.wait_smem_to_gmem(0)
