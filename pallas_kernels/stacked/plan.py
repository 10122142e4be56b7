"""The work of the Hopper kernels of a stacked matmul: the tiles of the result, their order, and an
estimate of the clocks they take.

A block of threads is persistent: of all tiles, it computes every n-th, where n is the number of
blocks. The order of the tiles is one that the L2 cache likes: tiles that are computed together form
a rectangle, so that they read few rows and few columns.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention.hopper.spec import WARPGROUP
from pallas_kernels.attention.occupancy import SMS
from pallas_kernels.grouped.plan import STEP, Plan

BAND = 2048
"""Rows of the result that are computed together: 132 tiles of 256 x 192 are 8 rows and 17 columns
of them, 2,048 x 3,264."""
PLANS = ((64, 256), (128, 192), (128, 128), (64, 192), (64, 128), (64, 64))
"""Rows of a warpgroup and columns of the possible plans. Of two that should take equally long, the
first was faster on an H200."""
FLOPS, SHARED, CACHE = 4096, 128, 48
"""For each clock of an SM: FLOPs of bf16 in the tensor cores, bytes of shared memory (see
`dev/clocks.py`), and bytes from the L2 cache: at least what the first plan reads while the tensor
cores work, because on an H200 it was not slower than the second, which reads less."""
FILL = 1000
"""Clocks until the first operands arrive. Assumed, not measured."""
_Plan = TypeVar("_Plan", bound=Plan)


@dataclasses.dataclass(frozen=True)
class AddingPlan(Plan):
    """A plan whose result is added to fp32 numbers: half as many columns are on their way to global
    memory together.
    """

    @property
    def stored(self) -> int:
        """Columns of a tile that are on their way to global memory together."""
        return 96 if self.columns == 192 else 64

    @property
    def bytes_stored(self) -> int:
        """Bytes of a number of the result."""
        return 4


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a plan may reach on an H100: an estimate from the number of tiles and the rates of an
    SM's units.
    """

    tiles: int
    clocks: float
    """Clocks from the kernel's start to its end."""
    occupancy: float
    """The share of the SMs' time in which they have a tile, from 0 to 1."""
    tensor: float
    """The share of the time in which the tensor cores work, at most."""


def step_clocks(plan: Plan) -> dict[str, float]:
    """The clocks of one step of a tile by the unit that works on it: the tensor cores, shared
    memory, the L2 cache.

    An instruction of a warpgroup reads 64 rows and all columns from shared memory. Both operands
    are written to it once.
    """
    rows, columns = plan.rows, plan.columns
    return {
        "tensor": 2 * rows * columns * STEP / FLOPS,
        "shared": 2 * STEP * ((rows + rows // WARPGROUP * columns) + (rows + columns)) / SHARED,
        "cache": 2 * STEP * (rows + columns) / CACHE,
    }


def estimate(
    plan: Plan, height: int, width: int, depth: int, *, persistent: bool = True
) -> Estimate:
    """The estimate for a result [height, width], summed over `depth`. persistent: operands of the
    next tile are loaded during a tile's end.

    A step takes as long as the busiest unit. After the last step of a tile the tensor cores wait
    until the result is stored; without persistent blocks, for the first operands of the next tile,
    too.
    """
    tiles = -(-height // plan.rows) * -(-width // plan.columns)
    waves, steps, units = -(-tiles // plan.blocks), -(-depth // STEP), step_clocks(plan)
    end = 2 * plan.bytes_stored * plan.rows * plan.columns / SHARED
    each = steps * max(units.values()) + end + (0 if persistent else FILL)
    clocks = waves * each + (FILL if persistent else 0)
    useful = 2 * height * width * depth / FLOPS
    return Estimate(tiles, clocks, tiles / (waves * plan.blocks), useful / (plan.blocks * clocks))


def plan_for(height: int, width: int, depth: int) -> tuple[Plan, Estimate]:
    """The plan of least estimated time for a result [height, width], summed over `depth`, and its
    estimate.
    """
    return _least([Plan(columns, SMS, tall) for tall, columns in PLANS], height, width, depth)


def plan_to_add(height: int, width: int, depth: int) -> tuple[AddingPlan, Estimate]:
    """`plan_for` a result that is added to fp32 numbers."""
    return _least([AddingPlan(columns, SMS, tall) for tall, columns in PLANS], height, width, depth)


def _least(plans: list[_Plan], *sizes: int) -> tuple[_Plan, Estimate]:
    return min(((plan, estimate(plan, *sizes)) for plan in plans), key=lambda pair: pair[1].clocks)


def place(number: Any, down: int, across: int, rows: int) -> tuple[Any, Any]:
    """(row, column) of a tile, counted in tiles of a result of `down` x `across` of them: band
    after band, each column by column.

    rows: of a tile.
    """
    band = max(1, BAND // rows)
    number, size = jnp.int32(number), jnp.int32(band * across)
    first = lax.div(number, size) * band
    tall = jnp.minimum(jnp.int32(down) - first, band)
    within = lax.rem(number, size)
    return first + lax.rem(within, tall), lax.div(within, tall)
