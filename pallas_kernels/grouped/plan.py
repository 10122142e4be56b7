"""The work of the Hopper kernels of a grouped matmul: the tiles of each group, and their sizes.

The tiles are a table on the device. A block of threads is persistent: of the tiles in the table, it
computes every n-th, where n is the number of blocks. A tile of rows begins at the first token of
its group, not at a multiple of its height in the whole array, so that a group of 128 tokens is one
tile wherever it lies. Sizes: T tokens, E groups.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.attention.hopper.spec import COMPUTING, SHARED_MEMORY, WARPGROUP
from pallas_kernels.attention.occupancy import SMS, Occupancy

ROWS = WARPGROUP * COMPUTING
"""Rows of a tile of the result: 64 for each warpgroup that computes."""
MOST = 128 * 192
"""Sums that the registers of a warpgroup hold: 192 of 240 registers of each thread."""
COLUMNS = (64, 128, 192, 256)
"""Possible columns of a tile of the result."""
STEP = 64
"""Columns of the contraction in one step: 128 bytes, the widest swizzle."""
STAGES = 8
"""The most steps whose operands are in shared memory together."""
STARTED = 16
"""The time to start and to store a tile, in columns of the result: an estimate, which prefers wide
tiles where both fill the SMs."""
GROUP, STEPS, FIRST, BEGIN, END = range(5)
"""Columns of the table of rows: the group, the steps of the contraction, the first row of the tile,
and the group's rows in it, from BEGIN to before END."""
ALIGNED = 8
"""Copies between global and shared memory start on a multiple of this many rows: see
`interpreter.memory.box`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one kernel."""

    columns: int
    """Columns of a tile of the result."""
    blocks: int = SMS
    """Persistent blocks of threads, one for each SM. Some may find no tile."""
    height: int = WARPGROUP
    """Rows of a tile for each warpgroup. The tables of this module are for 64."""

    def __post_init__(self) -> None:
        if self.columns not in COLUMNS or self.blocks < 1:
            raise ValueError(
                f"a tile has 64, 128, 192 or 256 columns, and there is a block, not {self.columns} "
                f"and {self.blocks}"
            )
        has_height = self.height in (WARPGROUP, 2 * WARPGROUP)
        if not has_height or self.height * self.columns > MOST:
            raise ValueError(
                f"a warpgroup has 64 rows, or 128 of up to 192 columns, not {self.height} of "
                f"{self.columns}"
            )

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.height * COMPUTING

    @property
    def bytes_stored(self) -> int:
        """Bytes of a number of the result."""
        return 2

    @property
    def stored(self) -> int:
        """Columns of a tile that are on their way to global memory together."""
        # They divide the columns.
        return 192 if self.columns == 192 else min(self.columns, 128)

    @property
    def stages(self) -> int:
        """Steps whose operands fit in shared memory, beside the columns that are being stored."""
        free_bytes = SHARED_MEMORY - self.bytes_stored * ROWS * self.stored
        step_bytes = 2 * STEP * (self.rows + self.columns)
        return min(STAGES, free_bytes // step_bytes)


def plan_rows(sizes: Sequence[int], width: int) -> tuple[Plan, Occupancy]:
    """`plan_of` the product of rows with a result of this width."""
    return plan_of({columns: row_costs(sizes, width, columns) for columns in COLUMNS})


def plan_weights(sizes: Sequence[int], d_in: int, d_out: int) -> tuple[Plan, Occupancy]:
    """`plan_of` the weights' gradient."""
    return plan_of({columns: weight_costs(sizes, d_in, d_out, columns) for columns in COLUMNS})


def plan_of(costs: dict[int, tuple[int, ...]]) -> tuple[Plan, Occupancy]:
    """The plan whose estimated time is least, and its occupancy.

    costs: of the tiles, by the number of columns.
    """
    occupancies = {columns: fills(tile_costs) for columns, tile_costs in costs.items()}

    def time(columns: int) -> tuple[float, int]:
        work = sum(costs[columns]) * (columns + STARTED)
        return work / occupancies[columns].efficiency, -columns

    best = min(occupancies, key=time)
    return Plan(best, SMS), occupancies[best]


def balanced(T: int, E: int) -> tuple[int, ...]:
    """Group sizes as equal as possible, for estimates: the sizes are known on the device only."""
    return tuple(T // E + (i < T % E) for i in range(E))


def row_costs(sizes: Sequence[int], width: int, columns: int) -> tuple[int, ...]:
    """The work of each tile of the product of rows, in the order of the table.

    The unit is one warpgroup's part of a tile.
    """
    costs = []
    for size in sizes:
        for begin in range(0, size, ROWS):
            n_warpgroups = min(COMPUTING, -(-(size - begin) // WARPGROUP))
            costs += [n_warpgroups] * -(-width // columns)
    return tuple(sorted(costs, reverse=True))


def weight_costs(sizes: Sequence[int], d_in: int, d_out: int, columns: int) -> tuple[int, ...]:
    """The work of each tile of the weights' gradient, in the order of the table.

    The unit is a step; to store a tile counts as two.
    """
    tiles = -(-d_in // ROWS) * -(-d_out // columns)
    costs = []
    for size in sorted(sizes, reverse=True):
        costs += [-(-size // STEP) + 2] * tiles
    return tuple(costs)


def fills(costs: Sequence[int]) -> Occupancy:
    """The occupancy of the SMs by tiles of these costs.

    Each of `SMS` persistent blocks computes every `SMS`-th of them.
    """
    waves = len(costs) / SMS
    longest = max(sum(costs[block::SMS]) for block in range(SMS))
    if not longest:
        return Occupancy(len(costs), waves, 1.0)
    return Occupancy(len(costs), waves, sum(costs) / (SMS * longest))


def row_table(sizes_E: Array | np.ndarray, T: int, steps: int) -> tuple[Array, Array]:
    """(the tiles of rows, int32 [tiles, 5]; their number, int32 [1]). Further rows are not valid.

    The columns are GROUP, STEPS, ... . The tokens after the last group are a group without steps,
    whose result is 0. The first tile of a group starts up to 7 rows before it, on a multiple of
    `ALIGNED`. Tiles with work for both warpgroups come first.

    steps: of the contraction.
    """
    E = len(sizes_E)
    # For each group, and for the tokens after the last one, [E + 1].
    n_ungrouped = jnp.int32(T) - jnp.asarray(sizes_E, jnp.int32).sum()
    sizes = jnp.append(jnp.asarray(sizes_E, jnp.int32), n_ungrouped)
    ends = jnp.cumsum(sizes)
    begins = ends - sizes
    aligned_begins = begins - begins % ALIGNED
    n_tiles = jnp.where(sizes > 0, (ends - aligned_begins + ROWS - 1) // ROWS, 0)
    tile_ends = jnp.cumsum(n_tiles)

    # For each tile: as many as there are with the worst sizes.
    most_tiles = (T + (ALIGNED - 1) * (E + 1)) // ROWS + E + 1
    tile = jnp.arange(most_tiles, dtype=jnp.int32)
    group = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all")
    group = jnp.minimum(group, E)
    first = aligned_begins[group] + ROWS * (tile - (tile_ends - n_tiles)[group])
    begin = jnp.maximum(first, begins[group])
    end = jnp.minimum(first + ROWS, ends[group])
    table_group = jnp.minimum(group, E - 1)
    tile_steps = jnp.where(group < E, steps, 0)
    table = jnp.stack([table_group, tile_steps, first, begin, end], 1).astype(jnp.int32)

    # Tiles for both warpgroups, tiles for one, and those that are not valid.
    valid = tile < tile_ends[-1]
    for_one = (end - first <= WARPGROUP).astype(jnp.int32)
    rank = jnp.where(valid, for_one, 2)
    return table[jnp.argsort(rank, stable=True)], tile_ends[-1:].astype(jnp.int32)


def group_table(sizes_E: Array | np.ndarray) -> tuple[Array, Array]:
    """(int32 [E, 3], int32 [1]): the groups, the largest first, and E.

    The columns are the group, its first token and the one after its last token.
    """
    sizes = jnp.asarray(sizes_E, jnp.int32)
    E = len(sizes)
    ends = jnp.cumsum(sizes)
    table = jnp.stack([jnp.arange(E, dtype=jnp.int32), ends - sizes, ends], 1).astype(jnp.int32)
    return table[jnp.argsort(-sizes, stable=True)], jnp.full(1, E, jnp.int32)
