"""The work of the Hopper kernels of a stacked matmul: the tiles of the result, their order, and an estimate of the clocks they take.

A block of threads is persistent: of all tiles, it computes every n-th, where n is the number of blocks. The order of the tiles is one
that the L2 cache likes: tiles that are computed together form a rectangle, so that they read few rows and few columns.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper.spec import SHARED_MEMORY
from pallas_kernels.attention.occupancy import SMS
from pallas_kernels.grouped.plan import ROWS, STAGES, STEP, Plan

BAND = 16
"""Rows of tiles that are computed together. With 132 tiles of 128 x 256 at a time, 16 rows and 8 columns read least: 16 x 128 + 8 x 256."""
COLUMNS = (64, 128, 192, 256)
"""The possible columns of a tile."""
FLOPS, SHARED = 4096, 128
"""For each clock of an SM: FLOPs of bf16 in the tensor cores, bytes of shared memory (see `dev/clocks.py`)."""
FILL, MEETING = 1000, 500
"""Clocks until the first operands arrive, and until a part of a tile has left shared memory for the next one. Assumed, not measured."""


@dataclasses.dataclass(frozen=True)
class AddingPlan(Plan):
    """A plan whose result is added to fp32 numbers: half as many columns are on their way to global memory together."""

    @property
    def stored(self) -> int:
        """Columns of a tile that are on their way to global memory together."""
        return 96 if self.columns == 192 else 64

    @property
    def stages(self) -> int:
        """Steps whose operands fit in shared memory, beside the columns that are being stored."""
        free = SHARED_MEMORY - 4 * ROWS * self.stored
        return min(STAGES, free // (2 * STEP * (ROWS + self.columns)))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a plan may reach on an H100: an estimate from the number of tiles and the rates of an SM's units. Nothing was measured."""

    tiles: int
    clocks: float
    """Clocks from the kernel's start to its end."""
    occupancy: float
    """The share of the SMs' time in which they have a tile, from 0 to 1."""
    tensor: float
    """The share of the time in which the tensor cores work, at most."""


def estimate(plan: Plan, height: int, width: int, depth: int, *, persistent: bool = True) -> Estimate:
    """The estimate for a result [height, width], summed over `depth`. persistent: operands of the next tile are loaded during a tile's end.

    A step takes as long as the tensor cores, or as shared memory, whichever is longer. After the last step of a tile the tensor cores wait
    until the result is stored; without persistent blocks, for the first operands of the next tile, too.
    """
    tiles = -(-height // ROWS) * -(-width // plan.columns)
    waves = -(-tiles // plan.blocks)
    steps, columns = -(-depth // STEP), plan.columns
    tensor = 2 * ROWS * columns * STEP / FLOPS
    # Each of two warpgroups reads its own 64 rows and all columns; both are written once.
    shared = 2 * STEP * ((ROWS + 2 * columns) + (ROWS + columns)) / SHARED
    size = 4 if isinstance(plan, AddingPlan) else 2
    end = 2 * size * ROWS * columns / SHARED + MEETING * (columns // plan.stored)
    each = steps * max(tensor, shared) + end + (0 if persistent else FILL)
    clocks = waves * each + (FILL if persistent else 0)
    return Estimate(tiles, clocks, tiles / (waves * plan.blocks), tiles * steps * tensor / (plan.blocks * clocks))


def plan_for(height: int, width: int, depth: int) -> tuple[Plan, Estimate]:
    """The plan of least estimated time for a result [height, width], summed over `depth`, and its estimate."""
    found = [(plan, estimate(plan, height, width, depth)) for plan in (Plan(columns, SMS) for columns in COLUMNS)]
    return min(found, key=_clocks)


def plan_to_add(height: int, width: int, depth: int) -> tuple[AddingPlan, Estimate]:
    """`plan_for` a result that is added to fp32 numbers."""
    found = [(plan, estimate(plan, height, width, depth)) for plan in (AddingPlan(columns, SMS) for columns in COLUMNS)]
    return min(found, key=_clocks)


def _clocks(pair: tuple[Plan, Estimate]) -> tuple[float, int]:
    return pair[1].clocks, -pair[0].columns


def place(number: Any, down: int, across: int) -> tuple[Any, Any]:
    """(row, column) of a tile, counted in tiles of a result of `down` x `across` of them: band after band, each column by column."""
    number, size = jnp.int32(number), jnp.int32(BAND * across)
    first = lax.div(number, size) * BAND
    tall = jnp.minimum(jnp.int32(down) - first, BAND)
    within = lax.rem(number, size)
    return first + lax.rem(within, tall), lax.div(within, tall)
