"""The part of the forward pass that its schedules share: one tile of queries, the loads of keys and
values, masks, and the stores.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.spec import (
    FLOOR,
    LOG2E,
    SHARED_MEMORY,
    ForwardTiles,
    Refs,
    Spec,
    band_of,
    block_position,
    hidden,
    matrix,
    spread,
    vector,
    walk_of,
    warpgroup,
)
from pallas_kernels.attention.hopper.walk import Walk


def tile_scratch(
    spec: Spec, tiles: ForwardTiles, T: int, H: int, V: int, dtype: Any
) -> tuple[int, dict[str, Any]]:
    """(blocks of keys and values in shared memory, memory and barriers of a tile) for T keys and
    heads of H and V.
    """
    W, C, R = tiles.warpgroups, tiles.block, tiles.height
    kept = 2 * tiles.rows * (H if V == H else H + V)
    ids = 3072 if spec.segments else 0  # one kilobyte for queries, at most two for keys
    fitting = (SHARED_MEMORY - kept - ids) // (2 * C * (H + V))
    stages = min(tiles.stages, T // C, max(2, fitting))
    copies = 1 + spec.segments  # ids are loaded with their keys or queries
    free = plgpu.Barrier(num_arrivals=W, num_barriers=stages)
    return stages, {
        "q_s": matrix(R, H, dtype, (W,)),
        "k_s": matrix(C, H, dtype, (stages,)),
        "v_s": matrix(C, V, dtype, (stages,)),
        "out_s": None if V == H else matrix(R, V, dtype, (W,)),
        "lse_s": plgpu.SMEM((W, R), jnp.float32),
        "q_ids_s": plgpu.SMEM((W, R), jnp.int32) if spec.segments else None,
        "k_ids_s": plgpu.SMEM((stages, C), jnp.int32) if spec.segments else None,
        "q_here": plgpu.Barrier(num_arrivals=copies, num_barriers=W),
        "k_here": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        "v_here": plgpu.Barrier(num_barriers=stages),
        "k_free": free,
        "v_free": free,
    }


class Tile:
    """One tile of queries of one head against the keys that it sees. A schedule implements
    `visit`.
    """

    def __init__(
        self, spec: Spec, tiles: ForwardTiles, stages: int, group: int, refs: Refs
    ) -> None:
        self.spec, self.tiles, self.stages, self.group, self.refs = spec, tiles, stages, group, refs
        self.batch, self.head, tile = block_position()
        # If later queries see more keys, they come first, so that the last tiles of the grid are
        # short.
        self.tile = refs.q.shape[1] // tiles.rows - 1 - tile if spec.causal else tile
        self.band = band_of(spec, refs)

    def visit(
        self, walk: Walk, wg: Any, row: Any, m: Array, l: Array
    ) -> tuple[Array, Array, Array]:
        """(sum of p v [rows, V], maximum of the logits, sum of p [rows]) after the blocks of
        `walk`, which may have none.

        row: the first query of this warpgroup; m and l: maximum, to the base 2, and sum before the
        first block.
        """
        raise NotImplementedError

    def run(self) -> None:
        """The program of each warpgroup."""
        wg = warpgroup()
        pl.when(wg == self.tiles.warpgroups)(self.fetch)
        pl.when(wg < self.tiles.warpgroups)(lambda: self.compute(wg))

    def walk(self) -> Walk:
        """The walk of this tile. Each warpgroup computes its own: shared code would need registers
        before they are distributed.
        """
        return walk_of(
            self.tiles,
            self.band,
            self.spec.S,
            self.spec.T,
            self.refs,
            self.batch,
            self.head,
            self.tile,
        )

    def slot(self, step: Any) -> Any:
        """The place in shared memory of the block of a step."""
        return lax.rem(step, jnp.int32(self.stages))

    def fetch(self) -> None:
        """Loads the keys and values, a few blocks ahead."""
        plgpu.set_max_registers(self.tiles.registers[1], action="decrease")
        refs, walk, C = self.refs, self.walk(), self.tiles.block
        kv_head = lax.div(self.head, jnp.int32(self.group))

        @pl.loop(0, walk.n)
        def _(step: Any) -> None:
            slot, again = self.slot(step), step >= self.stages
            keys = pl.ds(walk.block(step) * C, C)
            pl.when(again)(lambda: plgpu.barrier_wait(refs.k_free.at[slot]))
            plgpu.copy_gmem_to_smem(
                refs.k.at[self.batch, keys, kv_head], refs.k_s.at[slot], refs.k_here.at[slot]
            )
            if self.spec.segments:
                plgpu.copy_gmem_to_smem(
                    refs.k_ids.at[self.batch, keys], refs.k_ids_s.at[slot], refs.k_here.at[slot]
                )
            pl.when(again)(lambda: plgpu.barrier_wait(refs.v_free.at[slot]))
            plgpu.copy_gmem_to_smem(
                refs.v.at[self.batch, keys, kv_head], refs.v_s.at[slot], refs.v_here.at[slot]
            )

    def compute(self, wg: Any) -> None:
        """Loads the queries, visits the keys and stores the results."""
        plgpu.set_max_registers(self.tiles.registers[0], action="increase")
        refs, walk, height = self.refs, self.walk(), self.tiles.height
        row = self.tile * self.tiles.rows + wg * height
        rows = pl.ds(row, height)
        plgpu.copy_gmem_to_smem(
            refs.q.at[self.batch, rows, self.head], refs.q_s.at[wg], refs.q_here.at[wg]
        )
        if self.spec.segments:
            plgpu.copy_gmem_to_smem(
                refs.q_ids.at[self.batch, rows], refs.q_ids_s.at[wg], refs.q_here.at[wg]
            )
        plgpu.barrier_wait(refs.q_here.at[wg])

        # A sink is a key without a value: the state that its rows start from.
        top, total = jnp.float32(FLOOR), jnp.float32(0)
        if self.spec.sinks:
            sink = refs.sinks[self.head] * LOG2E
            top = jnp.maximum(sink, FLOOR)
            total = jnp.exp2(sink - top)
        by_row = plgpu.Layout.WGMMA.reduce(1)
        m, l = (
            plgpu.layout_cast(lax.broadcast_in_dim(x, (height,), []), by_row) for x in (top, total)
        )
        self.store(wg, rows, *self.visit(walk, wg, row, m, l))

    def ids(self, step: Any, wg: Any) -> tuple[Array, Array] | None:
        """The segments of the queries, and of the keys of a step; None if the spec has none."""
        if not self.spec.segments:
            return None
        return vector(self.refs.q_ids_s.at[wg], 0), vector(self.refs.k_ids_s.at[self.slot(step)], 1)

    def masked(
        self, s: Array, walk: Walk, step: Any, row: Any, ids: tuple[Array, Array] | None
    ) -> Array:
        """The logits of a step with -inf where a query does not see a key."""
        mask = hidden(
            self.band,
            (s.shape[0], s.shape[1]),
            row,
            walk.block(step) * self.tiles.block,
            *(ids or (None, None)),
            self.spec.T,
        )
        return s if mask is None else jnp.where(mask, -jnp.inf, s)

    def store(self, wg: Any, rows: Any, acc: Array, m: Array, l: Array) -> None:
        """Normalises and stores the output and the log-sum-exp: 0 and -inf in rows that see no
        key.
        """
        refs = self.refs
        empty = l == 0
        l = jnp.where(empty, 1.0, l)
        out_s = (refs.q_s if refs.out_s is None else refs.out_s).at[wg]
        if not self.tiles.automatic_barriers:
            plgpu.commit_smem()  # no warp overwrites queries that another one still multiplies
        out_s[...] = (acc * spread(1 / l, acc.shape)).astype(refs.out.dtype)
        refs.lse_s.at[wg][...] = jnp.where(empty, -jnp.inf, (m + jnp.log(l) * LOG2E) / LOG2E)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, refs.out.at[self.batch, rows, self.head])
        plgpu.copy_smem_to_gmem(refs.lse_s.at[wg], refs.lse.at[self.batch, self.head, rows])
        plgpu.wait_smem_to_gmem(0)
