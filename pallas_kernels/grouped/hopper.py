"""Grouped matmul on Hopper: the product of rows and the gradient of the weights.

A product multiplies by a group's matrix or by its transpose.

    loading warpgroup          shared memory           computing warpgroups, 64 rows each
    TMA of a step      ----->  a_s[slot], b_s[slot]    sums += A B, one step in flight
    (ready, free: as in attention's forward pass)
                               out_s           <-----  the tile's sums, part by part
                               out_s  -- TMA -->       the result in global memory

A block of threads is persistent: it goes from tile to tile (see `plan.py`), and the operands of the
next tile are loaded, and the result of the tile before is stored, while the tensor cores work.

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
    expected_rows: int | None = None,
) -> Array:
    """x[t] @ w[group of t] for every token t; with `transpose`, times the transpose of that matrix.

    Args:
      x: [T, K]; T is a multiple of 8 and at least 64, K of 64.
      w: [E, K, N], or with `transpose` [E, N, K], in x's type of 16 bits; N is a multiple of 64.
      occupancy: metadata.
      expected_rows: metadata: the tokens that groups have in sum; None: all.

    Returns:
      [T, N], 0 after the last group.
    """
    T, K = x.shape
    N = w.shape[1 if transpose else 2]
    table, n_entries = row_table(sizes_E, T, -(-K // STEP))
    n_column_tiles = -(-N // plan.columns)
    right = (plan.columns, STEP) if transpose else (STEP, plan.columns)
    n_rows = _rows_of_cost(T, expected_rows)

    def body(refs: Refs) -> None:
        _Rows(plan, n_column_tiles, transpose, refs).run()

    return _launch(
        plan,
        body,
        {"x": x, "w": w, "table": table, "n_entries": n_entries},
        jax.ShapeDtypeStruct((T, N), x.dtype),
        right,
        name="grouped_matmul",
        unused_bytes=(T - n_rows) * (K + N) * x.dtype.itemsize,
        flops=2 * n_rows * K * N,
        occupancy=occupancy,
    )


def weights(
    plan: Plan,
    x: Array,
    dy: Array,
    sizes_E: Array,
    *,
    occupancy: float | None = None,
    expected_rows: int | None = None,
) -> Array:
    """[E, D, F]: for each group, the sum over its tokens of the outer products of x and dy.

    It is 0 for an empty group. The numbers of all tokens must be finite: those beside a group are
    multiplied by 0.

    Args:
      x, dy: [T, D] and [T, F], with sizes as in `rows`.
      occupancy, expected_rows: as in `rows`.
    """
    T, D = x.shape
    F = dy.shape[1]
    n_rows = _rows_of_cost(T, expected_rows)
    table, n_entries = group_table(sizes_E)
    n_row_tiles = -(-D // ROWS)
    n_column_tiles = -(-F // plan.columns)

    def body(refs: Refs) -> None:
        _Weights(plan, n_row_tiles, n_column_tiles, refs).run()

    return _launch(
        plan,
        body,
        {"x": x, "dy": dy, "table": table, "n_entries": n_entries},
        jax.ShapeDtypeStruct((len(sizes_E), D, F), x.dtype),
        (STEP, plan.columns),
        name="grouped_matmul_weights",
        unused_bytes=(T - n_rows) * (D + F) * x.dtype.itemsize,
        flops=2 * n_rows * D * F,
        occupancy=occupancy,
    )


def _rows_of_cost(T: int, expected_rows: int | None) -> int:
    """The tokens whose cost a kernel reports."""
    return T if expected_rows is None else min(T, expected_rows)


def _launch(
    plan: Plan,
    body: Callable[[Refs], None],
    inputs: dict[str, Array],
    out: Any,
    right: tuple[int, int],
    *,
    unused_bytes: int,
    **metadata: Any,
) -> Array:
    """The result of a kernel whose step multiplies by a matrix of shape `right`.

    unused_bytes: metadata: of the arrays, what belongs to no expected token.
    """
    array_bytes = sum(array.size * array.dtype.itemsize for array in (*inputs.values(), out))
    metadata["moved"] = array_bytes - unused_bytes
    scratch = buffers(plan, (WARPGROUP, STEP), right, out.dtype, out.dtype)
    grid = (plan.blocks, 1, 1)
    return launch(body, inputs, {"out": out}, scratch, grid=grid, section=1, **metadata).out


def buffers(
    plan: Plan, left: tuple[int, int], right: tuple[int, int], operands: Any, stored: Any
) -> dict[str, Any]:
    """The shared memory and barriers of a `Product`.

    Its step multiplies a_s, a matrix of shape `left` for each warpgroup, with b_s, one of `right`.

    operands, stored: the dtypes of the factors and of the result.
    """
    return {
        "a_s": matrix(*left, operands, (plan.stages, COMPUTING)),
        "b_s": matrix(*right, operands, (plan.stages,)),
        "out_s": matrix(WARPGROUP, plan.stored, stored, (COMPUTING,)),
        # a_s of each warpgroup, and b_s
        "ready": plgpu.Barrier(num_arrivals=COMPUTING + 1, num_barriers=plan.stages),
        "free": plgpu.Barrier(num_arrivals=COMPUTING, num_barriers=plan.stages),
    }


class Tile(NamedTuple):
    """One tile of the result."""

    group: Any
    """The group, or the row of a stack, whose matrix is used."""
    steps: Any
    """Steps of the contraction."""
    column: Any
    """The first column of the result."""
    entry: Any = None
    """The tile's row of the table, if there is one."""
    row: Any = None
    """The first row of the result, unless the table has it."""
    tokens: tuple[Any, Any] = (None, None)
    """The first token of the contraction and the one after the last, unless the table has rows."""


