"""The tiles that a kernel visits, and which of them need a mask.

Attention is a band: query r sees key c if `low <= c - r <= high` (causal: high = q_offset; window:
low = q_offset - window + 1), further restricted by segments or by a static block mask. A kernel
owns a tile of rows and visits blocks of columns: forward and dq own queries and visit keys, dk and
dv own keys and visit queries, for which the band is transposed.

For each tile of rows, the blocks in which everything is visible come first, then those that need a
mask. The order of keys does not matter to a softmax, so a loop without a mask and a loop with one
serve every pattern.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array


@dataclasses.dataclass(frozen=True)
class Band:
    """Row r sees column c if low <= c - r <= high. None: no limit on that side.

    The limits are arrays if the offset is traced.
    """

    low: int | Array | None
    high: int | Array | None

    @classmethod
    def of(cls, causal: bool, window: int | None, q_offset: int | Array) -> Band:
        """The band of a call, with queries as rows and keys as columns."""
        if not causal:
            return cls(None, None)
        low = None if window is None else q_offset - window + 1
        return cls(low, q_offset)

    @property
    def transposed(self) -> Band:
        """The same band with rows and columns exchanged."""
        low = None if self.high is None else -self.high
        high = None if self.low is None else -self.low
        return Band(low, high)


class Limits(NamedTuple):
    """Column blocks of one tile of rows."""

    start: Any
    """The first block that is visited."""
    full_start: Any
    """The first block that needs no mask."""
    full_stop: Any
    """One past the last block that needs no mask."""
    stop: Any
    """One past the last block that is visited."""


def limits(
    band: Band, first: Any, last: Any, n_columns: int, block: int, *, pad_is_harmless: bool = False
) -> Limits:
    """The limits of the tile of rows first ... last, in blocks of `block` of n_columns columns.

    Accepts ints, NumPy and traced int32.

    pad_is_harmless: columns beyond n_columns contribute nothing by themselves, so that a block with
    padding needs no mask.
    """
    static_types = int | np.integer | np.ndarray | None
    is_static = all(isinstance(x, static_types) for x in (first, last, band.low, band.high))
    xp = np if is_static else jnp
    n_blocks = -(-n_columns // block)
    complete = n_blocks if pad_is_harmless else n_columns // block

    def low(row: Any) -> Any:
        """The first column that `row` sees."""
        return 0 if band.low is None else xp.maximum(row + band.low, 0)

    def high(row: Any) -> Any:
        """One past the last column that `row` sees."""
        return n_columns if band.high is None else xp.maximum(row + band.high + 1, 0)

    def block_index(column: Any) -> Any:
        # `lax.div` rounds towards 0, which is down: columns are at least 0.
        if isinstance(column, jax.Array):
            return jax.lax.div(column, jnp.asarray(block, column.dtype))
        return column // block

    stop = xp.minimum(block_index(high(last) + (block - 1)), n_blocks)
    start = xp.minimum(block_index(low(first)), stop)
    # In a full block, the last row sees the first column and the first row sees the last one.
    full_start = xp.minimum(block_index(low(last) + (block - 1)), stop)
    full_start = xp.maximum(full_start, start)
    # If high is None, only complete blocks count, as n_columns // block does.
    full_stop = complete if band.high is None else xp.minimum(block_index(high(first)), complete)
    full_stop = xp.maximum(xp.minimum(full_stop, stop), full_start)
    return Limits(start, full_start, full_stop, stop)


class Walk(NamedTuple):
    """The blocks of one tile, in the order of the steps that visit them."""

    n_full: Any
    """The number of steps without a mask, which come first."""
    n: Any
    """The number of steps."""
    block: Any
    """A function from a step to the index of its block."""

    @classmethod
    def of(cls, limits: Limits) -> Walk:
        """The blocks between these limits, those that need no mask first."""
        n_full = limits.full_stop - limits.full_start
        n = limits.stop - limits.start
        n_left_edge = limits.full_start - limits.start

        def block(step: Any) -> Any:
            edge_step = step - n_full
            xp = np if isinstance(edge_step, int | np.integer) else jnp
            is_left = edge_step < n_left_edge
            left_edge = limits.start + edge_step
            right_edge = limits.full_stop + edge_step - n_left_edge
            edge = xp.where(is_left, left_edge, right_edge)
            return xp.where(step < n_full, limits.full_start + step, edge)

        return cls(n_full, n, block)


def table(
    band: Band,
    n_rows: int,
    n_columns: int,
    tile: int,
    block: int,
    row_ids: Array | None,
    column_ids: Array | None,
    *,
    pad_is_harmless: bool = False,
) -> Array:
    """The limits of every tile, int32 [B or 1, tiles, 4], for a traced offset or for segments.

    Segments may be in any order. If they are sorted, or at least contiguous, no invisible block is
    visited.

    row_ids, column_ids: segments, int32 [B, n_rows] and [B, n_columns]; None without segments.
    """
    i = jnp.arange(-(-n_rows // tile), dtype=jnp.int32)
    first = i * tile
    last = jnp.minimum((i + 1) * tile, n_rows) - 1
    tile_limits = limits(band, first, last, n_columns, block, pad_is_harmless=pad_is_harmless)
    tile_limits = Limits(
        *(jnp.broadcast_to(jnp.asarray(x, jnp.int32), i.shape)[None] for x in tile_limits)
    )
    if row_ids is None or column_ids is None:
        return jnp.stack(tile_limits, -1)

    # [B, tiles] and [B, blocks]
    row_min, row_max = _extremes(row_ids, tile)
    column_min, column_max = _extremes(column_ids, block)
    j = jnp.arange(column_min.shape[1], dtype=jnp.int32)

    def between(start: Array, stop: Array) -> Array:
        return (j >= start[..., None]) & (j < stop[..., None])

    # A tile visits the blocks whose range of ids meets its own, [B, tiles, blocks].
    meets = (
        (row_min[:, :, None] <= column_max[:, None])
        & (column_min[:, None] <= row_max[:, :, None])
        & between(tile_limits.start, tile_limits.stop)
    )
    start, stop = _hull(meets)

    # No mask is needed where a tile and a block have one and the same id.
    same_id = (
        (row_min == row_max)[:, :, None]
        & (column_min == column_max)[:, None]
        & (row_min[:, :, None] == column_min[:, None])
    )
    full_start, full_stop = _hull(same_id & between(tile_limits.full_start, tile_limits.full_stop))
    # If blocks of equal ids are not contiguous, all blocks are masked.
    n_same = (same_id & between(full_start, full_stop)).sum(-1)
    contiguous = n_same == full_stop - full_start
    full_start, full_stop = (
        jnp.where(contiguous & (full_stop > full_start), x, start) for x in (full_start, full_stop)
    )
    return jnp.stack([start, full_start, full_stop, stop], -1).astype(jnp.int32)


def lists(
    visible: np.ndarray,
    size: int,
    band: Band | None,
    n_rows: int,
    n_columns: int,
    tile: int,
    block: int,
    *,
    pad_is_harmless: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The walks of a static block mask.

    Args:
      visible: bool [heads, rows / size, columns / size], with the kernel's rows and columns.
      size: a multiple of tile and of block.
      band: None if the limits are unknown before the run: then every block is masked.

    Returns:
      The number of blocks [heads, tiles, 2] (unmasked, all), and their indices [heads, tiles, most
      blocks of a tile].
    """
    if size % tile or size % block:
        raise ValueError(f"tiles of {tile} x {block} do not divide a mask's blocks of {size}")
    i = np.arange(-(-n_rows // tile))
    j = np.arange(-(-n_columns // block))
    visited = visible[:, i[:, None] * tile // size, j * block // size]
    full = np.zeros_like(visited)
    if band is not None:
        last = np.minimum((i + 1) * tile, n_rows) - 1
        tile_limits = limits(
            band, i * tile, last, n_columns, block, pad_is_harmless=pad_is_harmless
        )
        start, full_start, full_stop, stop = (
            np.broadcast_to(x, i.shape)[:, None] for x in tile_limits
        )
        visited &= (j >= start) & (j < stop)
        full = visited & (j >= full_start) & (j < full_stop)
    # Unmasked blocks first, then the masked ones, then those that are not visited.
    rank = np.where(full, 0, np.where(visited, 1, 2))
    counts = np.stack([full.sum(-1), visited.sum(-1)], -1).astype(np.int32)
    most_blocks = max(int(counts[..., 1].max()), 1)
    order = np.argsort(rank, axis=-1, kind="stable")
    return counts, order[..., :most_blocks].astype(np.int32)


def _extremes(ids: Array, size: int) -> tuple[Array, Array]:
    """(least, largest) id of each `size` neighbours of ids [B, length]."""
    ids = jnp.pad(ids, [(0, 0), (0, -ids.shape[1] % size)], mode="edge")
    ids = ids.reshape(ids.shape[0], -1, size)
    return ids.min(-1), ids.max(-1)


def _hull(marked: Array) -> tuple[Array, Array]:
    """(first marked index of the last dimension, one past the last one); (0, 0) if none is."""
    n = marked.shape[-1]
    any_marked = marked.any(-1)
    first = jnp.where(any_marked, marked.argmax(-1), 0)
    stop = jnp.where(any_marked, n - marked[..., ::-1].argmax(-1), 0)
    return first, stop
