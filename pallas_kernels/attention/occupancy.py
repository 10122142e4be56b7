"""How well a kernel's blocks (CTAs) fill a GPU's streaming multiprocessors (SMs): an estimate from
their number and their lengths.

One block of an attention kernel fills an SM's registers, so the SMs take the blocks one by one, in
the order of the grid. The GPU is idle in part where there are fewer blocks than SMs, and at the
end, when only the last blocks run. Under a causal mask the tiles of a head differ in length, and
the long ones should not be last: a section of heads, as many as the L2 cache holds what they read,
goes through its tiles together, the longest first (the order of FlashAttention-3's scheduler for
causal masks).

Sizes: B batch, S queries, T keys, N heads, K kv heads, H and V widths of the heads of queries and
of values.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

SMS = 132
"""SMs of an H100 SXM and of an H200."""
ROWS = 128
"""Rows of a tile, of queries or of keys, and columns of a block, in which work is counted."""
ENOUGH = 0.9
"""The efficiency with which the shorter grid of a backward by kv heads is good enough."""
CACHE = 32 * 2**20
"""Bytes of the L2 cache, of 50 MiB, that what a section reads may take."""
EXACT = 40_000
"""The most blocks whose schedule is computed one by one. With more of them, the last wave is less
than 1 % of the whole."""


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """How a grid fills the SMs: `efficiency` is the share of the SMs' time in which they have work,
    from 0 to 1.
    """

    blocks: int
    waves: float
    """Blocks for each SM."""
    efficiency: float


def by_query_head(B: int, N: int, K: int, T: int, *, sms: int = SMS) -> bool:
    """Whether a backward that owns tiles of keys should have a block for each query head, instead
    of one for each kv head.

    The walks of a group's query heads are then several blocks, whose sums are added afterwards,
    which costs traffic. It pays where a grid of (batch, kv heads, tiles of keys) leaves SMs without
    work: under tensor parallelism one kv head may be all that a device has. As many queries as keys
    and a causal mask are assumed, so that all calls with these sizes do the same.
    """
    return N > K and of_keys(B, T, T, N, K, split=False, sms=sms).efficiency < ENOUGH


def tile_costs(
    S: int,
    T: int,
    *,
    causal: bool = True,
    window: int | None = None,
    q_offset: int | None = 0,
    by_key: bool = False,
) -> tuple[int, ...]:
    """The work of each tile of one head, in blocks of 128 columns that it visits, plus one to start
    and to store.

    In the order of the grid, in which a causal tile that visits more comes first. by_key: tiles of
    keys visit queries, instead of tiles of queries keys. q_offset: None, if traced, counts as if
    queries and keys ended together.
    """
    # here, because the kernels of that package import this module
    from pallas_kernels.attention.hopper.walk import Band, limits

    band = Band.of(causal, window, T - S if q_offset is None else q_offset)
    n_rows, n_columns = (T, S) if by_key else (S, T)
    first = np.arange(-(-n_rows // ROWS)) * ROWS
    found = limits(
        band.transposed if by_key else band,
        first,
        np.minimum(first + ROWS, n_rows) - 1,
        n_columns,
        ROWS,
        pad_is_harmless=by_key,
    )
    visited = np.broadcast_to(found.stop - found.start, first.shape) + 1
    return tuple(int(x) for x in (visited[::-1] if causal and not by_key else visited))


def section_of_queries(T: int, N: int, K: int, width: int) -> int:
    """How many query heads, a divisor of N, go through their tiles together: those whose keys and
    values fit the cache.

    width: H + V; of 16-bit numbers.
    """
    return _section(N, 2 * T * width * K // N)


def section_of_keys(S: int, N: int, K: int, width: int, *, split: bool) -> int:
    """How many heads of a grid of tiles of keys do so: of kv heads or, if split, of query heads,
    whose queries are read.
    """
    return _section(N, 2 * S * width) if split else _section(K, 2 * S * width * N // K)


def _section(heads: int, read: int) -> int:
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * read <= CACHE))


@functools.lru_cache(maxsize=1024)
def schedule(costs: Sequence[int], times: int, section: int = 1, sms: int = SMS) -> Occupancy:
    """The occupancy of a grid of `times` heads with tiles of these costs (a tuple), each given to
    the first SM that is free.

    section: heads, a divisor of `times`, that go through their tiles together.
    """
    blocks, work = len(costs) * times, sum(costs) * times
    if not work:
        return Occupancy(blocks, blocks / sms, 1.0)
    if blocks > EXACT:
        return Occupancy(blocks, blocks / sms, work / (work + (sms - 1) / 2 * max(costs)))
    busy = [0] * sms
    for cost in np.repeat(costs, section).tolist() * (times // section):
        heapq.heapreplace(busy, busy[0] + cost)
    return Occupancy(blocks, blocks / sms, work / (sms * max(busy)))


def of_queries(
    B: int, S: int, T: int, N: int, K: int, *, width: int = 256, sms: int = SMS, **band: Any
) -> Occupancy:
    """The occupancy of the forward pass, and of the gradient of queries: a block for each tile of
    queries of each head.
    """
    return schedule(tile_costs(S, T, **band), B * N, section_of_queries(T, N, K, width), sms)


def of_keys(
    B: int,
    S: int,
    T: int,
    N: int,
    K: int,
    *,
    split: bool,
    width: int = 256,
    sms: int = SMS,
    **band: Any,
) -> Occupancy:
    """The occupancy of a backward that owns tiles of keys: a block visits the queries of all heads
    of its group, or, if split, of one.
    """
    costs, section = (
        tile_costs(S, T, by_key=True, **band),
        section_of_keys(S, N, K, width, split=split),
    )
    if split:
        return schedule(costs, B * N, section, sms)
    return schedule(tuple(1 + (cost - 1) * (N // K) for cost in costs), B * K, section, sms)