class Product:
    """The tiles of one block of threads.

    A subclass defines the tiles, and how their operands are loaded and their results stored.
    """

    reduction: Literal["add"] | None = None
    """The operation that combines a tile with the old numbers; None: it overwrites them."""

    def __init__(self, plan: Plan, refs: Refs) -> None:
        self.plan = plan
        self.refs = refs
        self.ring = Ring(refs.ready, refs.free, plan.stages)

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
        """The rows of a warpgroup; not positive: it has nothing to compute."""
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
        """Calls visit(tile, number of steps of all earlier tiles) for each tile of this block."""
        block = block_position()[0]
        n_blocks = self.plan.blocks

        def visit_tile(i: Any, turn: Any) -> Any:
            tile = self.tile(block + i * n_blocks)
            visit(tile, turn)
            return turn + tile.steps

        n_tiles = lax.div(self.tiles() - block + (n_blocks - 1), jnp.int32(n_blocks))
        lax.fori_loop(0, n_tiles, visit_tile, jnp.int32(0))

    def fetch(self) -> None:
        """Loads the operands, a few steps ahead, of the next tile too."""
        plgpu.set_max_registers(REGISTERS.load, action="decrease")

        def visit(tile: Tile, turn: Any) -> None:
            pl.loop(0, tile.steps)(lambda step: self.load(tile, step, turn + step))

        self.sweep(visit)

    def compute(self, wg: Any) -> None:
        """Multiplies and stores the rows of this warpgroup."""
        plgpu.set_max_registers(REGISTERS.compute, action="increase")

        def visit(tile: Tile, turn: Any) -> None:
            busy = self.height(tile, wg) > 0
            pl.when(busy)(lambda: self.store(tile, wg, self.multiply(tile, wg, turn)))
            pl.when(jnp.logical_not(busy))(lambda: self.skip(tile, turn))

        self.sweep(visit)
        # The block's shared memory must last until it is copied.
        plgpu.wait_smem_to_gmem(0)

    def skip(self, tile: Tile, turn: Any) -> None:
        """Gives the slots of a tile back unused."""

        @pl.loop(0, tile.steps)
        def _(step: Any) -> None:
            self.ring.take(turn + step)
            self.ring.give(turn + step)

    def multiply(self, tile: Tile, wg: Any, turn: Any) -> Array:
        """The sums of a warpgroup, fp32 [height, columns].

        One step is in flight while the next one is issued.
        """

        def sums(acc: Any) -> Array:
            @pl.loop(0, tile.steps)
            def _(step: Any) -> None:
                slot = self.ring.take(turn + step)
                plgpu.wgmma(acc, *self.operands(tile, step, slot, opaque(wg)))
                # The product of the step before is done, and its slot is free.
                plgpu.wgmma_wait(1)
                pl.when(step > 0)(lambda: self.ring.give(turn + step - 1))

            result = plgpu.wgmma_accumulator_load(acc, wait_n=0)
            pl.when(tile.steps > 0)(lambda: self.ring.give(turn + tile.steps - 1))
            return result

        return pl.run_scoped(sums, accumulator(self.plan.columns, self.plan.height))

    def put(self, wg: Any, sums: Array, target: Callable[[int, int], Any]) -> None:
        """Starts to store all rows of a warpgroup, part by part.

        target: a function from the first row and column of a part in `sums` to its place in global
        memory.
        """
        out_s = self.refs.out_s.at[wg]
        wide = self.plan.stored
        rows = range(0, self.plan.height, WARPGROUP)
        columns = range(0, self.plan.columns, wide)
        for row, column in itertools.product(rows, columns):
            part = lax.slice(sums, (row, column), (row + WARPGROUP, column + wide))
            part = part.astype(self.refs.out.dtype)
            # The copy of the last part must have read the buffer.
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            out_s[...] = part
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s, target(row, column), reduction_op=self.reduction)

    def fill(self, turn: Any, left: list[Any], right: Any) -> None:
        """Loads the left operands, one for each warpgroup, and the right one into a turn's slot."""
        a_s = self.refs.a_s
        b_s = self.refs.b_s
        copies = [(source, lambda slot, i=i: a_s.at[slot, i]) for i, source in enumerate(left)]
        self.ring.fill(turn, *copies, (right, lambda slot: b_s.at[slot]))


