"""The backward pass on Hopper in one kernel of five matmuls.

It follows FlashAttention-3 (arXiv 2407.08608). A block of threads owns 128 keys and visits the
queries that see them, each warpgroup with 64 of the keys. Rows are keys:

    S^T = K Q^T, dP^T = V dO^T          from shared memory
    dV += P^T dO, dK += dS^T Q          P^T and dS^T from registers
    dQ  = dS K                          dS^T of both warpgroups from shared memory, read transposed

The products of a computing warpgroup, in the order of issue, and the work that they hide:

    tensor cores   | S_j | dP_j           | dV_j                       | dQ_j | dK_j     | S_j+1
    arithmetic     |     | P_j = exp2 ... | dS_j; store it; both meet  |      | add dQ_j |

dK of a step is still in flight during S of the next step.

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
from pallas_kernels.attention.hopper.backward_sweep import Ring, masked_logit
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
    block_position,
    kernel_band,
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
    """Returns `dq` [B, S, N, H], `dk` [B, T, K, H] and, if `sums_fit`, `dv` [B, T, K, V].

    They have the types of q, k and v, or fp32 if they are not rounded. Arguments as for `dkv`:
    padded to complete tiles, lse to the base 2, sides with the walks of tiles of keys.
    """
    B, S, N, H = q.shape
    _, T, K, V = v.shape
    blocks = sides.get("blocks")
    heads_differ = blocks is not None and blocks.shape[0] > 1
    # If each query head has its own walk, or if there are too few blocks of threads, dk and dv are
    # summed in global memory, too. That sum is in fp32, which shared memory has no room for: a tile
    # of it is as large as those of K and V together.
    single_head = spec.unrounded or by_query_head(B, N, K, T) or (N > K and heads_differ)
    shape = shape_of(tiles, q, k, v, single_head)
    is_register_ordered = tiles.add == "red"
    key_operands = {"dk": k, "dv": v} if shape.computes_dv else {"dk": k}

    dq_shape = register_order(B, N, S, H, shape.part) if is_register_ordered else (B, S, N, H)
    sums = {"dq": dq_shape}
    out = {}
    for name, x in key_operands.items():
        if single_head:
            sums[name] = register_order(B, K, T, x.shape[3], x.shape[3])
        else:
            out[name] = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def body(refs: Refs) -> None:
        # Each warpgroup computes its own position: shared code would need registers before they are
        # distributed.
        wg = warpgroup()
        pl.when(wg == COMPUTING)(lambda: _Kernel(spec, tiles, shape, N // K, refs).fetch())
        pl.when(wg < COMPUTING)(lambda: _Kernel(spec, tiles, shape, N // K, refs).compute(wg))

    results = launch_adding(
        body,
        {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": delta, **sides},
        sums,
        out,
        scratch_of(spec, tiles, shape, q, k, v),
        name="flash_attention_bwd",
        # S, dK and dQ take H for each pair of query and key, dP and dV take V.
        flops=spec.flops(B, N, 3 * H + (2 if shape.computes_dv else 1) * V),
        occupancy=spec.occupancy(B, N, K, H + V, keys=True, split=single_head),
        grid=(B, N if single_head else K, T // ROWS),
        section=section_of_keys(S, N, K, H + V, split=single_head),
    )
    for name, scale in (("dq", spec.scale), ("dk", spec.scale), ("dv", 1.0)):
        if name not in sums:
            continue
        x = results[name]
        if name != "dq" or is_register_ordered:
            x = from_register_order(x)
        x = x * scale
        results[name] = x if spec.unrounded else x.astype(q.dtype)
    return results


class _Steps(NamedTuple):
    """The blocks of queries that a tile visits."""

    n: Any
    """The number of steps."""
    block: Callable[[Any], Any]
    """A function from a step to the index of its block."""
    mixed: Callable[[Any], Any]
    """A function from a step to whether ids must be compared."""


class _Mask(NamedTuple):
    """A part of a block's mask."""

    needed: Any
    """Whether some element of the block is hidden."""
    hidden: Callable[[], Array]
    """A function that returns which elements are, bool [64, C]."""


