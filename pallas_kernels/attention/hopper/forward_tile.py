"""The part of the forward pass that its schedules share: one tile of queries.

    loading warpgroup               shared memory             computing warpgroups
    TMA of K, ids (step)    ----->  k_s[slot]   k_ready ----->  S = Q K^T
                            <-----              k_free  <-----
    TMA of V (step)         ----->  v_s[slot]   v_ready ----->  O += P V
                            <-----              v_free  <-----

Each warpgroup loads its own queries, once, and stores its own output. A barrier of the kind `ready`
completes when its copies have arrived, and one of the kind `free` when every computing warpgroup
has read the slot. `stages` slots let the loading warpgroup run that many blocks ahead.
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
    block_position,
    hidden,
    kernel_band,
    matrix,
    spread,
    tile_walk,
    vector,
    warpgroup,
)
from pallas_kernels.attention.hopper.walk import Walk

_ID_BYTES = 3072
"""Shared memory for segment ids: one kilobyte for queries, at most two for keys."""


def tile_scratch(
    spec: Spec, tiles: ForwardTiles, T: int, H: int, V: int, dtype: Any
) -> tuple[int, dict[str, Any]]:
    """(slots for blocks of keys and values, shared memory and barriers of a tile).

    T: keys; H, V: widths of the heads of queries and of values.
    """
    W = tiles.warpgroups
    R = tiles.height
    C = tiles.block
    # The output is staged in the memory of the queries if it is as wide.
    resident_bytes = 2 * tiles.rows * (H if V == H else H + V)
    id_bytes = _ID_BYTES if spec.segments else 0
    n_fitting = (SHARED_MEMORY - resident_bytes - id_bytes) // (2 * C * (H + V))
    stages = min(tiles.stages, T // C, max(2, n_fitting))
    n_copies = 1 + spec.segments  # ids are loaded with their keys or queries
    free = plgpu.Barrier(num_arrivals=W, num_barriers=stages)
    scratch = {
        "q_s": matrix(R, H, dtype, (W,)),
        "k_s": matrix(C, H, dtype, (stages,)),
        "v_s": matrix(C, V, dtype, (stages,)),
        "out_s": None if V == H else matrix(R, V, dtype, (W,)),
        "lse_s": plgpu.SMEM((W, R), jnp.float32),
        "q_ids_s": plgpu.SMEM((W, R), jnp.int32) if spec.segments else None,
        "k_ids_s": plgpu.SMEM((stages, C), jnp.int32) if spec.segments else None,
        "q_ready": plgpu.Barrier(num_arrivals=n_copies, num_barriers=W),
        "k_ready": plgpu.Barrier(num_arrivals=n_copies, num_barriers=stages),
        "v_ready": plgpu.Barrier(num_barriers=stages),
        "k_free": free,
        "v_free": free,
    }
    return stages, scratch


class Tile:
    """One tile of queries of one head against the keys that it sees.

    A schedule is a subclass that implements `visit`.
    """

    def __init__(
        self, spec: Spec, tiles: ForwardTiles, stages: int, group: int, refs: Refs
    ) -> None:
        """stages: slots of keys and of values. group: query heads of a kv head."""
        self.spec = spec
        self.tiles = tiles
        self.stages = stages
        self.group = group
        self.refs = refs
        self.batch, self.head, tile = block_position()
        # If later queries see more keys, they come first, so that the last tiles of the grid are
        # short.
        self.tile = refs.q.shape[1] // tiles.rows - 1 - tile if spec.causal else tile
        self.band = kernel_band(spec, refs)

    def visit(
        self, walk: Walk, wg: Any, row: Any, m: Array, l: Array
    ) -> tuple[Array, Array, Array]:
        """(sum of p v [rows, V], maximum of the logits, sum of p [rows]) after the walk's blocks.

        The walk may have no block.

        Args:
          wg: the index of this warpgroup.
          row: its first query.
          m, l: maximum, to the base 2, and sum before the first block.
        """
        raise NotImplementedError

    def run(self) -> None:
        """The program of each warpgroup."""
        wg = warpgroup()
        pl.when(wg == self.tiles.warpgroups)(self.fetch)
        pl.when(wg < self.tiles.warpgroups)(lambda: self.compute(wg))

    def walk(self) -> Walk:
        """The walk of this tile.

        Each warpgroup computes its own: shared code would need registers before they are
        distributed.
        """
        return tile_walk(
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
        """The slot of the block of a step."""
        return lax.rem(step, jnp.int32(self.stages))

    def fetch(self) -> None:
        """Loads the keys and values, a few blocks ahead."""
        plgpu.set_max_registers(self.tiles.registers.load, action="decrease")
        refs = self.refs
        walk = self.walk()
        C = self.tiles.block
        kv_head = lax.div(self.head, jnp.int32(self.group))

        @pl.loop(0, walk.n)
        def _(step: Any) -> None:
            slot = self.slot(step)
            reused = step >= self.stages
            keys = pl.ds(walk.block(step) * C, C)
            pl.when(reused)(lambda: plgpu.barrier_wait(refs.k_free.at[slot]))
            plgpu.copy_gmem_to_smem(
                refs.k.at[self.batch, keys, kv_head], refs.k_s.at[slot], refs.k_ready.at[slot]
            )
            if self.spec.segments:
                plgpu.copy_gmem_to_smem(
                    refs.k_ids.at[self.batch, keys], refs.k_ids_s.at[slot], refs.k_ready.at[slot]
                )
            pl.when(reused)(lambda: plgpu.barrier_wait(refs.v_free.at[slot]))
            plgpu.copy_gmem_to_smem(
                refs.v.at[self.batch, keys, kv_head], refs.v_s.at[slot], refs.v_ready.at[slot]
            )

    def compute(self, wg: Any) -> None:
        """Loads the queries, visits the keys and stores the results."""
        plgpu.set_max_registers(self.tiles.registers.compute, action="increase")
        refs = self.refs
        walk = self.walk()
        height = self.tiles.height
        row = self.tile * self.tiles.rows + wg * height
        rows = pl.ds(row, height)
        plgpu.copy_gmem_to_smem(
            refs.q.at[self.batch, rows, self.head], refs.q_s.at[wg], refs.q_ready.at[wg]
        )
        if self.spec.segments:
            plgpu.copy_gmem_to_smem(
                refs.q_ids.at[self.batch, rows], refs.q_ids_s.at[wg], refs.q_ready.at[wg]
            )
        plgpu.barrier_wait(refs.q_ready.at[wg])

        # A sink is a key without a value: the state that its rows start from.
        initial_m = jnp.float32(FLOOR)
        initial_l = jnp.float32(0)
        if self.spec.sinks:
            sink = refs.sinks[self.head] * LOG2E
            initial_m = jnp.maximum(sink, FLOOR)
            initial_l = jnp.exp2(sink - initial_m)
        row_layout = plgpu.Layout.WGMMA.reduce(1)
        m, l = (
            plgpu.layout_cast(lax.broadcast_in_dim(x, (height,), []), row_layout)
            for x in (initial_m, initial_l)
        )
        acc, m, l = self.visit(walk, wg, row, m, l)
        self.store(wg, rows, acc, m, l)

    def ids(self, step: Any, wg: Any) -> tuple[Array, Array] | None:
        """The segments of the queries, and of the keys of a step; None if the spec has none."""
        if not self.spec.segments:
            return None
        return vector(self.refs.q_ids_s.at[wg], 0), vector(self.refs.k_ids_s.at[self.slot(step)], 1)

    def masked(
        self, s: Array, walk: Walk, step: Any, row: Any, ids: tuple[Array, Array] | None
    ) -> Array:
        """The logits of a step with -inf where a query does not see a key."""
        q_ids, k_ids = ids or (None, None)
        first_key = walk.block(step) * self.tiles.block
        shape = (s.shape[0], s.shape[1])
        mask = hidden(self.band, shape, row, first_key, q_ids, k_ids, self.spec.T)
        return s if mask is None else jnp.where(mask, -jnp.inf, s)

    def store(self, wg: Any, rows: Any, acc: Array, m: Array, l: Array) -> None:
        """Normalises and stores the output and the log-sum-exp: 0 and -inf in rows without keys."""
        refs = self.refs
        empty = l == 0
        l = jnp.where(empty, 1.0, l)
        out_s = (refs.q_s if refs.out_s is None else refs.out_s).at[wg]
        if not self.tiles.automatic_barriers:
            plgpu.commit_smem()  # no warp overwrites queries that another one still multiplies
        out_s[...] = (acc * spread(1 / l, acc.shape)).astype(refs.out.dtype)
        refs.lse_s.at[wg][...] = jnp.where(empty, -jnp.inf, (m + jnp.log(l) * LOG2E) / LOG2E)
        # TMA must see the stores of all threads before it copies.
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s, refs.out.at[self.batch, rows, self.head])
        plgpu.copy_smem_to_gmem(refs.lse_s.at[wg], refs.lse.at[self.batch, self.head, rows])
        # The block's shared memory must last until it is copied.
        plgpu.wait_smem_to_gmem(0)
