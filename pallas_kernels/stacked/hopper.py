"""Stacked matmul on Hopper: a product with one matrix of a stack, and one that is added to one.

The kernels are those of the grouped matmul (`grouped/hopper.py`) with other tiles: one warpgroup
loads by TMA, two multiply 64 or 128 rows each, and blocks of threads are persistent. The row of the
stack is data: TMA takes it as a coordinate, so that no matrix is copied out of its stack. TMA also
adds a tile to fp32 numbers in the L2 cache, so that no thread reads them.

Shape suffixes: R rows of the stack, T tokens, K and N the widths of a matrix.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import Array
from jax import numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention.hopper.addition import launch_adding
from pallas_kernels.attention.hopper.spec import COMPUTING, WARPGROUP, Refs, launch, transposed
from pallas_kernels.grouped.hopper import Product, Tile, buffers
from pallas_kernels.grouped.plan import STEP, Plan
from pallas_kernels.stacked.plan import AddingPlan, place


def product(
    plan: Plan,
    x: Array,
    weights: Array,
    row: Array,
    *,
    transpose: bool,
    occupancy: float | None = None,
) -> Array:
    """x [T, K] @ weights[row]; with `transpose`, x [T, N] times the transpose of that matrix.

    Args:
      x: T is a multiple of 8 and at least 64.
      weights: [R, K, N] in x's type of 16 bits; K and N are multiples of 64.
      row: int32 []; one outside of the stack counts as the nearest one.
      occupancy: metadata.

    Returns:
      [T, N], or [T, K], in x's type.
    """
    T, depth = x.shape
    _, K, N = weights.shape
    width = K if transpose else N
    right = (plan.columns, STEP) if transpose else (STEP, plan.columns)

    def body(refs: Refs) -> None:
        _Read(plan, T, width, depth, refs, transpose).run()

    return launch(
        body,
        {"x": x, "w": weights, "row": row.reshape(1)},
        {"out": jax.ShapeDtypeStruct((T, width), x.dtype)},
        buffers(plan, (plan.height, STEP), right, x.dtype, x.dtype),
        grid=(plan.blocks, 1, 1),
        section=1,
        name="stacked_matmul",
        flops=2 * T * K * N,
        occupancy=occupancy,
        # One matrix of the stack, and the row.
        moved=x.dtype.itemsize * (T * (K + N) + K * N) + 4,
    ).out


def add(
    plan: AddingPlan,
    sums: Array,
    row: Array,
    x: Array,
    dy: Array,
    *,
    rounded: bool = False,
    occupancy: float | None = None,
) -> Array:
    """`sums`, fp32 [R, K, N], with x^T dy added to its row in place.

    Each number is added to once, so that the result is the same in each run.

    Args:
      x, dy: [T, K] and [T, N], with sizes and types as in `product`.
      row: as in `product`.
      rounded: each sum over the tokens is rounded to x's type before it is added.
      occupancy: metadata.
    """
    T, K = x.shape
    N = dy.shape[1]

    def body(refs: Refs) -> None:
        _Add(plan, K, N, T, refs, rounded).run()

    return launch_adding(
        body,
        {"x": x, "dy": dy, "row": row.reshape(1)},
        {"out": sums},
        {},
        buffers(plan, (STEP, plan.height), (STEP, plan.columns), x.dtype, jnp.float32),
        grid=(plan.blocks, 1, 1),
        section=1,
        name="stacked_matmul_add",
        flops=2 * T * K * N,
        occupancy=occupancy,
        # One matrix of the stack is read and written; and the row.
        moved=x.dtype.itemsize * T * (K + N) + 2 * 4 * K * N + 4,
    ).out


class _Stacked(Product):
    """Tiles of one matrix of a stack, in the order of `place`.

    Beyond the edges of the matrix, TMA loads 0, and stores nothing.
    """

    def __init__(self, plan: Plan, height: int, width: int, depth: int, refs: Refs) -> None:
        super().__init__(plan, refs)
        self.rows = height
        self.steps = -(-depth // STEP)
        self.down = -(-height // plan.rows)
        self.across = -(-width // plan.columns)

    def tiles(self) -> Any:
        return self.down * self.across

    def tile(self, number: Any) -> Tile:
        row, column = place(number, self.down, self.across, self.plan.rows)
        return Tile(
            group=self.stack_row(),
            steps=jnp.int32(self.steps),
            column=column * self.plan.columns,
            row=row * self.plan.rows,
        )

    def stack_row(self) -> Any:
        """The row of the stack."""
        stack = self.refs.w if self.refs.get("w") is not None else self.refs.out
        return jnp.clip(self.refs.row[0], 0, stack.shape[0] - 1)

    def height(self, tile: Tile, wg: Any) -> Any:
        return self.rows - (tile.row + wg * self.plan.height)

    def parts(self, tile: Tile) -> list[Any]:
        """The rows of a tile for each warpgroup."""
        height = self.plan.height
        return [pl.ds(tile.row + i * height, height) for i in range(COMPUTING)]

    def part(self, tile: Tile, wg: Any, row: int, column: int) -> tuple[Any, Any]:
        """The rows and columns of the result for a part of a warpgroup's sums.

        row, column: the first of the part in the sums.
        """
        rows = pl.ds(tile.row + wg * self.plan.height + row, WARPGROUP)
        columns = pl.ds(tile.column + column, self.plan.stored)
        return rows, columns


class _Read(_Stacked):
    """Tiles of x times a matrix of the stack, or its transpose."""

    def __init__(
        self, plan: Plan, height: int, width: int, depth: int, refs: Refs, transpose: bool
    ) -> None:
        super().__init__(plan, height, width, depth, refs)
        self.transpose = transpose

    def load(self, tile: Tile, step: Any, turn: Any) -> None:
        refs = self.refs
        inner = pl.ds(step * STEP, STEP)
        outer = pl.ds(tile.column, self.plan.columns)
        if self.transpose:
            w = refs.w.at[tile.group, outer, inner]
        else:
            w = refs.w.at[tile.group, inner, outer]
        self.fill(turn, [refs.x.at[rows, inner] for rows in self.parts(tile)], w)

    def operands(self, tile: Tile, step: Any, slot: Any, wg: Any) -> tuple[Any, Any]:
        b = self.refs.b_s.at[slot]
        return self.refs.a_s.at[slot, wg], transposed(b) if self.transpose else b

    def store(self, tile: Tile, wg: Any, sums: Array) -> None:
        def target(row: int, column: int) -> Any:
            return self.refs.out.at[self.part(tile, wg, row, column)]

        self.put(wg, sums, target)


class _Add(_Stacked):
    """Tiles of x^T dy, which are added to a matrix of the stack. A step is 64 tokens."""

    reduction = "add"

    def __init__(
        self, plan: Plan, height: int, width: int, depth: int, refs: Refs, rounded: bool
    ) -> None:
        super().__init__(plan, height, width, depth, refs)
        self.rounded = rounded

    def load(self, tile: Tile, step: Any, turn: Any) -> None:
        refs = self.refs
        tokens = pl.ds(step * STEP, STEP)
        self.fill(
            turn,
            [refs.x.at[tokens, rows] for rows in self.parts(tile)],
            refs.dy.at[tokens, pl.ds(tile.column, self.plan.columns)],
        )

    def operands(self, tile: Tile, step: Any, slot: Any, wg: Any) -> tuple[Any, Any]:
        return transposed(self.refs.a_s.at[slot, wg]), self.refs.b_s.at[slot]

    def store(self, tile: Tile, wg: Any, sums: Array) -> None:
        if self.rounded:
            sums = sums.astype(self.refs.x.dtype).astype(jnp.float32)

        def target(row: int, column: int) -> Any:
            return self.refs.out.at[(tile.group, *self.part(tile, wg, row, column))]

        self.put(wg, sums, target)
