"""Estimates of the share of a GPU's streaming multiprocessors (SMs) that a kernel keeps at work.

They are made from the number of the kernel's blocks (CTAs) and their lengths. One block of an
attention kernel fills an SM's registers, so the SMs take the blocks one by one, in the order of the
grid. The GPU is idle in part where there are fewer blocks than SMs, and at the end, when only the
last blocks run. Under a causal mask the tiles of a head differ in length, and the long ones should
not be last: a section of heads, as many as the L2 cache holds the operands of, goes through its
tiles together, the longest first (the order of FlashAttention-3's scheduler for causal masks).

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
"""The efficiency from which on the shorter grid of a backward pass by kv heads is used."""
CACHE = 32 * 2**20
"""Bytes of the L2 cache, of 50 MiB, that the operands of a section may take."""
EXACT = 40_000
"""The most blocks whose schedule is computed one by one. With more of them, the last wave is less
than 1 % of the total."""
BYTES = 2
"""Bytes of a number: operands are of 16 bits."""


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """The work that a grid gives the SMs."""

    blocks: int
    waves: float
    """Blocks for each SM."""
    efficiency: float
    """The share of the SMs' time in which they have work, from 0 to 1."""


def by_query_head(B: int, N: int, K: int, T: int, *, sms: int = SMS) -> bool:
    """Whether a backward pass over tiles of keys should have a block for each query head.

    Otherwise it has one for each kv head. The walks of a group's query heads are then several
    blocks, whose sums are added afterwards, which costs traffic. It pays where a grid of (batch, kv
    heads, tiles of keys) leaves SMs without work: under tensor parallelism one kv head may be all
    that a device has. As many queries as keys and a causal mask are assumed, so that all calls with
    these sizes do the same.
    """
    if N <= K:
        return False
    return of_keys(B, T, T, N, K, split=False, sms=sms).efficiency < ENOUGH


def of_queries(
    B: int, S: int, T: int, N: int, K: int, *, width: int = 256, sms: int = SMS, **band: Any
) -> Occupancy:
    """The occupancy of the forward pass, and of the gradient of queries.

    Their grid has a block for each tile of queries of each head. band: as for `tile_costs`.
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
    """The occupancy of a backward pass over tiles of keys. band: as for `tile_costs`.

    A block visits the queries of all heads of its group or, if split, of one.
    """
    costs = tile_costs(S, T, rows_are_keys=True, **band)
    section = section_of_keys(S, N, K, width, split=split)
    if split:
        return schedule(costs, B * N, section, sms)
    # A block starts and stores once for its group.
    group_costs = tuple(1 + (cost - 1) * (N // K) for cost in costs)
    return schedule(group_costs, B * K, section, sms)


def tile_costs(
    S: int,
    T: int,
    *,
    causal: bool = True,
    window: int | None = None,
    q_offset: int | None = 0,
    rows_are_keys: bool = False,
) -> tuple[int, ...]:
    """The work of each tile of one head, in the order of the grid.

    The unit is a block of 128 columns that is visited; to start and to store counts as one. In the
    grid, a causal tile that visits more comes first.

    Args:
      rows_are_keys: tiles of keys visit queries, instead of tiles of queries keys.
      q_offset: None, if traced, counts as if queries and keys ended together.
    """
    # Imported here, because the kernels of that package import this module.
    from pallas_kernels.attention.hopper.walk import Band, limits

    band = Band.of(causal, window, T - S if q_offset is None else q_offset)
    n_rows = S
    n_columns = T
    if rows_are_keys:
        band = band.transposed
        n_rows = T
        n_columns = S
    first = np.arange(-(-n_rows // ROWS)) * ROWS
    last = np.minimum(first + ROWS, n_rows) - 1
    visited = limits(band, first, last, n_columns, ROWS, pad_is_harmless=rows_are_keys)
    costs = np.broadcast_to(visited.stop - visited.start, first.shape) + 1
    if causal and not rows_are_keys:
        costs = costs[::-1]
    return tuple(int(cost) for cost in costs)


def section_of_queries(T: int, N: int, K: int, width: int) -> int:
    """The number of query heads, a divisor of N, that go through their tiles together.

    They are as many as the cache holds the keys and values of. width: H + V.
    """
    return _section(N, BYTES * T * width * K // N)


def section_of_keys(S: int, N: int, K: int, width: int, *, split: bool) -> int:
    """The number of heads of a grid of tiles of keys that go through their tiles together.

    They are kv heads or, if split, query heads: as many as the cache holds the queries and output
    gradients of. width: H + V.
    """
    if split:
        return _section(N, BYTES * S * width)
    return _section(K, BYTES * S * width * N // K)


def _section(n_heads: int, bytes_per_head: int) -> int:
    divisors = [n for n in range(1, n_heads + 1) if n_heads % n == 0]
    return max(n for n in divisors if n == 1 or n * bytes_per_head <= CACHE)


@functools.lru_cache(maxsize=1024)
def schedule(costs: Sequence[int], times: int, section: int = 1, sms: int = SMS) -> Occupancy:
    """The occupancy of a grid whose blocks are each given to the first SM that is free.

    Args:
      costs: of the tiles of a head, a tuple.
      times: heads in the grid.
      section: heads, a divisor of `times`, that go through their tiles together.
    """
    blocks = len(costs) * times
    work = sum(costs) * times
    waves = blocks / sms
    if not work:
        return Occupancy(blocks, waves, 1.0)
    if blocks > EXACT:
        # At the end, an SM waits for half of the longest block on average.
        return Occupancy(blocks, waves, work / (work + (sms - 1) / 2 * max(costs)))

    busy_until = [0] * sms  # a heap
    for cost in np.repeat(costs, section).tolist() * (times // section):
        heapq.heapreplace(busy_until, busy_until[0] + cost)
    return Occupancy(blocks, waves, work / (sms * max(busy_until)))
