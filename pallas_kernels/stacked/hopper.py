"""Stacked matmul on Hopper in Pallas Mosaic GPU: a product with one matrix of a stack, and a
product that is added to one.

The kernels are those of the grouped matmul (`grouped/hopper.py`) with other tiles: one warpgroup
loads by TMA, two multiply 64 or 128 rows each, and blocks of threads are persistent. The row of the
stack is data: the copying unit takes it as a coordinate, so that no matrix is copied out of its
stack. The copying unit adds a tile to fp32 numbers in the L2 cache, too, so that no thread reads
them.

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
    """x [T, K] @ weights[row] for weights [R, K, N]; with `transpose`, x [T, N] times the transpose
    of that matrix.

    Both have one type of 16 bits, and the result has it too. T is a multiple of 8 and at least 64,
    K and N are multiples of 64. row: int32 []; one outside of the stack counts as the nearest one.
    occupancy: metadata.
    """
    (T, depth), (_, K, N), size = x.shape, weights.shape, x.dtype.itemsize
    width = K if transpose else N

    def body(refs: Refs) -> None:
        _Read(plan, T, width, depth, refs, transpose).run()

    right = (plan.columns, STEP) if transpose else (STEP, plan.columns)
    return launch(
        body, {"x": x, "w": weights, "row": row.reshape(1)},
        {"out": jax.ShapeDtypeStruct((T, width), x.dtype)},
        buffers(plan, (plan.height, STEP), right, x.dtype, x.dtype), grid=(plan.blocks, 1, 1),
        section=1, name="stacked_matmul",
        flops=2 * T * K * N, occupancy=occupancy, moved=size * (T * (K + N) + K * N) + 4,
    ).out  # fmt: skip


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
    """`sums`, fp32 [R, K, N], with x^T dy added to its row in place, for x [T, K] and dy [T, N].

    Sizes, types and row are as in `product`. rounded: each sum over the tokens is rounded to x's
    type before it is added. Each number is added to once, so that the result is the same in each
    run.
    """
    (T, K), N, size = x.shape, dy.shape[1], x.dtype.itemsize

    def body(refs: Refs) -> None:
        _Add(plan, K, N, T, refs, rounded).run()

    scratch = buffers(plan, (STEP, plan.height), (STEP, plan.columns), x.dtype, jnp.float32)
    return launch_adding(
        body, {"x": x, "dy": dy, "row": row.reshape(1)}, {"out": sums}, {}, scratch,
        grid=(plan.blocks, 1, 1), section=1,
        name="stacked_matmul_add", flops=2 * T * K * N, occupancy=occupancy,
        moved=size * T * (K + N) + 2 * 4 * K * N + 4,
    ).out  # fmt: skip


class _Stacked(Product):
    """Tiles of one matrix of a stack, in the order of `place`. What lies beyond its edges is loaded
    as 0, and not stored.
    """

    def __init__(self, plan: Plan, height: int, width: int, depth: int, refs: Refs) -> None:
        super().__init__(plan, refs)
        self.rows, self.steps = height, -(-depth // STEP)
        self.down, self.across = -(-height // plan.rows), -(-width // plan.columns)

    def tiles(self) -> Any:
        return self.down * self.across

    def tile(self, number: Any) -> Tile:
        row, column = place(number, self.down, self.across, self.plan.rows)
        return Tile(
            self.row_of(),
            jnp.int32(self.steps),
            column * self.plan.columns,
            row=row * self.plan.rows,
        )

    def row_of(self) -> Any:
        """The row of the stack."""
        stack = self.refs.w if self.refs.get("w") is not None else self.refs.out
        return jnp.clip(self.refs.row[0], 0, stack.shape[0] - 1)

    def height(self, tile: Tile, wg: Any) -> Any:
        return self.rows - (tile.row + wg * self.plan.height)

    def parts(self, tile: Tile) -> list[Any]:
        """The rows of a tile for each warpgroup."""
        return [pl.ds(tile.row + i * self.plan.height, self.plan.height) for i in range(COMPUTING)]

    def part(self, tile: Tile, wg: Any, row: int, column: int) -> tuple[Any, Any]:
        """The rows and columns of the result that a part of a warpgroup's sums has, by its first
        row and column in them.
        """
        return pl.ds(tile.row + wg * self.plan.height + row, WARPGROUP), pl.ds(
            tile.column + column, self.plan.stored
        )

    def fill(self, turn: Any, lefts: list[Any], right: Any) -> None:
        """Loads the left operand of each warpgroup and the right one of both into the slot of a
        turn.
        """
        a_s, b_s = self.refs.a_s, self.refs.b_s
        copies = [(left, lambda slot, i=i: a_s.at[slot, i]) for i, left in enumerate(lefts)]
        self.ring.fill(turn, *copies, (right, lambda slot: b_s.at[slot]))


class _Read(_Stacked):
    """Tiles of x times a matrix of the stack, or its transpose."""

    def __init__(
        self, plan: Plan, height: int, width: int, depth: int, refs: Refs, transpose: bool
    ) -> None:
        super().__init__(plan, height, width, depth, refs)
        self.transpose = transpose

    def load(self, tile: Tile, step: Any, turn: Any) -> None:
        refs, inner, outer = (
            self.refs,
            pl.ds(step * STEP, STEP),
            pl.ds(tile.column, self.plan.columns),
        )
        w = refs.w.at[(tile.group, outer, inner) if self.transpose else (tile.group, inner, outer)]
        self.fill(turn, [refs.x.at[rows, inner] for rows in self.parts(tile)], w)

    def operands(self, tile: Tile, step: Any, slot: Any, wg: Any) -> tuple[Any, Any]:
        b = self.refs.b_s.at[slot]
        return self.refs.a_s.at[slot, wg], transposed(b) if self.transpose else b

    def store(self, tile: Tile, wg: Any, sums: Array) -> None:
        self.put(wg, sums, lambda row, column: self.refs.out.at[self.part(tile, wg, row, column)])


class _Add(_Stacked):
    """Tiles of x^T dy, which are added to a matrix of the stack. A step is 64 tokens."""

    reduction = "add"

    def __init__(
        self, plan: Plan, height: int, width: int, depth: int, refs: Refs, rounded: bool
    ) -> None:
        super().__init__(plan, height, width, depth, refs)
        self.rounded = rounded

    def load(self, tile: Tile, step: Any, turn: Any) -> None:
        refs, tokens = self.refs, pl.ds(step * STEP, STEP)
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
        self.put(
            wg,
            sums,
            lambda row, column: self.refs.out.at[(tile.group, *self.part(tile, wg, row, column))],
        )
