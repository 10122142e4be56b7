"""The tiles of the chunked attention of `xla.py`, and what is visible in each.

The queries of one kv head form one matrix, with the heads of a group stacked, so that grouped-query
attention needs no extra code: each row has its position and its segment.

Shape suffixes: B batch, S query sequence, T key sequence, N heads, K kv heads, G = N/K, X any other
dims, n chunks, R rows of a tile (G x chunk), C keys of a tile.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pallas_kernels.attention.block_mask import BlockMask
from pallas_kernels.attention.problem import AttentionProblem

_PAD_POSITION = 2**30
"""The position of keys that are padding: after every query."""


class Tile(NamedTuple):
    """Query chunk i against the keys start:stop of key chunk j."""

    i: int | Array
    j: int | Array
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class TilePlan:
    """The static part of a call: its features, and the division into chunks."""

    causal: bool
    scale: float
    window: int | None
    softcap: float | None
    q_offset: int | None
    S: int
    T: int
    q_chunk: int
    kv_chunk: int
    unrolled: bool
    """S and T fit one chunk each; then the rows are divided into a few blocks, each with its own
    range of keys."""
    block_mask: BlockMask | None = None
    """Each tile is inside one block of it, and `unrolled` is off."""

    @classmethod
    def of(cls, problem: AttentionProblem, q_chunk: int, kv_chunk: int) -> "TilePlan":
        """The plan for a problem, with chunks of at most these sizes."""
        S = problem.q_shape[1]
        T = problem.k_shape[1]
        mask = problem.block_mask
        unrolled = False
        if mask is not None:
            q_chunk = min(S, _chunk_in_block(mask.size, q_chunk))
            kv_chunk = min(T, _chunk_in_block(mask.size, kv_chunk))
        else:
            unrolled = max(S - q_chunk, T - kv_chunk) <= 0
            if unrolled:
                # Measured on CPU at S = 256: four blocks beat two, and two beat the whole square.
                skips = problem.causal and problem.q_offset is not None
                q_chunk = max(64, -(-S // 4)) if skips else S
                kv_chunk = T
            q_chunk = _even(S, q_chunk)
            kv_chunk = _even(T, kv_chunk)
        return cls(
            causal=problem.causal,
            scale=problem.scale,
            window=problem.window,
            softcap=problem.softcap,
            q_offset=problem.q_offset,
            S=S,
            T=T,
            q_chunk=q_chunk,
            kv_chunk=kv_chunk,
            unrolled=unrolled,
            block_mask=mask,
        )

    @property
    def n_q(self) -> int:
        """Query chunks."""
        return -(-self.S // self.q_chunk)

    @property
    def n_kv(self) -> int:
        """Key chunks."""
        return -(-self.T // self.kv_chunk)

    def visible_keys(self, i: int) -> tuple[int, int]:
        """The keys [start, stop) that query chunk i may see: all if the offset is traced."""
        if self.q_offset is None or not self.causal:
            return 0, self.T
        first = self.q_offset + i * self.q_chunk
        last = self.q_offset + min((i + 1) * self.q_chunk, self.S) - 1
        start = 0 if self.window is None else max(first - self.window + 1, 0)
        return start, min(last + 1, self.T)

    def tiles(self) -> list[Tile]:
        """The tiles in which something is visible, row by row."""
        tiles = []
        for i in range(self.n_q):
            start, stop = self.visible_keys(i)
            if start >= stop:
                continue
            if self.unrolled:
                tiles.append(Tile(i, 0, start, stop))
                continue
            kv_chunks = range(start // self.kv_chunk, -(-stop // self.kv_chunk))
            tiles += [Tile(i, j, 0, self.kv_chunk) for j in kv_chunks]
        if self.block_mask is None:
            return tiles
        visible_to_some_head = self.block_mask.visible.sum(0) > 0
        return [tile for tile in tiles if visible_to_some_head[self.block_of(tile)]]

    def block_of(self, tile: Tile) -> tuple[int | Array, int | Array]:
        """The mask's block of queries and block of keys that contain a tile."""
        size = 1 if self.block_mask is None else self.block_mask.size
        return tile.i * self.q_chunk // size, tile.j * self.kv_chunk // size


def _chunk_in_block(size: int, largest: int) -> int:
    """The largest even part of a mask's block of `size` that is at most the chunk requested."""
    chunks = range(64, size + 1, 64)
    return max(chunk for chunk in chunks if size % chunk == 0 and chunk <= max(64, largest))


