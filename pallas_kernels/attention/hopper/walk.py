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
    """Row r sees column c if low <= c - r <= high; None: no limit on that side. Arrays if the
    offset is traced.
    """

    low: int | Array | None
    high: int | Array | None

    @classmethod
    def of(cls, causal: bool, window: int | None, q_offset: int | Array) -> Band:
        """The band of a call, with queries as rows and keys as columns."""
        if not causal:
            return cls(None, None)
        return cls(None if window is None else q_offset - window + 1, q_offset)

    @property
    def transposed(self) -> Band:
        """The same band with rows and columns exchanged."""
        return Band(
            None if self.high is None else -self.high, None if self.low is None else -self.low
        )


class Limits(NamedTuple):
    """Column blocks of one tile of rows: [start, stop) are visited; of these, [full_start,
    full_stop) need no mask.
    """

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any


def limits(
    band: Band, first: Any, last: Any, n_columns: int, block: int, *, pad_is_harmless: bool = False
) -> Limits:
    """The limits of the tile of rows first ... last, in blocks of `block` of n_columns columns.
    Accepts ints, NumPy and traced int32.

    pad_is_harmless: columns beyond n_columns contribute nothing by themselves, so that a block with
    padding needs no mask.
    """
    xp = (
        np
        if all(
            isinstance(x, int | np.integer | np.ndarray | None)
            for x in (first, last, band.low, band.high)
        )
        else jnp
    )
    n_blocks = -(-n_columns // block)
    complete = n_blocks if pad_is_harmless else n_columns // block

    def low(row: Any) -> Any:
        """The first column that `row` sees."""
        return 0 if band.low is None else xp.maximum(row + band.low, 0)

    def high(row: Any) -> Any:
        """One past the last column that `row` sees."""
        return n_columns if band.high is None else xp.maximum(row + band.high + 1, 0)

    def down(x: Any) -> Any:
        return (
            jax.lax.div(x, jnp.asarray(block, x.dtype)) if isinstance(x, jax.Array) else x // block
        )

    stop = xp.minimum(down(high(last) + (block - 1)), n_blocks)
    start = xp.minimum(down(low(first)), stop)
    full_start = xp.minimum(down(low(last) + (block - 1)), stop)
    full_start = xp.maximum(full_start, start)
    # If high is None, only complete blocks count, as n_columns // block does.
    full_stop = complete if band.high is None else xp.minimum(down(high(first)), complete)
    return Limits(start, full_start, xp.maximum(xp.minimum(full_stop, stop), full_start), stop)


class Walk(NamedTuple):
    """The blocks of one tile: `block(step)` for the steps 0 ... n - 1, of which the first n_full
    need no mask.
    """

    n_full: Any
    n: Any
    block: Any

    @classmethod
    def of(cls, limits: Limits) -> Walk:
        """The blocks between these limits, those that need no mask first."""
        n_full, n = limits.full_stop - limits.full_start, limits.stop - limits.start
        before = limits.full_start - limits.start

        def block(step: Any) -> Any:
            masked = step - n_full
            xp = np if isinstance(masked, int | np.integer) else jnp
            edge = xp.where(
                masked < before, limits.start + masked, limits.full_stop + masked - before
            )
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
    **how: bool,
) -> Array:
    """The limits of every tile, int32 [B or 1, tiles, 4], for a traced offset or for segments:
    int32 ids [B, rows], [B, columns].

    Segments may be in any order. If they are sorted, or at least contiguous, no invisible block is
    visited.
    """
    i = jnp.arange(-(-n_rows // tile), dtype=jnp.int32)
    by_tile = limits(
        band, i * tile, jnp.minimum((i + 1) * tile, n_rows) - 1, n_columns, block, **how
    )
    by_tile = Limits(*(jnp.broadcast_to(jnp.asarray(x, jnp.int32), i.shape)[None] for x in by_tile))
    if row_ids is None or column_ids is None:
        return jnp.stack(by_tile, -1)

    def extremes(ids: Array, size: int) -> tuple[Array, Array]:
        ids = jnp.pad(ids, [(0, 0), (0, -ids.shape[1] % size)], mode="edge").reshape(
            ids.shape[0], -1, size
        )
        return ids.min(-1), ids.max(-1)

    (row_min, row_max), (column_min, column_max) = (
        extremes(row_ids, tile),
        extremes(column_ids, block),
    )
    j = jnp.arange(column_min.shape[1], dtype=jnp.int32)

    def between(start: Array, stop: Array) -> Array:
        return (j >= start[..., None]) & (j < stop[..., None])

    meets = (
        (row_min[:, :, None] <= column_max[:, None])
        & (column_min[:, None] <= row_max[:, :, None])
        & between(by_tile.start, by_tile.stop)
    )
    start, stop = _hull(meets)
    same = (
        (row_min == row_max)[:, :, None]
        & (column_min == column_max)[:, None]
        & (row_min[:, :, None] == column_min[:, None])
    )
    full_start, full_stop = _hull(same & between(by_tile.full_start, by_tile.full_stop))
    # If blocks of equal ids are not contiguous, all blocks are masked.
    run = (same & between(full_start, full_stop)).sum(-1) == full_stop - full_start
    full_start, full_stop = (
        jnp.where(run & (full_stop > full_start), x, start) for x in (full_start, full_stop)
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
    **how: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The walks of a static block mask: the number of blocks [heads, tiles, 2] (unmasked, total),
    and their indices [heads, tiles, most].

    visible: bool [heads, rows / size, columns / size], with the kernel's rows and columns; tile and
    block divide size. band: None if the limits are unknown before the run: then every block is
    masked.
    """
    if size % tile or size % block:
        raise ValueError(f"tiles of {tile} x {block} do not divide a mask's blocks of {size}")
    i, j = np.arange(-(-n_rows // tile)), np.arange(-(-n_columns // block))
    seen = visible[:, i[:, None] * tile // size, j * block // size]
    full = np.zeros_like(seen)
    if band is not None:
        by_tile = limits(
            band, i * tile, np.minimum((i + 1) * tile, n_rows) - 1, n_columns, block, **how
        )
        start, full_start, full_stop, stop = (np.broadcast_to(x, i.shape)[:, None] for x in by_tile)
        seen &= (j >= start) & (j < stop)
        full = seen & (j >= full_start) & (j < full_stop)
    # Unmasked blocks first, then the masked ones, then those that are not visited.
    rank = np.where(full, 0, np.where(seen, 1, 2))
    counts = np.stack([full.sum(-1), seen.sum(-1)], -1).astype(np.int32)
    most = max(int(counts[..., 1].max()), 1)
    return counts, np.argsort(rank, axis=-1, kind="stable")[..., :most].astype(np.int32)


def _hull(marked: Array) -> tuple[Array, Array]:
    """(first marked index of the last dimension, one past the last one); (0, 0) if none is
    marked.
    """
    n = marked.shape[-1]
    some = marked.any(-1)
    return jnp.where(some, marked.argmax(-1), 0), jnp.where(
        some, n - marked[..., ::-1].argmax(-1), 0
    )
