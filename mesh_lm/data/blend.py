"""Blends several prefixes in proportion to weights, in the sample order of Megatron-LM's
`BlendedDataset`.

Sample n is drawn from the member that lags most behind its share: the first one with the largest w
n - c, where c counts its samples so far (at n = 0, w itself). The products and differences are
separate float64 operations, because a fused multiply-add breaks ties differently.

Source: helpers.cpp (`build_blending_indices`), blended_dataset.py and
blended_megatron_dataset_builder.py of Megatron-LM (megatron-core 0.16.1). Legend: K members, N
samples, L blocks computed in parallel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mesh_lm.data.index_cache import Arrays, IndexCache
from mesh_lm.data.rows import SampleOrder, TokenWindows, merged
from mesh_lm.errors import ConfigError

BLOCK = 256
"""Samples per block; the counts are stored once a block."""
_WARM_UP = 64
"""Samples that are drawn before a block to correct its guessed counts."""
_PARALLEL = 2**15
"""Blocks computed at once."""
_SURPLUS = 1.005
"""Factor over a member's share of the blend for which its own order is built."""


def parse(blend: Sequence[str], field: str = "data.blend") -> tuple[list[str], list[float] | None]:
    """Returns prefixes and weights, parsed as Megatron's `--data-path`.

    That is `weight prefix ...`, or prefixes alone: then weights is None.

    field: the field of the config that holds `blend`, for errors.

    Raises:
      ConfigError: only some prefixes have weights, a weight is not positive, or a prefix is given
      twice.
    """
    words = [word.strip() for word in blend]
    shown = f"{field}={' '.join(words)}"
    numbers = [_number(word) for word in words[::2]]
    if len(words) % 2 == 0 and None not in numbers:
        prefixes = words[1::2]
        weights = [number for number in numbers if number is not None]
    elif any(number is not None for number in numbers):
        raise ConfigError(f"{shown}: give prefixes only, or a weight before each prefix")
    else:
        prefixes = words
        weights = None
    for weight in weights or ():
        if not 0 < weight < math.inf:
            raise ConfigError(
                f"{shown}: weight {weight:g} must be a number above 0; leave out a prefix that "
                "should not be used"
            )
    repeated = [prefix for prefix in prefixes if prefixes.count(prefix) > 1]
    if repeated:
        raise ConfigError(
            f"{shown}: {min(repeated)} is given twice; give it once, with the sum of the weights"
        )
    return prefixes, weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def normalized(weights: Sequence[float]) -> list[float]:
    """Returns the weights divided by their sum, as Megatron's `normalize` does."""
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


def shares(weights: Sequence[float], n_samples: int) -> list[int]:
    """Returns the minimum number of samples that each member contributes to n_samples.

    weights: normalized.
    """
    return [math.ceil(n_samples * weight) for weight in weights]


def sizes(weights: Sequence[float] | None, epoch_sizes: Sequence[int], n_samples: int) -> list[int]:
    """Returns the number of samples for which Megatron builds each member's own order.

    Args:
      weights: normalized; None if the config gives none: then one epoch of each member, if that is
        enough.
      epoch_sizes: samples in one epoch of each member.
    """
    if weights is None and len(epoch_sizes) == 1:
        return [n_samples]
    if weights is None:
        if n_samples <= sum(epoch_sizes):
            return list(epoch_sizes)
        weights = normalized(epoch_sizes)
    return [math.ceil(share * _SURPLUS) for share in shares(weights, n_samples)]