def _even(length: int, chunk: int) -> int:
    """The chunk size that divides `length` into as few pieces as `chunk` does, with little padding.

    It is a multiple of 16, for matmuls, unless it is all of `length`.
    """
    n_chunks = -(-length // chunk)
    if n_chunks == 1:
        return length
    return min(chunk, -(-length // (16 * n_chunks)) * 16)


def take(x: Array, i: int | Array) -> Array:
    """x[i], for a static or a traced index."""
    return x[i] if isinstance(i, int) else jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def to_rows(x_BSNX: Array, K: int, chunk: int) -> Array:
    """[B, S, N, ...] to [n, B, K, R, ...], padded with zeros. Keys are the case N = K."""
    B, S, N, *X = x_BSNX.shape
    G = N // K
    n = -(-S // chunk)
    x = jnp.pad(x_BSNX, [(0, 0), (0, n * chunk - S)] + [(0, 0)] * (1 + len(X)))
    x = x.reshape(B, n, chunk, K, G, *X)
    x = jnp.moveaxis(x, (1, 0, 3, 4, 2), (0, 1, 2, 3, 4))  # [n, B, K, G, chunk, ...]
    return x.reshape(n, B, K, G * chunk, *X)


def from_rows(x_nBKRX: Array, S: int, N: int) -> Array:
    """The inverse of `to_rows`."""
    n, B, K, R, *X = x_nBKRX.shape
    G = N // K
    x = x_nBKRX.reshape(n, B, K, G, R // G, *X)
    x = jnp.moveaxis(x, (0, 1, 2, 3, 4), (1, 0, 3, 4, 2))  # [B, n, chunk, K, G, ...]
    return x.reshape(B, -1, N, *X)[:, :S]


class Side(NamedTuple):
    """Positions and segments of the rows, or of the keys, of all chunks or of one chunk."""

    position: Array
    """[n, R], or [R] of one chunk."""
    segment: Array | None
    """[n, B, R], or [B, R] of one chunk."""

    def take(self, i: int | Array, start: int = 0, stop: int | None = None) -> "Side":
        """The positions and segments [start, stop) of chunk i."""
        segment = None if self.segment is None else take(self.segment, i)[..., start:stop]
        return Side(take(self.position, i)[..., start:stop], segment)


def sides(
    plan: TilePlan, G: int, q_segments: Array | None, kv_segments: Array | None, q_offset: Array
) -> tuple[Side, Side]:
    """(rows, keys) of all chunks. `q_offset` is used if the plan has none."""

    def chunked(x: Array, n: int, chunk: int, fill: int) -> Array:
        padding = [(0, 0)] * (x.ndim - 1) + [(0, n * chunk - x.shape[-1])]
        x = jnp.pad(x, padding, constant_values=fill)
        return jnp.moveaxis(x.reshape(*x.shape[:-1], n, chunk), -2, 0)

    def rows(x: Array) -> Array:
        return jnp.concatenate([chunked(x, plan.n_q, plan.q_chunk, 0)] * G, axis=-1)

    def keys(x: Array) -> Array:
        return chunked(x, plan.n_kv, plan.kv_chunk, _PAD_POSITION)

    first = q_offset if plan.q_offset is None else plan.q_offset
    row_positions = rows(first + jnp.arange(plan.S, dtype=jnp.int32))
    key_positions = keys(jnp.arange(plan.T, dtype=jnp.int32))
    if q_segments is None or kv_segments is None:
        return Side(row_positions, None), Side(key_positions, None)
    return Side(row_positions, rows(q_segments)), Side(key_positions, keys(kv_segments))


def visible(plan: TilePlan, tile: Tile, K: int, rows: Side, keys: Side) -> Array | None:
    """Mask of one tile, broadcastable to [B, K, R, C]; None: everything is visible."""
    r = rows.position[:, None]
    c = keys.position
    conditions = []
    if plan.causal:
        # This hides padding keys, too: their position is larger than any query's.
        conditions.append(r >= c)
    elif plan.T % plan.kv_chunk:
        conditions.append(c < plan.T)
    if plan.window is not None:
        conditions.append(r - c < plan.window)
    if rows.segment is not None and keys.segment is not None:
        conditions.append(rows.segment[:, None, :, None] == keys.segment[:, None, None, :])
    if plan.block_mask is not None and len(plan.block_mask.visible) > 1:
        # Some head sees this tile; this masks those that do not.
        heads_N = jnp.asarray(plan.block_mask.visible)[:, *plan.block_of(tile)]
        conditions.append(jnp.repeat(heads_N.reshape(K, -1), plan.q_chunk, axis=1)[..., None])
    return functools.reduce(jnp.logical_and, conditions) if conditions else None
