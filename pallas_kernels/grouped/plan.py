"""The work of the Hopper kernels of a grouped matmul: the tiles of each group, as a table on the
device, and their sizes.

A block of threads is persistent: of the tiles in the table, it computes every n-th, where n is the
number of blocks. A tile of rows begins at the first token of its group, not at a multiple of its
height in the whole array, so that a group of 128 tokens is one tile wherever it lies. Sizes: T
tokens, E groups.
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
STEP = 64
"""Columns of the contraction in one step: 128 bytes, the widest swizzle."""
STAGES = 8
"""The most steps whose operands are in shared memory together."""
STARTED = 16
"""The time to start and to store a tile, in columns of the result: an estimate, which prefers wide
tiles where both fill the SMs."""
GROUP, STEPS, FIRST, BEGIN, END = range(5)
"""Columns of the table of rows: group, steps of the contraction, the first row of the tile, and the
group's rows in it, begin to end."""
ALIGNED = 8
"""Copies between global and shared memory start on a multiple of this many rows: see
`interpreter.memory.box`."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one kernel. blocks: persistent blocks of threads, one for each SM, some of which may
    find no tile.
    """

    columns: int
    """Columns of a tile of the result."""
    blocks: int = SMS
    height: int = WARPGROUP
    """Rows of a tile for each warpgroup. The tables of this module are for 64."""

    def __post_init__(self) -> None:
        if self.columns not in (64, 128, 192, 256) or self.blocks < 1:
            raise ValueError(
                f"a tile has 64, 128, 192 or 256 columns, and there is a block, not {self.columns} "
                f"and {self.blocks}"
            )
        if self.height * self.columns not in range(1, MOST + 1) or self.height not in (
            WARPGROUP,
            2 * WARPGROUP,
        ):
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
        return min(self.columns, 192 if self.columns == 192 else 128)

    @property
    def stages(self) -> int:
        """Steps whose operands fit in shared memory, beside the columns that are being stored."""
        free = SHARED_MEMORY - self.bytes_stored * ROWS * self.stored
        return min(STAGES, free // (2 * STEP * (self.rows + self.columns)))


def balanced(T: int, E: int) -> tuple[int, ...]:
    """Group sizes as equal as possible: what an estimate takes for sizes that are known on the
    device only.
    """
    return tuple(T // E + (i < T % E) for i in range(E))


def row_costs(sizes: Sequence[int], width: int, columns: int) -> tuple[int, ...]:
    """The work of each tile of the product of rows, in the order of the table, in units of one
    warpgroup's part of a tile.
    """
    halves = [
        min(2, -(-(size - begin) // WARPGROUP)) for size in sizes for begin in range(0, size, ROWS)
    ]
    return tuple(n for n in sorted(halves, reverse=True) for _ in range(-(-width // columns)))


def weight_costs(sizes: Sequence[int], d_in: int, d_out: int, columns: int) -> tuple[int, ...]:
    """The work of each tile of the weights' gradient, in the order of the table, in steps, plus two
    to store it.
    """
    tiles = -(-d_in // ROWS) * -(-d_out // columns)
    return tuple(-(-size // STEP) + 2 for size in sorted(sizes, reverse=True) for _ in range(tiles))


def fills(costs: Sequence[int]) -> Occupancy:
    """How tiles of these costs fill the SMs, where each of `SMS` persistent blocks computes every
    `SMS`-th of them.
    """
    longest = max(sum(costs[block::SMS]) for block in range(SMS))
    return Occupancy(len(costs), len(costs) / SMS, sum(costs) / (SMS * longest) if longest else 1.0)


def plan_of(costs: dict[int, tuple[int, ...]]) -> tuple[Plan, Occupancy]:
    """The plan whose estimated time is least, and how it fills the SMs. costs: of the tiles, by the
    number of columns.
    """
    found = {columns: fills(each) for columns, each in costs.items()}

    def time(columns: int) -> tuple[float, int]:
        return sum(costs[columns]) * (columns + STARTED) / found[columns].efficiency, -columns

    best = min(found, key=time)
    return Plan(best, SMS), found[best]


def plan_rows(sizes: Sequence[int], width: int) -> tuple[Plan, Occupancy]:
    """`plan_of` the product of rows with a result of this width."""
    return plan_of({columns: row_costs(sizes, width, columns) for columns in (64, 128, 192, 256)})


def plan_weights(sizes: Sequence[int], d_in: int, d_out: int) -> tuple[Plan, Occupancy]:
    """`plan_of` the weights' gradient."""
    return plan_of(
        {columns: weight_costs(sizes, d_in, d_out, columns) for columns in (64, 128, 192, 256)}
    )


def row_table(sizes_E: Array | np.ndarray, T: int, steps: int) -> tuple[Array, Array]:
    """(int32 [tiles, 5], int32 [1]): the tiles of rows, see `GROUP`, and how many there are;
    further ones are not valid.

    steps: of the contraction. The tokens after the last group are a group without steps, whose
    result is 0. The first tile of a group starts up to 7 rows before it, on a multiple of
    `ALIGNED`. Tiles with work for both warpgroups come first.
    """
    E = len(sizes_E)
    sizes = jnp.append(
        jnp.asarray(sizes_E, jnp.int32), jnp.int32(T) - jnp.asarray(sizes_E, jnp.int32).sum()
    )
    ends = jnp.cumsum(sizes)
    begins = ends - sizes
    firsts = begins - begins % ALIGNED
    tiles = jnp.where(sizes > 0, (ends - firsts + ROWS - 1) // ROWS, 0)
    after = jnp.cumsum(tiles)
    number = jnp.arange((T + (ALIGNED - 1) * (E + 1)) // ROWS + E + 1, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(after, number, side="right", method="compare_all"), E)
    first = firsts[group] + ROWS * (number - (after - tiles)[group])
    begin, end = jnp.maximum(first, begins[group]), jnp.minimum(first + ROWS, ends[group])
    found = jnp.stack(
        [jnp.minimum(group, E - 1), jnp.where(group < E, steps, 0), first, begin, end], 1
    ).astype(jnp.int32)
    rank = jnp.where(number < after[-1], (end - first <= WARPGROUP).astype(jnp.int32), 2)
    return found[jnp.argsort(rank, stable=True)], after[-1:].astype(jnp.int32)


def group_table(sizes_E: Array | np.ndarray) -> tuple[Array, Array]:
    """(int32 [E, 3], int32 [1]): group, first token and the one after the last, the largest group
    first, and E.
    """
    sizes = jnp.asarray(sizes_E, jnp.int32)
    ends = jnp.cumsum(sizes)
    found = jnp.stack([jnp.arange(len(sizes), dtype=jnp.int32), ends - sizes, ends], 1).astype(
        jnp.int32
    )
    return found[jnp.argsort(-sizes, stable=True)], jnp.full(1, len(sizes), jnp.int32)