class Blend:
    """The sample order of a blend. Thread-safe; holds only memory maps.

    Args:
      members: one order per member.
      weights: normalized.
      size: samples that the run is expected to use; the order grows if a run that skips batches
        reads more.
      ahead: further samples that are prefetched although they may never be used.
      consumed: samples drawn from each member before position `start`.
      start: the first position of this blend.
    """

    def __init__(
        self,
        members: Sequence[SampleOrder],
        weights: Sequence[float],
        size: int,
        *,
        ahead: int = 0,
        consumed: Sequence[int],
        start: int,
        cache: IndexCache,
    ) -> None:
        self.seq_len = members[0].seq_len
        self._members = members
        self._size = max(1, size)
        self._start = start
        self._consumed = np.array(consumed, np.int64)
        self._cache = cache
        self._weights = normalized(weights)  # a second time, as in Megatron
        self._index = self._build(self._size + ahead) if len(members) > 1 else None

    def __len__(self) -> int:
        return self._start + self._size

    def read(self, indices: np.ndarray) -> TokenWindows:
        """Returns the windows at positions int64 [B].

        Raises ConfigError for a token id that the model lacks.
        """
        samples = indices - self._start
        if self._index is None:
            return self._members[0].read(self._consumed[0] + samples)
        index = self._require_size(int(samples.max(initial=-1)) + 1)
        members = index["members"][samples].astype(np.int64)
        in_blocks_before = index["counts"][samples // BLOCK, members]
        positions = self._consumed[members] + in_blocks_before + index["ranks"][samples]
        return merged(members, lambda i, rows: self._members[i].read(positions[rows]))

    def consumed(self, position: int) -> list[int]:
        """Returns the samples that the run has drawn from each member before this position."""
        n = position - self._start
        if self._index is None:
            return [int(self._consumed[0]) + n]
        index = self._require_size(n)
        block = n // BLOCK
        in_block = np.bincount(index["members"][block * BLOCK : n], minlength=len(self._members))
        return (self._consumed + index["counts"][block] + in_block).tolist()

    def _build(self, size: int) -> Arrays:
        key = {"weights": self._weights, "size": size}
        weights = np.array(self._weights)
        return self._cache.get("blend", key, lambda: blend_index(weights, size), size=size)

    def _require_size(self, n: int) -> Arrays:
        """Returns the index, extended to at least n samples; a longer index starts with the shorter
        one.
        """
        index = self._index
        assert index is not None
        size = len(index["members"])
        if size < n:
            index = self._index = self._build(n + size // 8)
        return index


def blend_index(weights: np.ndarray, size: int) -> Arrays:
    """Returns which member each sample comes from, and which of the member's samples it is.

    The order is inherently sequential: each choice depends on all earlier ones. But the counts at
    any position are close to the shares, and a wrong initial guess is corrected within a few steps.
    So blocks are computed in parallel, each from a guess made some steps earlier; a block that did
    not start where the one before it ended is recomputed from there, until all agree. By induction
    the result is exact.

    Returns:
      members int16 [N]; counts int64 [N / BLOCK + 1, K], each member's samples before each block;
      ranks uint16 [N], the member's earlier samples in the same block.
    """
    n_blocks = -(-size // BLOCK)
    members = np.empty((n_blocks, BLOCK), np.int16)
    ranks = np.empty((n_blocks, BLOCK), np.uint16)
    counts = np.zeros((n_blocks + 1, len(weights)))
    for first in range(0, n_blocks, _PARALLEL):
        stop = min(first + _PARALLEL, n_blocks)
        positions = np.arange(first, stop, dtype=np.float64) * BLOCK

        # Guess the counts at the beginning of each block. Those of the first are known.
        warm_up = np.maximum(positions - _WARM_UP, 0)
        begins, _, _ = _draw_blocks(weights, _guess(weights, warm_up), warm_up, _WARM_UP)
        begins[0] = counts[first]

        # Compute all blocks, then those again that did not begin where the previous one ended.
        ends = np.empty_like(begins)
        pending = np.arange(stop - first)
        while len(pending):
            drawn = _draw_blocks(weights, begins[pending], positions[pending], BLOCK)
            ends[pending], members[first + pending], ranks[first + pending] = drawn
            true_begins = np.concatenate((begins[:1], ends[:-1]))
            pending = np.flatnonzero((begins != true_begins).any(axis=1))
            begins[pending] = true_begins[pending]
        counts[first:stop] = begins
        counts[stop] = ends[-1]
    return {
        "members": members.reshape(-1)[:size],
        "counts": counts.astype(np.int64),
        "ranks": ranks.reshape(-1)[:size],
    }


def _guess(weights: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns counts float64 [L, K] close to the shares at each position, rounded by largest
    remainder so that they sum to it.
    """
    shares = weights * positions[:, None]
    counts = np.floor(shares)
    remaining = positions - counts.sum(axis=1)
    remainder_rank = np.argsort(np.argsort(counts - shares, axis=1, kind="stable"), axis=1)
    return counts + (remainder_rank < remaining[:, None])


def _draw_blocks(
    weights: np.ndarray, begins: np.ndarray, positions: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws the next `steps` samples after counts [L, K] at positions [L].

    Returns the counts after them, and their members and ranks, [L, steps].
    """
    counts = begins.copy()
    n = positions.copy()
    lanes = np.arange(len(begins))
    members = np.empty((steps, len(lanes)), np.int16)
    ranks = np.empty((steps, len(lanes)), np.uint16)
    lag = np.empty_like(counts)
    for step in range(steps):
        # Two operations, because a fused multiply-add breaks ties differently.
        np.multiply(weights, np.maximum(n, 1.0)[:, None], out=lag)
        np.subtract(lag, counts, out=lag)
        member = lag.argmax(axis=1)  # the first of the largest
        members[step] = member
        ranks[step] = counts[lanes, member] - begins[lanes, member]
        counts[lanes, member] += 1
        n += 1
    return counts, members.T, ranks.T