class _Rows(Product):
    """Tiles of rows of one group.

    The number of a tile is: row of the table * tiles of columns + tile of columns.
    """

    def __init__(self, plan: Plan, n_column_tiles: int, transpose: bool, refs: Refs) -> None:
        super().__init__(plan, refs)
        self.n_column_tiles = n_column_tiles
        self.transpose = transpose

    def tiles(self) -> Any:
        return self.refs.n_entries[0] * self.n_column_tiles

    def tile(self, number: Any) -> Tile:
        table = self.refs.table
        entry = lax.div(number, jnp.int32(self.n_column_tiles))
        column = lax.rem(number, jnp.int32(self.n_column_tiles)) * self.plan.columns
        return Tile(table[entry, GROUP], table[entry, STEPS], column, entry)

    def height(self, tile: Tile, wg: Any) -> Any:
        return self.refs.table[tile.entry, END] - self.first(tile, wg)

    def first(self, tile: Tile, wg: Any) -> Any:
        """The first row of a warpgroup, on a multiple of `ALIGNED`."""
        return self.refs.table[tile.entry, FIRST] + wg * WARPGROUP

    def load(self, tile: Tile, step: Any, turn: Any) -> None:
        refs = self.refs
        inner = pl.ds(step * STEP, STEP)
        outer = pl.ds(tile.column, self.plan.columns)
        first_rows = [self.first(tile, i) for i in range(COMPUTING)]
        if self.transpose:
            w = refs.w.at[tile.group, outer, inner]
        else:
            w = refs.w.at[tile.group, inner, outer]
        self.fill(turn, [refs.x.at[pl.ds(row, WARPGROUP), inner] for row in first_rows], w)

    def operands(self, tile: Tile, step: Any, slot: Any, wg: Any) -> tuple[Any, Any]:
        b = self.refs.b_s.at[slot]
        return self.refs.a_s.at[slot, wg], transposed(b) if self.transpose else b

    def store(self, tile: Tile, wg: Any, sums: Array) -> None:
        refs = self.refs
        wide = self.plan.stored
        row = self.first(tile, wg)
        begin = refs.table[tile.entry, BEGIN] - row
        end = refs.table[tile.entry, END] - row
        complete = (begin <= 0) & (end >= WARPGROUP)

        def target(_: int, first: int) -> Any:
            return refs.out.at[pl.ds(row, WARPGROUP), pl.ds(tile.column + first, wide)]

        # TMA would overwrite rows of another group.
        pl.when(complete)(lambda: self.put(wg, sums, target))
        pl.when(jnp.logical_not(complete))(
            lambda: store_rows(refs.out, sums.astype(refs.out.dtype), row, begin, end, tile.column)
        )


