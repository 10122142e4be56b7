"""The backward pass on Hopper: the gradients of keys and values.

A tile of keys visits the queries of every head of its group, so that grouped-query attention needs
no sum afterwards. Everything is transposed: rows are keys, columns queries.

    loading warpgroup           shared memory       computing warpgroups, 64 keys each
    TMA of Q, lse      ------>  q_s[slot]    ---->  S^T = K Q^T,   dK += dS^T Q
    TMA of dO, delta   ------>  dout_s[slot] ---->  dP^T = V dO^T, dV += P^T dO

A computing warpgroup loads its own K and V, once. The last products of a step stay in flight during
the first one of the next step, which then gives their slots back. Sizes as in `spec.py`.
"""

from __future__ import annotations

from typing import Any, Literal

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
from pallas_kernels.attention.hopper.walk import Band, Walk
from pallas_kernels.attention.occupancy import section_of_keys

Part = Literal["dk", "dv", "both"]


def dkv(
    spec: Spec,
    tiles: Tiles,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    sides: dict[str, Array | None],
    part: Part = "both",
) -> Refs:
    """Returns `dk` [B, T, K, H] and `dv` [B, T, K, V], or one of them.

    Types and arguments as of `dq`, but with the walks of tiles of keys. If the heads are too wide
    for both sums to stay in registers, two calls compute one each, and s is computed twice.
    """
    B, S, N, H = q.shape
    _, T, K, V = v.shape
    W = COMPUTING
    C = tiles.block
    computes_dk = part != "dv"
    computes_dv = part != "dk"
    # The operand of the last product of a step is needed longest; if memory is short, the other
    # operand gets fewer slots.
    n_turns = min(tiles.stages, N // K * (S // C))
    if computes_dk:
        q_stages, dout_stages = ring_sizes(n_turns, tiles.rows * (H + V), C * H, C * V)
    else:
        # dV needs no V.
        dout_stages, q_stages = ring_sizes(n_turns, tiles.rows * max(H, V), C * V, C * H)
    if part == "both" and dout_stages < 2 <= n_turns:
        raise ValueError(
            f"heads of {H} and {V} leave no shared memory for two slots of {C} queries, and both "
            "sums hold one to the next step"
        )

    # Ids are loaded with their queries or keys, lse with the queries, delta with dO.
    scratch = {
        "k_s": matrix(WARPGROUP, H, k.dtype, (W,)),
        "v_s": matrix(WARPGROUP, V, v.dtype, (W,)) if computes_dk or V != H else None,
        "q_s": matrix(C, H, q.dtype, (q_stages,)),
        "dout_s": matrix(C, V, q.dtype, (dout_stages,)),
        # Each array takes at least a kilobyte, and wide heads leave only three: lse and delta share
        # one array, and so do all ids.
        "vectors_s": plgpu.SMEM((q_stages + dout_stages * computes_dk, C), jnp.float32),
        "ids_s": plgpu.SMEM((tiles.rows + q_stages * C,), jnp.int32) if spec.segments else None,
        "kv_ready": plgpu.Barrier(num_arrivals=1 + computes_dk + spec.segments, num_barriers=W),
        "q_ready": plgpu.Barrier(num_arrivals=2 + spec.segments, num_barriers=q_stages),
        "dout_ready": plgpu.Barrier(num_arrivals=1 + computes_dk, num_barriers=dout_stages),
        "q_free": plgpu.Barrier(num_arrivals=W, num_barriers=q_stages),
        "dout_free": plgpu.Barrier(num_arrivals=W, num_barriers=dout_stages),
    }

    def body(refs: Refs) -> None:
        # Each warpgroup computes its own position: shared code would need registers before they are
        # distributed.
        wg = warpgroup()
        pl.when(wg == W)(lambda: _Kernel(spec, tiles, N // K, part, refs).fetch())
        pl.when(wg < W)(lambda: _Kernel(spec, tiles, N // K, part, refs).compute(wg))

    inputs = {
        "q": q,
        "k": k,
        "v": v if computes_dk else None,
        "dout": dout,
        "lse": lse,
        "delta": delta if computes_dk else None,
        **sides,
    }
    out = {}
    if computes_dk:
        out["dk"] = jax.ShapeDtypeStruct(k.shape, k.dtype)
    if computes_dv:
        out["dv"] = jax.ShapeDtypeStruct(v.shape, v.dtype)
    name = "dkv" if part == "both" else part
    # s takes H, dp V, dk H and dv V for each pair of query and key; dv alone needs no dp.
    width = {"both": 2 * (H + V), "dk": 2 * H + V, "dv": H + V}[part]
    launch_kernel = launch_unrounded if spec.unrounded else launch
    return launch_kernel(
        body,
        inputs,
        out,
        scratch,
        name=f"flash_attention_{name}",
        flops=spec.flops(B, N, width),
        occupancy=spec.occupancy(B, N, K, H + V, keys=True),
        grid=(B, K, T // tiles.rows),
        section=section_of_keys(S, N, K, H + V, split=False),
    )


class _Kernel:
    """One tile of keys of one kv head against the queries that see it."""

    def __init__(self, spec: Spec, tiles: Tiles, group: int, part: Part, refs: Refs) -> None:
        """group: query heads of a kv head."""
        self.spec = spec
        self.tiles = tiles
        self.group = group
        self.part = part
        self.refs = refs
        self.batch, self.head, self.tile = block_position()
        self.queries = Ring(refs.q_ready, refs.q_free, refs.q_s.shape[0])
        self.douts = Ring(refs.dout_ready, refs.dout_free, refs.dout_s.shape[0])
        self.widths = {"dk": refs.q.shape[3], "dv": refs.dout.shape[3]}
        self.sum_names = ("dk", "dv") if part == "both" else (part,)
        sum_columns = sum(self.widths[name] for name in self.sum_names)
        self.short = registers_are_short(sum_columns, tiles.block, len(self.sum_names))
        # The slope of a soft cap needs as many registers as dp: if they are few, dp is computed
        # after the slope is used.
        self.dp_after_slope = self.short and spec.softcap is not None

    def band(self) -> Band:
        """The band with keys as rows."""
        return kernel_band(self.spec, self.refs).transposed

    def walk(self, head: Any) -> Walk:
        """The walk of one query head. Padding queries have probability 0."""
        return tile_walk(
            self.tiles,
            self.band(),
            self.spec.T,
            self.spec.S,
            self.refs,
            self.batch,
            head,
            self.tile,
            pad_is_harmless=True,
        )

    def delta_s(self, slot: Any) -> Any:
        return self.refs.vectors_s.at[self.queries.size + slot]

    def k_ids_s(self, wg: Any) -> Any:
        return self.refs.ids_s.at[pl.ds(wg * WARPGROUP, WARPGROUP)]

    def q_ids_s(self, slot: Any) -> Any:
        C = self.tiles.block
        return self.refs.ids_s.at[pl.ds(self.tiles.rows + slot * C, C)]

    def fetch(self) -> None:
        """Loads the queries of the heads one after another, a few blocks ahead."""
        plgpu.set_max_registers(REGISTERS.load, action="decrease")
        refs = self.refs
        batch = self.batch
        C = self.tiles.block

        def fetch_head(member: Any, first_turn: Any) -> Any:
            head = self.head * self.group + member
            walk = self.walk(head)

            @pl.loop(0, walk.n)
            def _(step: Any) -> None:
                rows = pl.ds(walk.block(step) * C, C)
                ids = [(refs.q_ids.at[batch, rows], self.q_ids_s)] if self.spec.segments else []
                delta = []
                if self.part != "dv":
                    delta = [(refs.delta.at[batch, head, rows], self.delta_s)]
                lse = (refs.lse.at[batch, head, rows], lambda slot: refs.vectors_s.at[slot])
                self.queries.fill(
                    first_turn + step,
                    (refs.q.at[batch, rows, head], lambda slot: refs.q_s.at[slot]),
                    lse,
                    *ids,
                )
                self.douts.fill(
                    first_turn + step,
                    (refs.dout.at[batch, rows, head], lambda slot: refs.dout_s.at[slot]),
                    *delta,
                )

            return first_turn + walk.n

        lax.fori_loop(0, self.group, fetch_head, jnp.int32(0))

    def compute(self, wg: Any) -> None:
        """Loads this warpgroup's keys and values, visits the queries and stores the gradients."""
        plgpu.set_max_registers(REGISTERS.compute, action="increase")
        refs = self.refs
        row = self.tile * self.tiles.rows + wg * WARPGROUP
        rows = pl.ds(row, WARPGROUP)
        ready = refs.kv_ready.at[wg]
        plgpu.copy_gmem_to_smem(refs.k.at[self.batch, rows, self.head], refs.k_s.at[wg], ready)
        if self.part != "dv":
            plgpu.copy_gmem_to_smem(refs.v.at[self.batch, rows, self.head], refs.v_s.at[wg], ready)
        if self.spec.segments:
            plgpu.copy_gmem_to_smem(refs.k_ids.at[self.batch, rows], self.k_ids_s(wg), ready)
        plgpu.barrier_wait(ready)

        def sum_up(*sums: Any) -> tuple[Array, ...]:
            accs = Refs(zip(self.sum_names, sums, strict=True))

            def visit_head(member: Any, first_turn: Any) -> Any:
                walk = self.walk(self.head * self.group + member)

                def visit(start: Any, stop: Any, row: Any = None) -> None:
                    def visit_block(step: Any, _: None) -> None:
                        self.step(accs, walk, step, first_turn + step, wg, row)

                    lax.fori_loop(start, stop, visit_block, None)

                if self.spec.causal or self.spec.segments:
                    visit(0, walk.n_full)
                    visit(walk.n_full, walk.n, row)
                else:
                    visit(0, walk.n)
                return first_turn + walk.n

            lax.fori_loop(0, self.group, visit_head, jnp.int32(0))
            return tuple(x[...] for x in sums)

        accs = [accumulator(self.widths[name]) for name in self.sum_names]
        sums = pl.run_scoped(sum_up, *accs)
        self.store(wg, rows, Refs(zip(self.sum_names, sums, strict=True)))

    def step(self, accs: Refs, walk: Walk, step: Any, turn: Any, wg: Any, row: Any) -> None:
        """One block of queries. The last products stay in flight.

        Args:
          accs: the accumulators `dk` and `dv`, or one of them.
          step: of the walk.
          turn: the number of steps of all heads before.
          row: the first key, where the block needs a mask; else None.
        """
        refs = self.refs
        spec = self.spec
        C = self.tiles.block
        slot = self.queries.take(turn)
        wg = opaque(wg)

        def gradient(s_ref: Any, *dp_ref: Any) -> Array | None:
            plgpu.wgmma(s_ref, refs.k_s.at[wg], transposed(refs.q_s.at[slot]))
            dout_slot = self.douts.take(turn)

            def issue_dp() -> None:
                if dp_ref:
                    plgpu.wgmma(dp_ref[0], refs.v_s.at[wg], transposed(refs.dout_s.at[dout_slot]))

            if not self.dp_after_slope:
                issue_dp()
            n_in_flight = 0 if self.dp_after_slope else len(dp_ref)
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=n_in_flight)
            # After this, the products that the previous step left in flight are also done.
            pl.when(turn > 0)(lambda: self.give_last(turn - 1))
            mask = None
            if row is not None:
                k_ids = q_ids = None
                if spec.segments:
                    k_ids = vector(self.k_ids_s(wg), 0)
                    q_ids = vector(self.q_ids_s(slot), 1)
                band = self.band()
                first_query = walk.block(step) * C
                mask = hidden(band, (WARPGROUP, C), row, first_query, k_ids, q_ids, 0)
            p, p_slope = probabilities(spec, s, vector(refs.vectors_s.at[slot], 1), 1, mask)
            if self.dp_after_slope:
                issue_dp()
            if self.part != "dk":
                plgpu.wgmma(accs.dv, p.astype(refs.dout.dtype), refs.dout_s.at[dout_slot])
            if not dp_ref:
                self.queries.give(turn)
                return None
            # dV may stay in flight, unless its operands' registers are needed.
            dv_in_flight = self.part == "both" and not self.short
            dp = plgpu.wgmma_accumulator_load(dp_ref[0], wait_n=int(dv_in_flight))
            delta = vector(self.delta_s(dout_slot), 1)
            if self.part == "dk":
                self.douts.give(turn)
            return (p_slope * (dp - spread(delta, s.shape, 1))).astype(refs.q.dtype)

        n_products = 1 if self.part == "dv" else 2
        ds = pl.run_scoped(gradient, *[accumulator(C)] * n_products)
        if ds is None:
            return
        plgpu.wgmma(accs.dk, ds, refs.q_s.at[slot])
        if self.short and self.part == "dk":
            plgpu.wgmma_wait(0)
            self.queries.give(turn)

    def give_last(self, turn: Any) -> None:
        """Frees the slots that the last products of a step have read."""
        if self.part == "both" or (self.part == "dk" and not self.short):
            self.queries.give(turn)
        if self.part != "dk":
            self.douts.give(turn)

    def store(self, wg: Any, rows: Any, sums: Refs) -> None:
        """Stores the sums through the shared memory of the tile's keys and values.

        These are no longer needed.
        """
        refs = self.refs
        if sums.get("dk") is not None:
            sums = Refs(sums | {"dk": sums.dk * self.spec.scale})
        if self.spec.unrounded:
            for name, x in sums.items():
                target = refs[name].at[self.batch, self.head, self.tile * COMPUTING + wg, 0]
                add_from_registers(target, x)
            return
        staging = {"dk": refs.k_s, "dv": refs.k_s if refs.v_s is None else refs.v_s}
        for name, x in sums.items():
            staging[name].at[wg][...] = x.astype(refs[name].dtype)
        # TMA must see the stores of all threads before it copies.
        plgpu.commit_smem()
        for name in sums:
            target = refs[name].at[self.batch, rows, self.head]
            plgpu.copy_smem_to_gmem(staging[name].at[wg], target)
        # The block's shared memory must last until it is copied.
        plgpu.wait_smem_to_gmem(0)