class _Kernel:
    """128 keys of one kv head against the queries that see them.

    The queries are of one head or of all heads of the group.
    """

    def __init__(
        self, spec: Spec, tiles: FusedTiles, shape: FusedShape, group: int, refs: Refs
    ) -> None:
        """group: query heads of a kv head."""
        self.spec = spec
        self.tiles = tiles
        self.shape = shape
        self.group = group
        self.refs = refs
        self.batch, self.head, self.tile = block_position()
        if shape.single_head:
            self.first_head = self.head
            self.n_heads = 1
        else:
            self.first_head = self.head * group
            self.n_heads = group
        self.queries = Ring(refs.q_ready, refs.q_free, shape.q_stages)
        self.douts = Ring(refs.dout_ready, refs.dout_free, shape.dout_stages)

    @property
    def kv_head(self) -> Any:
        """Computed again where it is needed, so that it holds no register through the loop."""
        if self.shape.single_head:
            return lax.div(opaque(self.head), jnp.int32(self.group))
        return self.head

    def band(self) -> Band:
        """The band with keys as rows."""
        return kernel_band(self.spec, self.refs).transposed

    def steps(self) -> _Steps:
        """The walk of every head of the group.

        Blocks are in ascending order, so that few numbers stay in registers.
        """
        spec = self.spec
        refs = self.refs
        C = self.shape.block
        tile = self.tile
        if refs.blocks is not None:
            row = self.head if refs.blocks.shape[0] > 1 else 0
            n_full = refs.counts[row, tile, 0]
            n = refs.counts[row, tile, 1]
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
        band = self.band()
        last = jnp.minimum(first + ROWS, spec.T) - 1
        visited = limits(band, first, last, spec.S, C, pad_is_harmless=True)
        n = visited.stop - visited.start
        return _Steps(n, lambda step: visited.start + step, lambda step: False)

    def head_and_step(self, steps: _Steps, turn: Any) -> tuple[Any, Any]:
        """(query head, step) of a turn.

        The loop over the group's heads and their steps is flat, so that products stay in flight
        from one head to the next.
        """
        if self.n_heads == 1:
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
        """Loads the keys and values, then the queries of all heads, a few blocks ahead."""
        plgpu.set_max_registers(REGISTERS.load, action="decrease")
        refs = self.refs
        batch = self.batch
        ready = refs.kv_ready
        C = self.shape.block
        for w in range(COMPUTING):
            rows = pl.ds(self.tile * ROWS + w * WARPGROUP, WARPGROUP)
            plgpu.copy_gmem_to_smem(refs.k.at[batch, rows, self.kv_head], refs.k_s.at[w], ready)
            plgpu.copy_gmem_to_smem(refs.v.at[batch, rows, self.kv_head], refs.v_s.at[w], ready)
        if self.spec.segments:
            k_ids = refs.k_ids.at[batch, pl.ds(self.tile * ROWS, ROWS)]
            plgpu.copy_gmem_to_smem(k_ids, refs.ints_s.at[pl.ds(C, ROWS)], ready)
        self.store_numbers()
        plgpu.barrier_arrive(ready)
        steps = self.steps()

        @pl.loop(0, self.n_heads * steps.n)
        def _(turn: Any) -> None:
            head, step = self.head_and_step(steps, turn)
            rows = pl.ds(steps.block(step) * C, C)
            ids = [(refs.q_ids.at[batch, rows], self.q_ids_s)] if self.spec.segments else []
            lse = (refs.lse.at[batch, head, rows], lambda slot: refs.vectors_s.at[slot])
            self.queries.fill(
                turn, (refs.q.at[batch, rows, head], lambda slot: refs.q_s.at[slot]), lse, *ids
            )
            delta = refs.delta.at[batch, head, rows]
            slot = self.douts.slot(turn)
            delta_ready = self.douts.ready if self.shape.computes_dv else refs.delta_ready
            self.douts.fill(
                turn, (refs.dout.at[batch, rows, head], lambda slot: refs.dout_s.at[slot])
            )
            plgpu.copy_gmem_to_smem(delta, self.delta_s(slot), delta_ready.at[slot])

    def compute(self, wg: Any) -> None:
        """Visits the queries, adds to dQ and stores dK and dV."""
        plgpu.set_max_registers(REGISTERS.compute, action="increase")
        refs = self.refs
        plgpu.barrier_wait(refs.kv_ready)
        widths = {"dk": refs.q.shape[3], "dv": refs.dout.shape[3]}
        names = ("dk", "dv") if self.shape.computes_dv else ("dk",)

        def sum_up(*accs: Any) -> tuple[Array, ...]:
            sums = Refs(zip(names, accs, strict=True))
            steps = self.steps()

            def visit(turn: Any, _: None) -> None:
                self.step(sums, steps, turn, wg)

            lax.fori_loop(0, self.n_heads * steps.n, visit, None)
            return tuple(acc[...] for acc in accs)

        sums = pl.run_scoped(sum_up, *(accumulator(widths[name]) for name in names))
        self.meet()  # until the other warpgroup has read my keys for the last time
        self.store(wg, Refs(zip(names, sums, strict=True)))

    def store_numbers(self) -> None:
        """Stores the numbers of rows and columns, for masks.

        The compiler would hold those of a thread's columns in 16 registers.
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
        refs = self.refs
        wg = opaque(wg)
        slot = self.queries.take(turn)
        head, step = self.head_and_step(steps, turn)

        def gradient(s_ref: Any, dp_ref: Any) -> Array:
            plgpu.wgmma(s_ref, refs.k_s.at[wg], transposed(refs.q_s.at[slot]))
            if self.queries.size > 1:
                # dK of the step before is done, and the registers of its dS^T are free, before dP^T
                # takes its own.
                plgpu.wgmma_wait(1)
                pl.when(turn > 0)(lambda: self.queries.give(turn - 1))
            dout_slot = self.douts.take(turn)
            plgpu.wgmma(dp_ref, refs.v_s.at[wg], transposed(refs.dout_s.at[dout_slot]))
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
            p, p_slope = self.probabilities(s, steps, step, slot, wg)
            if self.shape.computes_dv:
                p = p.astype(refs.dout.dtype)
                plgpu.wgmma(sums.dv, p, refs.dout_s.at[dout_slot])
            else:
                # With delta's own barrier: ptxas would move the exponentials below the wait for
                # dP^T, but not below one that branches.
                p_slope = opaque(p_slope)
                plgpu.barrier_wait(refs.delta_ready.at[dout_slot])
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=int(self.shape.computes_dv))
            dp = dp - spread(vector(self.delta_s(dout_slot), 1), dp.shape, 1)
            if not self.shape.computes_dv:
                self.douts.give(turn)
            return (p_slope.astype(jnp.float32) * dp).astype(refs.q.dtype)

        C = self.shape.block
        ds = pl.run_scoped(gradient, accumulator(C), accumulator(C))
        buffer = lax.rem(turn, jnp.int32(2))
        refs.ds_s.at[buffer, wg][...] = ds
        # The tensor cores must see the stores of all threads of both warpgroups.
        plgpu.commit_smem()
        self.meet()
        block = steps.block(step)
        part = self.multiply(sums, ds, buffer, slot, turn, wg)
        self.add(head, block, wg, part)

    def probabilities(
        self, s: Array, steps: _Steps, step: Any, slot: Any, wg: Any
    ) -> tuple[Array, Array]:
        """(P^T, P^T times the slope of the soft cap), from raw dot products.

        They are in 16 bits if fp32 would take too many registers.
        """
        spec = self.spec
        refs = self.refs
        if spec.softcap is not None:
            s = jnp.tanh(s * spec.capped)
        for mask in self.masks(s.shape, steps, step, slot, wg):
            s = lax.cond(
                mask.needed,
                lambda s, mask=mask: jnp.where(mask.hidden(), masked_logit(spec), s),
                lambda s: s,
                s,
            )
        logits = s * spec.to_log2
        lse = vector(refs.vectors_s.at[slot], 1)
        p = jnp.exp2(logits - spread(lse, s.shape, 1))
        if spec.softcap is not None:
            p_slope = p * (1 - s * s)
            return opaque(p.astype(refs.dout.dtype)), opaque(p_slope.astype(refs.dout.dtype))
        if self.shape.block > WARPGROUP:
            return opaque(p.astype(refs.dout.dtype)), opaque(p.astype(refs.dout.dtype))
        return p, p

    def masks(
        self, shape: tuple[int, ...], steps: _Steps, step: Any, slot: Any, wg: Any
    ) -> list[_Mask]:
        """The masks of a block. One at a time takes fewer registers than all together."""
        spec = self.spec
        C = self.shape.block
        band = self.band()
        row = self.tile * ROWS + wg * WARPGROUP
        # column - row of the band = difference within the tile - shift
        shift = row - steps.block(step) * C
        masks = []

        def number(axis: int) -> Array:
            return vector(self.refs.ints_s.at[pl.ds(0, shape[axis])], axis)

        def difference() -> Array:
            return spread(number(1), shape, 1) - spread(number(0), shape, 0)

        if band.low is not None:
            needed = -shift - (WARPGROUP - 1) < band.low
            masks.append(_Mask(needed, lambda: difference() < band.low + shift))
        if band.high is not None:
            needed = C - 1 - shift > band.high
            masks.append(_Mask(needed, lambda: difference() > band.high + shift))

        if spec.T % ROWS and self._may_see_padding():
            # The probability of a padding key, exp2(-lse), may be infinite, and 0 times that is not
            # 0.
            needed = row + WARPGROUP > spec.T
            masks.append(_Mask(needed, lambda: spread(number(0), shape, 0) >= spec.T - row))
        if spec.segments:

            def differ() -> Array:
                keys = vector(self.k_ids_s(wg), 0)
                queries = vector(self.q_ids_s(slot), 1)
                return spread(keys, shape, 0) != spread(queries, shape, 1)

            masks.append(_Mask(steps.mixed(step), differ))
        return masks

    def _may_see_padding(self) -> bool:
        """Whether the band lets some query see keys beyond the last one."""
        spec = self.spec
        if spec.traced or not spec.causal:
            return True
        last_visible = spec.S - 1 + (spec.q_offset or 0)
        return last_visible >= spec.T

    def multiply(self, sums: Refs, ds: Array, buffer: Any, slot: Any, turn: Any, wg: Any) -> Array:
        """This warpgroup's part of dQ [64, part], of all 128 keys; leaves dK in flight."""
        refs = self.refs
        shape = self.shape

        def product(acc: Any) -> Array:
            for w in range(COMPUTING):
                ds_w = refs.ds_s.at[buffer, w]
                k_w = refs.k_s.at[w]
                if shape.block == WARPGROUP:
                    k_w = k_w.at[:, pl.ds(wg * shape.part, shape.part)]
                else:
                    ds_w = ds_w.at[:, pl.ds(wg * WARPGROUP, WARPGROUP)]
                plgpu.wgmma(acc, transposed(ds_w), k_w)
            plgpu.wgmma(sums.dk, ds, refs.q_s.at[slot])
            dq = plgpu.wgmma_accumulator_load(acc, wait_n=int(self.queries.size > 1))
            if shape.computes_dv:
                self.douts.give(turn)  # dV is done before dQ
            if self.queries.size == 1:
                self.queries.give(turn)
            return dq

        return pl.run_scoped(product, accumulator(shape.part))

    def add(self, head: Any, block: Any, wg: Any, part: Array) -> None:
        """Adds this warpgroup's part to dq: its columns of 64 queries, or its 64 of 128 queries."""
        refs = self.refs
        tiles_per_block = self.shape.block // WARPGROUP
        row_tile = block * tiles_per_block
        if tiles_per_block == 1:
            column_tile = wg
        else:
            row_tile = row_tile + wg
            column_tile = 0
        if self.tiles.add == "red":
            add_from_registers(refs.dq.at[self.batch, head, row_tile, column_tile], part)
            return
        # The copy of the step before must have read its buffer.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.dq_s.at[wg][...] = part
        plgpu.commit_smem()
        columns = pl.ds(column_tile * self.shape.part, self.shape.part)
        rows = pl.ds(row_tile * WARPGROUP, WARPGROUP)
        target = refs.dq.at[self.batch, rows, head, columns]
        plgpu.copy_smem_to_gmem(refs.dq_s.at[wg], target, reduction_op="add")

    def store(self, wg: Any, sums: Refs) -> None:
        """Stores dK and dV through the shared memory of K and V.

        If other blocks of threads have other heads of the group, it adds them instead.
        """
        refs = self.refs
        # computed again, so that it holds no register through the loop
        tile = opaque(self.tile)
        if self.shape.single_head:
            for name, x in sums.items():
                target = refs[name].at[self.batch, self.kv_head, tile * COMPUTING + wg, 0]
                add_from_registers(target, x)
        else:
            staging = {"dk": refs.k_s, "dv": refs.v_s}
            rows = pl.ds(tile * ROWS + wg * WARPGROUP, WARPGROUP)
            sums = Refs(sums | {"dk": sums.dk * self.spec.scale})
            for name, x in sums.items():
                staging[name].at[wg][...] = x.astype(refs[name].dtype)
            # TMA must see the stores of all threads before it copies.
            plgpu.commit_smem()
            for name in sums:
                target = refs[name].at[self.batch, rows, self.kv_head]
                plgpu.copy_smem_to_gmem(staging[name].at[wg], target)
        # The block's shared memory must last until it is copied.
        plgpu.wait_smem_to_gmem(0)