class _Weights(Product):
    """Tiles of a group's gradient.

    The number of a tile is: (row of the table * tiles of rows + tile of rows) * tiles of columns +
    tile of columns. A step is 64 tokens, the first of which is on a multiple of `ALIGNED`. In the
    first and the last step, tokens of other groups are set to 0 in one of the operands.
    """

    def __init__(self, plan: Plan, n_row_tiles: int, n_column_tiles: int, refs: Refs) -> None:
        super().__init__(plan, refs)
        self.n_row_tiles = n_row_tiles
        self.n_column_tiles = n_column_tiles

    def tiles(self) -> Any:
        return self.refs.n_entries[0] * (self.n_row_tiles * self.n_column_tiles)

    def tile(self, number: Any) -> Tile:
        entry = lax.div(number, jnp.int32(self.n_row_tiles * self.n_column_tiles))
        column = lax.rem(number, jnp.int32(self.n_column_tiles)) * self.plan.columns
        row_tile = lax.div(number, jnp.int32(self.n_column_tiles))
        row = lax.rem(row_tile, jnp.int32(self.n_row_tiles)) * ROWS
        group, begin, stop = (self.refs.table[entry, i] for i in range(3))
        tile = Tile(group, 0, column, entry, row, (begin, stop))
        steps = lax.div(stop - self.first(tile) + (STEP - 1), jnp.int32(STEP))
        return tile._replace(steps=jnp.where(begin < stop, steps, 0))

    def first(self, tile: Tile) -> Any:
        """The first token that is loaded, up to 7 before those of the group."""
        begin, _ = tile.tokens
        return begin - lax.rem(begin, jnp.int32(ALIGNED))

    def height(self, tile: Tile, wg: Any) -> Any:
        return self.refs.out.shape[1] - (tile.row + wg * WARPGROUP)

    def load(self, tile: Tile, step: Any, turn: Any) -> None:
        refs = self.refs
        tokens = pl.ds(self.first(tile) + step * STEP, STEP)
        first_rows = [tile.row + i * WARPGROUP for i in range(COMPUTING)]
        self.fill(
            turn,
            [refs.x.at[tokens, pl.ds(row, WARPGROUP)] for row in first_rows],
            refs.dy.at[tokens, pl.ds(tile.column, self.plan.columns)],
        )

    def operands(self, tile: Tile, step: Any, slot: Any, wg: Any) -> tuple[Any, Any]:
        a_s = self.refs.a_s.at[slot, wg]
        begin, stop = (token - self.first(tile) - step * STEP for token in tile.tokens)

        @pl.when((begin > 0) | (stop < STEP))
        def _() -> None:
            row_layout = plgpu.Layout.WGMMA.reduce(1)
            token = spread(
                plgpu.broadcasted_iota(jnp.int32, (STEP,), 0, layout=row_layout), (STEP, WARPGROUP)
            )
            x = compat.load(a_s, layout=plgpu.Layout.WGMMA)
            a_s[...] = jnp.where((token >= begin) & (token < stop), x, jnp.zeros((), x.dtype))
            # The tensor cores must see the stores of all threads.
            plgpu.commit_smem()

        return transposed(a_s), self.refs.b_s.at[slot]

    def store(self, tile: Tile, wg: Any, sums: Array) -> None:
        rows = pl.ds(tile.row + wg * WARPGROUP, WARPGROUP)
        wide = self.plan.stored

        def target(_: int, first: int) -> Any:
            return self.refs.out.at[tile.group, rows, pl.ds(tile.column + first, wide)]

        self.put(wg, sums, target)
