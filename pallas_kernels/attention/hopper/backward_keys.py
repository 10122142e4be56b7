"""The backward pass on Hopper: the gradients of keys and values.

A tile of keys visits the queries of every head of its group, so that grouped-query attention needs
no sum afterwards. Everything is transposed: rows are keys, columns queries. Sizes as in `spec.py`.
"""

from __future__ import annotations

from typing import Any, Literal

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
    """`dk` [B, T, K, H] and `dv` [B, T, K, V], or one of them. Types and arguments as of `dq`, but
    with the walks of tiles of keys.

    If the heads are too wide for both sums to stay in registers, two calls compute one each, and s
    is computed twice.
    """
    (B, S, N, H), (_, T, K, V) = q.shape, v.shape
    W, C, stages = COMPUTING, tiles.block, min(tiles.stages, N // K * (S // tiles.block))
    with_dk = part != "dv"
    # The operand of the last product of a step is held longest; if memory is short, the other
    # operand gets fewer slots.
    held, other = (C * H, C * V) if with_dk else (C * V, C * H)
    turns = stages
    stages, fewer = slots(stages, tiles.rows * (H + V if with_dk else max(H, V)), held, other)
    if part == "both" and fewer < 2 <= turns:
        raise ValueError(
            f"heads of {H} and {V} leave no shared memory for two slots of {C} queries, and both "
            "sums hold one to the next step"
        )
    q_stages, dout_stages = (stages, fewer) if with_dk else (fewer, stages)
    scratch = {
        "k_s": matrix(WARPGROUP, H, k.dtype, (W,)),
        "v_s": matrix(WARPGROUP, V, v.dtype, (W,)) if with_dk or V != H else None,
        "q_s": matrix(C, H, q.dtype, (q_stages,)),
        "dout_s": matrix(C, V, q.dtype, (dout_stages,)),
        # Each array takes at least a kilobyte, and wide heads leave only three: lse and delta share
        # one array, and so do all ids.
        "vectors_s": plgpu.SMEM((q_stages + dout_stages * with_dk, C), jnp.float32),
        "ids_s": plgpu.SMEM((tiles.rows + q_stages * C,), jnp.int32) if spec.segments else None,
        "here": plgpu.Barrier(num_arrivals=1 + with_dk + spec.segments, num_barriers=W),
        "q_here": plgpu.Barrier(num_arrivals=2 + spec.segments, num_barriers=q_stages),
        "dout_here": plgpu.Barrier(num_arrivals=1 + with_dk, num_barriers=dout_stages),
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
        "v": v if with_dk else None,
        "dout": dout,
        "lse": lse,
        "delta": delta if with_dk else None,
        **sides,
    }
    out = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in (("dk", k), ("dv", v))
        if part in (name, "both")
    }
    name, width = {"both": ("dkv", 2 * (H + V)), "dk": ("dk", 2 * H + V), "dv": ("dv", H + V)}[part]
    start = launch_unrounded if spec.unrounded else launch
    return start(
        body, inputs, out, scratch, name=f"flash_attention_{name}", flops=spec.flops(B, N, width),
        occupancy=spec.occupancy(B, N, K, H + V, keys=True),
        grid=(B, K, T // tiles.rows), section=section_of_keys(S, N, K, H + V, split=False),
    )  # fmt: skip


class _Kernel:
    """One tile of keys of one kv head against the queries that see it."""

    def __init__(self, spec: Spec, tiles: Tiles, group: int, part: Part, refs: Refs) -> None:
        self.spec, self.tiles, self.group, self.part, self.refs = spec, tiles, group, part, refs
        self.batch, self.head, self.tile = block_position()
        self.queries = Ring(refs.q_here, refs.q_free, refs.q_s.shape[0])
        self.douts = Ring(refs.dout_here, refs.dout_free, refs.dout_s.shape[0])
        H, V = refs.q.shape[3], refs.dout.shape[3]
        self.tight = tight(
            {"both": H + V, "dk": H, "dv": V}[part], tiles.block, 2 if part == "both" else 1
        )
        # The slope of a soft cap needs as many registers as dp: if they are few, dp is computed
        # after the slope is used.
        self.late = self.tight and spec.softcap is not None

    def band(self) -> Band:
        """The band with keys as rows."""
        return band_of(self.spec, self.refs).transposed

    def walk(self, head: Any) -> Walk:
        """The walk of one query head. Padding queries have probability 0."""
        spec, refs = self.spec, self.refs
        return walk_of(
            self.tiles,
            self.band(),
            spec.T,
            spec.S,
            refs,
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
        return self.refs.ids_s.at[
            pl.ds(self.tiles.rows + slot * self.tiles.block, self.tiles.block)
        ]

    def fetch(self) -> None:
        """Loads the queries of the heads one after another, a few blocks ahead."""
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        refs, batch, C = self.refs, self.batch, self.tiles.block

        def of_head(member: Any, first: Any) -> Any:
            head = self.head * self.group + member
            walk = self.walk(head)

            @pl.loop(0, walk.n)
            def _(step: Any) -> None:
                rows = pl.ds(walk.block(step) * C, C)
                ids = [(refs.q_ids.at[batch, rows], self.q_ids_s)] if self.spec.segments else []
                delta = (
                    [] if self.part == "dv" else [(refs.delta.at[batch, head, rows], self.delta_s)]
                )
                lse = (refs.lse.at[batch, head, rows], lambda slot: refs.vectors_s.at[slot])
                self.queries.fill(
                    first + step,
                    (refs.q.at[batch, rows, head], lambda slot: refs.q_s.at[slot]),
                    lse,
                    *ids,
                )
                self.douts.fill(
                    first + step,
                    (refs.dout.at[batch, rows, head], lambda slot: refs.dout_s.at[slot]),
                    *delta,
                )

            return first + walk.n

        lax.fori_loop(0, self.group, of_head, jnp.int32(0))

    def compute(self, wg: Any) -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        refs, part = self.refs, self.part
        row = self.tile * self.tiles.rows + wg * WARPGROUP
        rows, here = pl.ds(row, WARPGROUP), refs.here.at[wg]
        plgpu.copy_gmem_to_smem(refs.k.at[self.batch, rows, self.head], refs.k_s.at[wg], here)
        if part != "dv":
            plgpu.copy_gmem_to_smem(refs.v.at[self.batch, rows, self.head], refs.v_s.at[wg], here)
        if self.spec.segments:
            plgpu.copy_gmem_to_smem(refs.k_ids.at[self.batch, rows], self.k_ids_s(wg), here)
        plgpu.barrier_wait(here)
        names = ("dk", "dv") if part == "both" else (part,)

        def sum_up(*sums: Any) -> tuple[Array, ...]:
            accs = Refs(zip(names, sums, strict=True))

            def of_head(member: Any, first: Any) -> Any:
                walk = self.walk(self.head * self.group + member)

                def loop(start: Any, stop: Any, row: Any = None) -> None:
                    lax.fori_loop(
                        start,
                        stop,
                        lambda step, _: self.step(accs, walk, step, first + step, wg, row),
                        None,
                    )

                if self.spec.causal or self.spec.segments:
                    loop(0, walk.n_full)
                    loop(walk.n_full, walk.n, row)
                else:
                    loop(0, walk.n)
                return first + walk.n

            lax.fori_loop(0, self.group, of_head, jnp.int32(0))
            return tuple(x[...] for x in sums)

        widths = {"dk": refs.q.shape[3], "dv": refs.dout.shape[3]}
        sums = pl.run_scoped(sum_up, *(accumulator(widths[name]) for name in names))
        self.store(wg, rows, Refs(zip(names, sums, strict=True)))

    def step(self, accs: Refs, walk: Walk, step: Any, turn: Any, wg: Any, row: Any) -> None:
        """One block of queries; `row`: the first key, where the block needs a mask. The last
        products stay in flight.
        """
        refs, spec, C, part = self.refs, self.spec, self.tiles.block, self.part
        slot = self.queries.take(turn)
        wg = opaque(wg)

        def gradient(s_ref: Any, *dp_ref: Any) -> Array | None:
            plgpu.wgmma(s_ref, refs.k_s.at[wg], transposed(refs.q_s.at[slot]))
            dout_slot = self.douts.take(turn)

            def dp() -> None:
                if dp_ref:
                    plgpu.wgmma(dp_ref[0], refs.v_s.at[wg], transposed(refs.dout_s.at[dout_slot]))

            if not self.late:
                dp()
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0 if self.late else len(dp_ref))
            # After this, the products that the previous step left in flight are also done.
            pl.when(turn > 0)(lambda: self.give_last(turn - 1))
            mask = None
            if row is not None:
                k_ids = q_ids = None
                if spec.segments:
                    k_ids, q_ids = vector(self.k_ids_s(wg), 0), vector(self.q_ids_s(slot), 1)
                mask = hidden(
                    self.band(), (WARPGROUP, C), row, walk.block(step) * C, k_ids, q_ids, 0
                )
            p, w = weights(spec, s, vector(refs.vectors_s.at[slot], 1), 1, mask)
            if self.late:
                dp()
            if part != "dk":
                plgpu.wgmma(accs.dv, p.astype(refs.dout.dtype), refs.dout_s.at[dout_slot])
            if not dp_ref:
                self.queries.give(turn)
                return None
            dp_sum = plgpu.wgmma_accumulator_load(
                dp_ref[0], wait_n=int(part == "both" and not self.tight)
            )
            delta = vector(self.delta_s(dout_slot), 1)
            if part == "dk":
                self.douts.give(turn)
            return (w * (dp_sum - spread(delta, s.shape, 1))).astype(refs.q.dtype)

        ds = pl.run_scoped(gradient, *[accumulator(C)] * (1 if part == "dv" else 2))
        if ds is not None:
            plgpu.wgmma(accs.dk, ds, refs.q_s.at[slot])
            if self.tight and part == "dk":
                plgpu.wgmma_wait(0)
                self.queries.give(turn)

    def give_last(self, turn: Any) -> None:
        """Frees the slots that the last products of a step have read."""
        if self.part == "both" or (self.part == "dk" and not self.tight):
            self.queries.give(turn)
        if self.part != "dk":
            self.douts.give(turn)

    def store(self, wg: Any, rows: Any, sums: Refs) -> None:
        """Stores the sums through the shared memory of the tile's keys and values, which are no
        longer needed.
        """
        refs = self.refs
        room = {"dk": refs.k_s, "dv": refs.k_s if refs.v_s is None else refs.v_s}
        if sums.get("dk") is not None:
            sums = Refs(sums | {"dk": sums.dk * self.spec.scale})
        if self.spec.unrounded:
            for name, x in sums.items():
                add_from_registers(
                    refs[name].at[self.batch, self.head, self.tile * COMPUTING + wg, 0], x
                )
            return
        for name, x in sums.items():
            room[name].at[wg][...] = x.astype(refs[name].dtype)
        plgpu.commit_smem()
        for name in sums:
            plgpu.copy_smem_to_gmem(room[name].at[wg], refs[name].at[self.batch, rows, self.head])
        plgpu.wait_smem_to_gmem(0)
