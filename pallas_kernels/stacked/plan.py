"""The work of the Hopper kernels of a stacked matmul: the tiles of the result, and their order.

It also estimates the clocks they take. A block of threads is persistent: of all tiles, it computes
every n-th, where n is the number of blocks. The order of the tiles suits the L2 cache: tiles that
are computed together form a rectangle, so that they read few rows and few columns.
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
FLOPS = 4096
"""FLOPs of bf16 in the tensor cores, for each clock of an SM (see `dev/clocks.py`)."""
SHARED = 128
"""Bytes of shared memory, for each clock of an SM."""
CACHE = 48
"""Bytes from the L2 cache, for each clock of an SM: at least what the first plan reads while the
tensor cores work, because on an H200 it was not slower than the second, which reads less."""
FILL = 1000
"""Clocks until the first operands arrive. Assumed, not measured."""
_Plan = TypeVar("_Plan", bound=Plan)


@dataclasses.dataclass(frozen=True)
class AddingPlan(Plan):
    """A plan whose result is added to fp32 numbers.

    Half as many columns are on their way to global memory together.
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
    """The rate that a plan may reach on an H100, from its tiles and the rates of an SM's units."""

    tiles: int
    clocks: float
    """Clocks from the kernel's start to its end."""
    occupancy: float
    """The share of the SMs' time in which they have a tile, from 0 to 1."""
    tensor: float
    """The share of the time in which the tensor cores work, at most."""


def plan_for(height: int, width: int, depth: int) -> tuple[Plan, Estimate]:
    """The plan of least estimated time for a result [height, width], summed over `depth`."""
    return _fastest([Plan(columns, SMS, tall) for tall, columns in PLANS], height, width, depth)


def plan_to_add(height: int, width: int, depth: int) -> tuple[AddingPlan, Estimate]:
    """`plan_for` a result that is added to fp32 numbers."""
    plans = [AddingPlan(columns, SMS, tall) for tall, columns in PLANS]
    return _fastest(plans, height, width, depth)


def _fastest(plans: list[_Plan], *sizes: int) -> tuple[_Plan, Estimate]:
    estimates = [(plan, estimate(plan, *sizes)) for plan in plans]
    return min(estimates, key=lambda pair: pair[1].clocks)


def estimate(
    plan: Plan, height: int, width: int, depth: int, *, persistent: bool = True
) -> Estimate:
    """The estimate for a result [height, width], summed over `depth`.

    A step takes as long as the busiest unit. After the last step of a tile the tensor cores wait
    until the result is stored; without persistent blocks, for the first operands of the next tile,
    too.

    persistent: operands of the next tile are loaded during a tile's end.
    """
    n_tiles = -(-height // plan.rows) * -(-width // plan.columns)
    waves = -(-n_tiles // plan.blocks)
    n_steps = -(-depth // STEP)
    # To shared memory and from it.
    store_clocks = 2 * plan.bytes_stored * plan.rows * plan.columns / SHARED
    tile_clocks = n_steps * max(step_clocks(plan).values()) + store_clocks
    if persistent:
        clocks = waves * tile_clocks + FILL
    else:
        clocks = waves * (tile_clocks + FILL)
    tensor_clocks = 2 * height * width * depth / FLOPS
    return Estimate(
        tiles=n_tiles,
        clocks=clocks,
        occupancy=n_tiles / (waves * plan.blocks),
        tensor=tensor_clocks / (plan.blocks * clocks),
    )


def step_clocks(plan: Plan) -> dict[str, float]:
    """The clocks of one step of a tile by the unit that works on it.

    The units are the tensor cores, shared memory and the L2 cache. An instruction of a warpgroup
    reads 64 rows and all columns from shared memory. Both operands are written to it once.
    """
    rows = plan.rows
    columns = plan.columns
    numbers_written = rows + columns
    numbers_read = rows + rows // WARPGROUP * columns
    return {
        "tensor": 2 * rows * columns * STEP / FLOPS,
        "shared": 2 * STEP * (numbers_read + numbers_written) / SHARED,
        "cache": 2 * STEP * numbers_written / CACHE,
    }


def place(number: Any, down: int, across: int, rows: int) -> tuple[Any, Any]:
    """(row, column) of a tile, counted in tiles, of a result of `down` x `across` tiles.

    Tiles are numbered band after band, and each band column by column.

    rows: of a tile.
    """
    band = max(1, BAND // rows)
    number = jnp.int32(number)
    band_size = jnp.int32(band * across)
    first = lax.div(number, band_size) * band
    # The last band may be lower.
    tall = jnp.minimum(jnp.int32(down) - first, band)
    number_in_band = lax.rem(number, band_size)
    return first + lax.rem(number_in_band, tall), lax.div(number_in_band, tall)
