"""Grouped matmul on Hopper in Pallas Mosaic GPU: the product of rows, with a matrix or its
transpose, and the weights' gradient.

One warpgroup loads the operands of a few steps ahead by TMA, two compute 64 rows of a tile each, as
in the forward pass of attention. A block of threads is persistent: it goes from tile to tile (see
`plan.py`), and the operands of the next tile are loaded, and the result of the tile before is
stored, while the tensor cores work.

Shape suffixes: T tokens sorted by group, E groups, D width in, F width out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
from jax import Array, lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import compat
from pallas_kernels.attention.hopper.backward_sweep import Ring
from pallas_kernels.attention.hopper.spec import (
    COMPUTING,
    REGISTERS,
    WARPGROUP,
    Refs,
    accumulator,
    block_position,
    launch,
    matrix,
    opaque,
    spread,
    transposed,
    warpgroup,
)
from pallas_kernels.grouped.partial_store import store_rows
from pallas_kernels.grouped.plan import (
    ALIGNED,
    BEGIN,
    END,
    FIRST,
    GROUP,
    ROWS,
    STEP,
    STEPS,
    Plan,
    group_table,
    row_table,
)


def rows(
    plan: Plan,
    x: Array,
    w: Array,
    sizes_E: Array,
    *,
    transpose: bool,
    occupancy: float | None = None,
) -> Array:
    """x[t] @ w[group of t] for every token t; with `transpose`, times the transpose of that matrix.

    x [T, K] and w [E, K, N], or [E, N, K], have one type of 16 bits; the result is [T, N], and 0
    after the last group. K and N are multiples of 64, T is one of 8 and at least 64. occupancy:
    metadata.
    """
    (T, K), N = x.shape, w.shape[1 if transpose else 2]
    table, count = row_table(sizes_E, T, -(-K // STEP))
    tiles = -(-N // plan.columns)
    own = (plan.columns, STEP) if transpose else (STEP, plan.columns)

    def body(refs: Refs) -> None:
        _Rows(plan, tiles, transpose, refs).run()

    return _launch(
        plan, body, {"x": x, "w": w, "table": table, "count": count},
        jax.ShapeDtypeStruct((T, N), x.dtype), own,
        name="grouped_matmul", flops=2 * T * K * N, occupancy=occupancy,
    )  # fmt: skip


def _launch(
    plan: Plan,
    body: Callable[[Refs], None],
    inputs: dict[str, Array],
    out: Any,
    right: tuple[int, int],
    **about: Any,
) -> Array:
    """The result of a kernel whose step multiplies by a matrix of shape `right`."""
    scratch = buffers(plan, (WARPGROUP, STEP), right, out.dtype, out.dtype)
    return launch(
        body, inputs, {"out": out}, scratch, grid=(plan.blocks, 1, 1), section=1, **about
    ).out


def buffers(
    plan: Plan, left: tuple[int, int], right: tuple[int, int], operands: Any, stored: Any
) -> dict[str, Any]:
    """The shared memory of a `Product` whose step multiplies a_s, a matrix of shape `left` for each
    warpgroup, with b_s, one of `right`.

    operands, stored: the dtypes of the factors and of the result.
    """
    return {
        "a_s": matrix(*left, operands, (plan.stages, COMPUTING)),
        "b_s": matrix(*right, operands, (plan.stages,)),
        "out_s": matrix(WARPGROUP, plan.stored, stored, (COMPUTING,)),
        "here": plgpu.Barrier(num_arrivals=COMPUTING + 1, num_barriers=plan.stages),
        "free": plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=plan.stages),
    }


class Tile(NamedTuple):
    """One tile of the result. steps: of the contraction. column: the first of the result."""

    group: Any
    steps: Any
    column: Any
    entry: Any = None
    """Its row of the table, if there is one."""
    row: Any = None
    """The first of the result, where the table does not say it."""
    tokens: tuple[Any, Any] = (None, None)
    """The first token of the contraction and the one after the last, where the table has no
    rows."""


class Product:
    """The tiles of one block of threads. A subclass says what a tile is, and how it is loaded and
    stored.
    """

    reduction: Literal["add"] | None = None
    """How a tile meets what its place holds; None: it is overwritten."""

    def __init__(self, plan: Plan, refs: Refs) -> None:
        self.plan, self.refs = plan, refs
        self.ring = Ring(refs.here, refs.free, plan.stages)

    def tiles(self) -> Any:
        """The number of all tiles."""
        raise NotImplementedError

    def tile(self, number: Any) -> Tile:
        """The tile of this number."""
        raise NotImplementedError

    def load(self, tile: Tile, step: Any, turn: Any) -> None:
        """Loads the operands of a step into the slot of `turn`."""
        raise NotImplementedError

    def height(self, tile: Tile, wg: Any) -> Any:
        """The rows of a warpgroup; 0: it has nothing to compute."""
        raise NotImplementedError

    def operands(self, tile: Tile, step: Any, slot: Any, wg: Any) -> tuple[Any, Any]:
        """The operands of a step in shared memory."""
        raise NotImplementedError

    def store(self, tile: Tile, wg: Any, sums: Array) -> None:
        """Stores the result of a warpgroup, fp32 [height, columns]."""
        raise NotImplementedError

    def run(self) -> None:
        """The program of each warpgroup."""
        wg = warpgroup()
        pl.when(wg == COMPUTING)(self.fetch)
        pl.when(wg < COMPUTING)(lambda: self.compute(wg))

    def sweep(self, visit: Callable[[Tile, Any], None]) -> None:
        """Calls visit(tile, number of steps of all tiles before) for each tile of this block of
        threads.
        """
        block, blocks = block_position()[0], self.plan.blocks

        def one(i: Any, turn: Any) -> Any:
            tile = self.tile(block + i * blocks)
            visit(tile, turn)
            return turn + tile.steps

        lax.fori_loop(
            0, lax.div(self.tiles() - block + (blocks - 1), jnp.int32(blocks)), one, jnp.int32(0)
        )

    def fetch(self) -> None:
        """Loads the operands, a few steps ahead, of the next tile too."""
        plgpu.set_max_registers(REGISTERS[1], action="decrease")

        def visit(tile: Tile, turn: Any) -> None:
            pl.loop(0, tile.steps)(lambda step: self.load(tile, step, turn + step))

        self.sweep(visit)

    def compute(self, wg: Any) -> None:
        """Multiplies and stores the rows of this warpgroup."""
        plgpu.set_max_registers(REGISTERS[0], action="increase")

        def visit(tile: Tile, turn: Any) -> None:
            busy = self.height(tile, wg) > 0
            pl.when(busy)(lambda: self.store(tile, wg, self.multiply(tile, wg, turn)))
            pl.when(jnp.logical_not(busy))(lambda: self.skip(tile, turn))

        self.sweep(visit)
        plgpu.wait_smem_to_gmem(0)

    def skip(self, tile: Tile, turn: Any) -> None:
        """Gives the slots of a tile back unused."""

        @pl.loop(0, tile.steps)
        def _(step: Any) -> None:
            self.ring.take(turn + step)
            self.ring.give(turn + step)

    def multiply(self, tile: Tile, wg: Any, turn: Any) -> Array:
        """The sums of a warpgroup, fp32 [height, columns]. One step is in flight while the next one
        is issued.
        """

        def sums(acc: Any) -> Array:
            @pl.loop(0, tile.steps)
            def _(step: Any) -> None:
                slot = self.ring.take(turn + step)
                plgpu.wgmma(acc, *self.operands(tile, step, slot, opaque(wg)))
                plgpu.wgmma_wait(1)
                pl.when(step > 0)(lambda: self.ring.give(turn + step - 1))

            total = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            pl.when(tile.steps > 0)(lambda: self.ring.give(turn + tile.steps - 1))
            return total

        return pl.run_scoped(sums, accumulator(self.plan.columns, self.plan.height))

    def put(self, wg: Any, sums: Array, target: Callable[[int, int], Any]) -> None:
        """Starts to store all rows of a warpgroup, part by part. target: the place of a part, from
        its first row and column in `sums`.
        """
        out_s, wide = self.refs.out_s.at[wg], self.plan.stored
        for row, column in itertools.product(
            range(0, self.plan.height, WARPGROUP), range(0, self.plan.columns, wide)
        ):
            part = lax.slice(sums, (row, column), (row + WARPGROUP, column + wide)).astype(
                self.refs.out.dtype
            )
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_s[...] = part
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s, target(row, column), reduction_op=self.reduction)


class _Rows(Product):
    """Tiles of rows of one group: tile number = row of the table * tiles of columns + tile of
    columns.
    """

    def __init__(self, plan: Plan, across: int, transpose: bool, refs: Refs) -> None:
        super().__init__(plan, refs)
        self.across, self.transpose = across, transpose

    def tiles(self) -> Any:
        return self.refs.count[0] * self.across

    def tile(self, number: Any) -> Tile:
        entry = lax.div(number, jnp.int32(self.across))
        column = lax.rem(number, jnp.int32(self.across)) * self.plan.columns
        return Tile(self.refs.table[entry, GROUP], self.refs.table[entry, STEPS], column, entry)

    def height(self, tile: Tile, wg: Any) -> Any:
        return self.refs.table[tile.entry, END] - self.first(tile, wg)

    def first(self, tile: Tile, wg: Any) -> Any:
        """The first row of a warpgroup, on a multiple of `ALIGNED`."""
        return self.refs.table[tile.entry, FIRST] + wg * WARPGROUP

    def load(self, tile: Tile, step: Any, turn: Any) -> None:
        refs, inner, outer = (
            self.refs,
            pl.ds(step * STEP, STEP),
            pl.ds(tile.column, self.plan.columns),
        )
        first = [self.first(tile, i) for i in range(COMPUTING)]
        w = refs.w.at[(tile.group, outer, inner) if self.transpose else (tile.group, inner, outer)]
        self.ring.fill(
            turn,
            *(
                (
                    refs.x.at[pl.ds(first[i], WARPGROUP), inner],
                    lambda slot, i=i: refs.a_s.at[slot, i],
                )
                for i in range(COMPUTING)
            ),
            (w, lambda slot: refs.b_s.at[slot]),
        )

    def operands(self, tile: Tile, step: Any, slot: Any, wg: Any) -> tuple[Any, Any]:
        b = self.refs.b_s.at[slot]
        return self.refs.a_s.at[slot, wg], transposed(b) if self.transpose else b

    def store(self, tile: Tile, wg: Any, sums: Array) -> None:
        refs, wide, row = self.refs, self.plan.stored, self.first(tile, wg)
        begin, end = refs.table[tile.entry, BEGIN] - row, refs.table[tile.entry, END] - row
        whole = (begin <= 0) & (end >= WARPGROUP)

        def target(_: int, first: int) -> Any:
            return refs.out.at[pl.ds(row, WARPGROUP), pl.ds(tile.column + first, wide)]

        pl.when(whole)(lambda: self.put(wg, sums, target))
        pl.when(jnp.logical_not(whole))(
            lambda: store_rows(refs.out, sums.astype(refs.out.dtype), row, begin, end, tile.column)
        )


def weights(
    plan: Plan, x: Array, dy: Array, sizes_E: Array, *, occupancy: float | None = None
) -> Array:
    """[E, D, F]: for each group, the sum over its tokens of the outer products of x [T, D] and dy
    [T, F]; 0 for an empty group.

    T, D and F are as in `rows`. The numbers of all tokens must be finite: those beside a group are
    multiplied by 0.
    """
    (T, D), F, E = x.shape, dy.shape[1], len(sizes_E)
    table, count = group_table(sizes_E)
    down, across = -(-D // ROWS), -(-F // plan.columns)

    def body(refs: Refs) -> None:
        _Weights(plan, down, across, refs).run()

    return _launch(
        plan, body, {"x": x, "dy": dy, "table": table, "count": count},
        jax.ShapeDtypeStruct((E, D, F), x.dtype), (STEP, plan.columns),
        name="grouped_matmul_weights", flops=2 * T * D * F, occupancy=occupancy,
    )  # fmt: skip


class _Weights(Product):
    """Tiles of a group's gradient: tile number = (row of the table * tiles of rows + tile of rows)
    * tiles of columns + tile of columns.

    A step is 64 tokens, the first of which is on a multiple of `ALIGNED`. In the first and the last
    step, those of the groups beside this one are set to 0 in one of the operands.
    """

    def __init__(self, plan: Plan, down: int, across: int, refs: Refs) -> None:
        super().__init__(plan, refs)
        self.down, self.across = down, across

    def tiles(self) -> Any:
        return self.refs.count[0] * (self.down * self.across)

    def tile(self, number: Any) -> Tile:
        entry = lax.div(number, jnp.int32(self.down * self.across))
        column = lax.rem(number, jnp.int32(self.across)) * self.plan.columns
        row = lax.rem(lax.div(number, jnp.int32(self.across)), jnp.int32(self.down)) * ROWS
        group, begin, stop = (self.refs.table[entry, i] for i in range(3))
        tile = Tile(group, 0, column, entry, row, (begin, stop))
        steps = lax.div(stop - self.first(tile) + (STEP - 1), jnp.int32(STEP))
        return tile._replace(steps=jnp.where(begin < stop, steps, 0))

    def first(self, tile: Tile) -> Any:
        """The first token that is loaded, up to 7 before those of the group."""
        return tile.tokens[0] - lax.rem(tile.tokens[0], jnp.int32(ALIGNED))

    def height(self, tile: Tile, wg: Any) -> Any:
        return self.refs.out.shape[1] - (tile.row + wg * WARPGROUP)

    def load(self, tile: Tile, step: Any, turn: Any) -> None:
        refs, tokens = self.refs, pl.ds(self.first(tile) + step * STEP, STEP)
        self.ring.fill(
            turn,
            *(
                (
                    refs.x.at[tokens, pl.ds(tile.row + i * WARPGROUP, WARPGROUP)],
                    lambda slot, i=i: refs.a_s.at[slot, i],
                )
                for i in range(COMPUTING)
            ),
            (
                refs.dy.at[tokens, pl.ds(tile.column, self.plan.columns)],
                lambda slot: refs.b_s.at[slot],
            ),
        )

    def operands(self, tile: Tile, step: Any, slot: Any, wg: Any) -> tuple[Any, Any]:
        a_s = self.refs.a_s.at[slot, wg]
        begin, stop = (token - self.first(tile) - step * STEP for token in tile.tokens)

        @pl.when((begin > 0) | (stop < STEP))
        def _() -> None:
            token = spread(
                plgpu.broadcasted_iota(jnp.int32, (STEP,), 0, layout=plgpu.Layout.WGMMA.reduce(1)),
                (STEP, WARPGROUP),
            )
            x = compat.load(a_s, layout=plgpu.Layout.WGMMA)
            a_s[...] = jnp.where((token >= begin) & (token < stop), x, jnp.zeros((), x.dtype))
            plgpu.commit_smem()

        return transposed(a_s), self.refs.b_s.at[slot]

    def store(self, tile: Tile, wg: Any, sums: Array) -> None:
        rows, wide = pl.ds(tile.row + wg * WARPGROUP, WARPGROUP), self.plan.stored
        self.put(
            wg,
            sums,
            lambda _, first: self.refs.out.at[tile.group, rows, pl.ds(tile.column + first, wide)],
        )
