"""The backward pass on Hopper in one kernel of five matmuls, after FlashAttention-3 (arXiv
2407.08608).

A block of threads owns 128 keys and visits the queries that see them, each warpgroup with 64 of the
keys. Rows are keys:

    S^T = K Q^T, dP^T = V dO^T          from shared memory
    dV += P^T dO, dK += dS^T Q          P^T and dS^T from registers
    dQ  = dS K                          dS^T of both warpgroups from shared memory, read transposed

Each warpgroup makes half of a block's dQ and adds it to fp32 sums in global memory. The order of
those additions changes from run to run, so this kernel does not serve `deterministic=True`; the
kernels of `backward.py` do. Sizes as in `spec.py`; C queries of a block.

Where the two sums of 64 keys do not fit in registers beside the rest (H + V > 256), it leaves dV to
`backward_keys.py`: six matmuls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.hopper.addition import (
    add_from_registers,
    from_register_order,
    launch_adding,
    register_order,
)
from pallas_kernels.attention.hopper.backward_sweep import Ring
from pallas_kernels.attention.hopper.fused_tiles import (
    ROWS,
    FusedShape,
    FusedTiles,
    scratch_of,
    shape_of,
)
from pallas_kernels.attention.hopper.spec import (
    COMPUTING,
    REGISTERS,
    WARPGROUP,
    Refs,
    Spec,
    accumulator,
    band_of,
    block_position,
    opaque,
    spread,
    transposed,
    vector,
    warpgroup,
)
from pallas_kernels.attention.hopper.walk import Band, limits
from pallas_kernels.attention.occupancy import by_query_head, section_of_keys


def backward_fused(
    spec: Spec,
    tiles: FusedTiles,
    q: Array,
    k: Array,
    v: Array,
    dout: Array,
    lse: Array,
    delta: Array,
    sides: dict[str, Array | None],
) -> Refs:
    """`dq` [B, S, N, H], `dk` [B, T, K, H] and, if `sums_fit`, `dv` [B, T, K, V], in the types of
    q, k and v, or in fp32 if not rounded.

    Arguments as for `dkv`: padded to complete tiles, lse to the base 2, sides with the walks of
    tiles of keys.
    """
    (B, S, N, H), (_, T, K, V) = q.shape, v.shape
    lists = sides.get("blocks")
    # Each query head then has its own walk, or there are too few blocks of threads: dk and dv are
    # summed in global memory, too. That sum is in fp32, which shared memory has no room for: a tile
    # of it is as large as those of K and V together.
    by_head = (
        spec.unrounded
        or by_query_head(B, N, K, T)
        or (N > K and lists is not None and lists.shape[0] > 1)
    )
    shape = shape_of(tiles, q, k, v, by_head)
    red = tiles.add == "red"
    sums = {"dq": register_order(B, N, S, H, shape.part) if red else (B, S, N, H)}
    own = {"dk": k, "dv": v} if shape.with_dv else {"dk": k}
    if by_head:
        sums |= {name: register_order(B, K, T, x.shape[3], x.shape[3]) for name, x in own.items()}
    out = (
        {} if by_head else {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in own.items()}
    )

    def body(refs: Refs) -> None:
        # Each warpgroup computes its own position: shared code would need registers before they are
        # distributed.
        wg = warpgroup()
        pl.when(wg == COMPUTING)(lambda: _Kernel(spec, tiles, shape, N // K, refs).fetch())
        pl.when(wg < COMPUTING)(lambda: _Kernel(spec, tiles, shape, N // K, refs).compute(wg))

    inputs = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta, **sides}
    found = launch_adding(
        body, inputs, sums, out, scratch_of(spec, tiles, shape, q, k, v),
        name="flash_attention_bwd",
        flops=spec.flops(B, N, 3 * H + (2 if shape.with_dv else 1) * V),
        occupancy=spec.occupancy(B, N, K, H + V, keys=True, split=by_head),
        grid=(B, N if by_head else K, T // ROWS),
        section=section_of_keys(S, N, K, H + V, split=by_head),
    )  # fmt: skip
    for name, scale in (("dq", spec.scale), ("dk", spec.scale), ("dv", 1.0)):
        if name in sums:
            x = found[name] if name == "dq" and not red else from_register_order(found[name])
            found[name] = x * scale if spec.unrounded else (x * scale).astype(q.dtype)
    return found


class _Steps(NamedTuple):
    """The blocks of queries that a tile visits: `block(step)` for the steps 0 ... n - 1;
    `mixed(step)`: whether ids must be compared.
    """

    n: Any
    block: Callable[[Any], Any]
    mixed: Callable[[Any], Any]


class _Kernel:
    """128 keys of one kv head against the queries that see them, of one head or of all heads of the
    group.
    """

    def __init__(
        self, spec: Spec, tiles: FusedTiles, shape: FusedShape, group: int, refs: Refs
    ) -> None:
        self.spec, self.tiles, self.shape, self.group, self.refs = spec, tiles, shape, group, refs
        self.batch, self.head, self.tile = block_position()
        self.first_head, self.members = (
            (self.head, 1) if shape.by_head else (self.head * group, group)
        )
        self.queries = Ring(refs.q_here, refs.q_free, shape.q_stages)
        self.douts = Ring(refs.dout_here, refs.dout_free, shape.dout_stages)

    @property
    def kv_head(self) -> Any:
        """Computed again where it is needed, so that it holds no register through the loop."""
        return (
            lax.div(opaque(self.head), jnp.int32(self.group)) if self.shape.by_head else self.head
        )

    def band(self) -> Band:
        """The band with keys as rows."""
        return band_of(self.spec, self.refs).transposed

    def steps(self) -> _Steps:
        """The walk of every head of the group. In ascending order, so that few numbers stay in
        registers.
        """
        spec, refs, C, tile = self.spec, self.refs, self.shape.block, self.tile
        if refs.blocks is not None:
            row = self.head if refs.blocks.shape[0] > 1 else 0
            n_full, n = refs.counts[row, tile, 0], refs.counts[row, tile, 1]
            return _Steps(n, lambda step: refs.blocks[row, tile, step], lambda step: step >= n_full)
        if refs.table is not None:
            row = self.batch if refs.table.shape[0] > 1 else 0
            start, full_start, full_stop, stop = (refs.table[row, tile, i] for i in range(4))

            def mixed(step: Any) -> Any:
                return (start + step < full_start) | (start + step >= full_stop)

            return _Steps(stop - start, lambda step: start + step, mixed)
        if not spec.causal:
            # Each tile starts elsewhere. Otherwise all of them would add to the same rows of dq at
            # the same time.
            n = refs.q.shape[1] // C
            return _Steps(n, lambda step: lax.rem(step + tile * (ROWS // C), n), lambda step: False)
        first = tile * ROWS
        found = limits(
            self.band(),
            first,
            jnp.minimum(first + ROWS, spec.T) - 1,
            spec.S,
            C,
            pad_is_harmless=True,
        )
        return _Steps(found.stop - found.start, lambda step: found.start + step, lambda step: False)

    def place_of(self, steps: _Steps, turn: Any) -> tuple[Any, Any]:
        """(query head, step) of a turn. One flat loop over the group, so that products stay in
        flight from one head to the next.
        """
        if self.members == 1:
            return self.first_head, turn
        member = lax.div(turn, jnp.asarray(steps.n, jnp.int32))
        return self.first_head + member, turn - member * steps.n

    def k_ids_s(self, wg: Any) -> Any:
        return self.refs.ints_s.at[pl.ds(self.shape.block + wg * WARPGROUP, WARPGROUP)]

    def q_ids_s(self, slot: Any) -> Any:
        return self.refs.ints_s.at[
            pl.ds(self.shape.block + ROWS + slot * self.shape.block, self.shape.block)
        ]

    def delta_s(self, slot: Any) -> Any:
        return self.refs.vectors_s.at[self.shape.q_stages + slot]

    def fetch(self) -> None:
        """Loads the keys and values, then the queries of the heads one after another, a few blocks
        ahead.
        """
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        refs, batch, C = self.refs, self.batch, self.shape.block
        for w in range(COMPUTING):
            rows = pl.ds(self.tile * ROWS + w * WARPGROUP, WARPGROUP)
            plgpu.copy_gmem_to_smem(refs.k.at[batch, rows, self.kv_head], refs.k_s.at[w], refs.here)
            plgpu.copy_gmem_to_smem(refs.v.at[batch, rows, self.kv_head], refs.v_s.at[w], refs.here)
        if self.spec.segments:
            plgpu.copy_gmem_to_smem(
                refs.k_ids.at[batch, pl.ds(self.tile * ROWS, ROWS)],
                refs.ints_s.at[pl.ds(C, ROWS)],
                refs.here,
            )
        self.count()
        plgpu.barrier_arrive(refs.here)
        steps = self.steps()

        @pl.loop(0, self.members * steps.n)
        def _(turn: Any) -> None:
            head, step = self.place_of(steps, turn)
            rows = pl.ds(steps.block(step) * C, C)
            ids = [(refs.q_ids.at[batch, rows], self.q_ids_s)] if self.spec.segments else []
            lse = (refs.lse.at[batch, head, rows], lambda slot: refs.vectors_s.at[slot])
            self.queries.fill(
                turn, (refs.q.at[batch, rows, head], lambda slot: refs.q_s.at[slot]), lse, *ids
            )
            delta, slot = refs.delta.at[batch, head, rows], self.douts.slot(turn)
            here = self.douts.here if self.shape.with_dv else refs.delta_here
            self.douts.fill(
                turn, (refs.dout.at[batch, rows, head], lambda slot: refs.dout_s.at[slot])
            )
            plgpu.copy_gmem_to_smem(delta, self.delta_s(slot), here.at[slot])

    def compute(self, wg: Any) -> None:
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        refs = self.refs
        plgpu.barrier_wait(refs.here)
        widths = {"dk": refs.q.shape[3], "dv": refs.dout.shape[3]}
        names = ("dk", "dv") if self.shape.with_dv else ("dk",)

        def sum_up(*accs: Any) -> tuple[Array, ...]:
            sums, steps = Refs(zip(names, accs, strict=True)), self.steps()
            lax.fori_loop(
                0, self.members * steps.n, lambda turn, _: self.step(sums, steps, turn, wg), None
            )
            return tuple(acc[...] for acc in accs)

        sums = pl.run_scoped(sum_up, *(accumulator(widths[name]) for name in names))
        self.meet()  # until the other warpgroup has read my keys for the last time
        self.store(wg, Refs(zip(names, sums, strict=True)))

    def count(self) -> None:
        """Stores the numbers of rows and columns, for masks: the compiler would hold those of a
        thread's columns in 16 registers.
        """
        for first in range(0, self.shape.block, WARPGROUP):
            numbers = plgpu.broadcasted_iota(
                jnp.int32, (WARPGROUP,), 0, layout=plgpu.Layout.WGMMA.reduce(1)
            )
            self.refs.ints_s[pl.ds(first, WARPGROUP)] = numbers + first

    def meet(self) -> None:
        """Waits for the other computing warpgroup."""
        plgpu.barrier_arrive(self.refs.both)
        plgpu.barrier_wait(self.refs.both)

    def step(self, sums: Refs, steps: _Steps, turn: Any, wg: Any) -> None:
        """One block of queries. dK stays in flight over the S^T of the next one."""
        refs, wg = self.refs, opaque(wg)
        slot = self.queries.take(turn)
        head, step = self.place_of(steps, turn)

        def gradient(s_ref: Any, dp_ref: Any) -> Array:
            plgpu.wgmma(s_ref, refs.k_s.at[wg], transposed(refs.q_s.at[slot]))
            if self.queries.size > 1:
                # dK of the step before is done, and the registers of its dS^T are free, before dP^T
                # takes its own.
                plgpu.wgmma_wait(1)
                pl.when(turn > 0)(lambda: self.queries.give(turn - 1))
            dout_slot = self.douts.take(turn)
            plgpu.wgmma(dp_ref, refs.v_s.at[wg], transposed(refs.dout_s.at[dout_slot]))
            p, slope = self.weights(
                plgpu.wgmma_accumulator_load(s_ref, wait_n=1), steps, step, slot, wg
            )
            if self.shape.with_dv:
                p = p.astype(refs.dout.dtype)
                plgpu.wgmma(sums.dv, p, refs.dout_s.at[dout_slot])
            else:
                # With delta's own barrier: ptxas would move the exponentials below the wait for
                # dP^T, but not below one that branches.
                slope = opaque(slope)
                plgpu.barrier_wait(refs.delta_here.at[dout_slot])
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=int(self.shape.with_dv))
            dp = dp - spread(vector(self.delta_s(dout_slot), 1), dp.shape, 1)
            if not self.shape.with_dv:
                self.douts.give(turn)
            return (slope.astype(jnp.float32) * dp).astype(refs.q.dtype)

        C = self.shape.block
        ds = pl.run_scoped(gradient, accumulator(C), accumulator(C))
        buffer = lax.rem(turn, jnp.int32(2))
        refs.ds_s.at[buffer, wg][...] = ds
        plgpu.commit_smem()
        self.meet()
        self.add(head, steps.block(step), wg, self.multiply(sums, ds, buffer, slot, turn, wg))

    def weights(
        self, s: Array, steps: _Steps, step: Any, slot: Any, wg: Any
    ) -> tuple[Array, Array]:
        """(P^T, P^T times the slope of the soft cap), from raw dot products. In 16 bits if fp32
        would take too many registers.
        """
        spec, refs = self.spec, self.refs
        if spec.softcap is not None:
            s = jnp.tanh(s * spec.capped)
        for needed, mask in self.masks(s.shape, steps, step, slot, wg):
            # With a soft cap, its square must be finite, so that p = 0 times the slope is 0.
            s = lax.cond(
                needed,
                lambda s, mask=mask: jnp.where(
                    mask(), -jnp.inf if spec.softcap is None else -1e18, s
                ),
                lambda s: s,
                s,
            )
        p = jnp.exp2(s * spec.to_log2 - spread(vector(refs.vectors_s.at[slot], 1), s.shape, 1))
        slope = p if spec.softcap is None else p * (1 - s * s)
        if self.shape.block > WARPGROUP or spec.softcap is not None:
            p, slope = (
                opaque(x.astype(refs.dout.dtype))
                for x in ((p, p) if spec.softcap is None else (p, slope))
            )
        return p, slope

    def masks(
        self, shape: tuple[int, ...], steps: _Steps, step: Any, slot: Any, wg: Any
    ) -> list[tuple[Any, Callable[[], Array]]]:
        """(whether a block needs it, what it hides) of each mask. One at a time takes fewer
        registers than all together.
        """
        spec, C, band = self.spec, self.shape.block, self.band()
        row = self.tile * ROWS + wg * WARPGROUP
        # column - row of the band = difference within the tile - shift
        shift = row - steps.block(step) * C
        found: list[tuple[Any, Callable[[], Array]]] = []

        def number(axis: int) -> Array:
            return vector(self.refs.ints_s.at[pl.ds(0, shape[axis])], axis)

        def difference() -> Array:
            return spread(number(1), shape, 1) - spread(number(0), shape, 0)

        if band.low is not None:
            found.append(
                (-shift - (WARPGROUP - 1) < band.low, lambda: difference() < band.low + shift)
            )
        if band.high is not None:
            found.append((C - 1 - shift > band.high, lambda: difference() > band.high + shift))
        last = (
            None if spec.traced else (spec.S - 1 + (spec.q_offset or 0) if spec.causal else spec.T)
        )
        if spec.T % ROWS and (last is None or last >= spec.T):
            # The probability of a padding key, exp2(-lse), may be infinite, and 0 times that is not
            # 0.
            found.append(
                (row + WARPGROUP > spec.T, lambda: spread(number(0), shape, 0) >= spec.T - row)
            )
        if spec.segments:

            def differ() -> Array:
                keys, queries = vector(self.k_ids_s(wg), 0), vector(self.q_ids_s(slot), 1)
                return spread(keys, shape, 0) != spread(queries, shape, 1)

            found.append((steps.mixed(step), differ))
        return found

    def multiply(self, sums: Refs, ds: Array, buffer: Any, slot: Any, turn: Any, wg: Any) -> Array:
        """This warpgroup's part of dQ [64, part], of all 128 keys; leaves dK in flight."""
        refs, shape = self.refs, self.shape

        def product(acc: Any) -> Array:
            for w in range(COMPUTING):
                ds_w, k_w = refs.ds_s.at[buffer, w], refs.k_s.at[w]
                if shape.block == WARPGROUP:
                    k_w = k_w.at[:, pl.ds(wg * shape.part, shape.part)]
                else:
                    ds_w = ds_w.at[:, pl.ds(wg * WARPGROUP, WARPGROUP)]
                plgpu.wgmma(acc, transposed(ds_w), k_w)
            plgpu.wgmma(sums.dk, ds, refs.q_s.at[slot])
            found = plgpu.wgmma_accumulator_load(acc, wait_n=int(self.queries.size > 1))
            if shape.with_dv:
                self.douts.give(turn)  # dV is done before dQ
            if self.queries.size == 1:
                self.queries.give(turn)
            return found

        return pl.run_scoped(product, accumulator(shape.part))

    def add(self, head: Any, block: Any, wg: Any, part: Array) -> None:
        """Adds this warpgroup's part to dq."""
        refs, C = self.refs, self.shape.block
        row, column = (
            (block * (C // WARPGROUP), wg) if C == WARPGROUP else (block * (C // WARPGROUP) + wg, 0)
        )
        if self.tiles.add == "red":
            add_from_registers(refs.dq.at[self.batch, head, row, column], part)
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.dq_s.at[wg][...] = part
        plgpu.commit_smem()
        columns = pl.ds(column * self.shape.part, self.shape.part)
        target = refs.dq.at[self.batch, pl.ds(row * WARPGROUP, WARPGROUP), head, columns]
        plgpu.copy_smem_to_gmem(refs.dq_s.at[wg], target, reduction_op="add")

    def store(self, wg: Any, sums: Refs) -> None:
        """Stores dK and dV through the shared memory of K and V, or adds them to those of the other
        heads of the group.
        """
        # computed again, so that it holds no register through the loop
        refs, tile = self.refs, opaque(self.tile)
        if self.shape.by_head:
            for name, x in sums.items():
                add_from_registers(
                    refs[name].at[self.batch, self.kv_head, tile * COMPUTING + wg, 0], x
                )
        else:
            room, rows = (
                {"dk": refs.k_s, "dv": refs.v_s},
                pl.ds(tile * ROWS + wg * WARPGROUP, WARPGROUP),
            )
            sums = Refs(sums | {"dk": sums.dk * self.spec.scale})
            for name, x in sums.items():
                room[name].at[wg][...] = x.astype(refs[name].dtype)
            plgpu.commit_smem()
            for name in sums:
                plgpu.copy_smem_to_gmem(
                    room[name].at[wg], refs[name].at[self.batch, rows, self.kv_head]
                )
        plgpu.wait_smem_to_gmem(0)
