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
_PARALLEL = 2**15
_SURPLUS = 1.005
"""Factor over a member's share of the blend for which its own order is built."""


def parse(blend: Sequence[str], field: str = "data.blend") -> tuple[list[str], list[float] | None]:
    """Returns prefixes and weights, parsed as Megatron's `--data-path`: `weight prefix ...`, or
    prefixes alone (weights None).

    field: the field of the config that holds `blend`, for errors.

    Raises:
      ConfigError: only some prefixes have weights, a weight is not positive, or a prefix is given
      twice.
    """
    words = [word.strip() for word in blend]
    numbers = [_number(word) for word in words[::2]]
    shown = f"{field}={' '.join(words)}"
    if len(words) % 2 == 0 and None not in numbers:
        prefixes, weights = words[1::2], [number for number in numbers if number is not None]
    elif any(number is not None for number in numbers):
        raise ConfigError(f"{shown}: give prefixes only, or a weight before each prefix")
    else:
        prefixes, weights = words, None
    if bad := [weight for weight in weights or () if not 0 < weight < math.inf]:
        raise ConfigError(
            f"{shown}: weight {bad[0]:g} must be a number above 0; leave out a prefix that should "
            "not be used"
        )
    if twice := {prefix for prefix in prefixes if prefixes.count(prefix) > 1}:
        raise ConfigError(
            f"{shown}: {min(twice)} is given twice; give it once, with the sum of the weights"
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
    """Returns the minimum number of samples that each member contributes to n_samples; weights:
    normalized.
    """
    return [math.ceil(n_samples * weight) for weight in weights]


def sizes(weights: Sequence[float] | None, epoch_sizes: Sequence[int], n_samples: int) -> list[int]:
    """Returns the number of samples for which Megatron builds each member's own order.

    Args:
      weights: normalized; None if the config gives none: then one epoch of each member, if that is
      enough. epoch_sizes: samples in one epoch of each member.
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
      members: one order per member. weights: normalized. size: samples that the run is expected to
      use; the order grows if a run that skips batches reads more. ahead: further samples that are
      prefetched although they may never be used. consumed: samples drawn from each member before
      position `start`. start: the first position of this blend.
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
        self.seq_len, self._members, self._size, self._start = (
            members[0].seq_len,
            members,
            max(1, size),
            start,
        )
        self._consumed, self._cache = np.array(consumed, np.int64), cache
        self._weights = normalized(weights)  # a second time, as in Megatron
        self._index = self._build(self._size + ahead) if len(members) > 1 else None

    def __len__(self) -> int:
        return self._start + self._size

    def read(self, indices: np.ndarray) -> TokenWindows:
        """Returns the windows at positions int64 [B]; raises ConfigError for a token id that the
        model lacks.
        """
        local = indices - self._start
        if self._index is None:
            return self._members[0].read(self._consumed[0] + local)
        index = self._extended_to(int(local.max(initial=-1)) + 1)
        which = index["members"][local].astype(np.int64)
        numbers = (
            self._consumed[which] + index["counts"][local // BLOCK, which] + index["ranks"][local]
        )
        return merged(which, lambda i, rows: self._members[i].read(numbers[rows]))

    def consumed(self, position: int) -> list[int]:
        """Returns the samples drawn from each member before this position, since the start of the
        run.
        """
        n = position - self._start
        if self._index is None:
            return [int(self._consumed[0]) + n]
        index, block = self._extended_to(n), n // BLOCK
        in_block = np.bincount(index["members"][block * BLOCK : n], minlength=len(self._members))
        return (self._consumed + index["counts"][block] + in_block).tolist()

    def _build(self, size: int) -> Arrays:
        return self._cache.get(
            "blend",
            {"weights": self._weights, "size": size},
            lambda: blend_index(np.array(self._weights), size),
            size=size,
        )

    def _extended_to(self, n: int) -> Arrays:
        """Returns the index, extended to at least n samples; a longer index starts with the shorter
        one.
        """
        index = self._index
        assert index is not None
        while (size := len(index["members"])) < n:
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
    members, ranks = np.empty((n_blocks, BLOCK), np.int16), np.empty((n_blocks, BLOCK), np.uint16)
    counts = np.zeros((n_blocks + 1, len(weights)))
    for first in range(0, n_blocks, _PARALLEL):
        stop = min(first + _PARALLEL, n_blocks)
        positions = np.arange(first, stop, dtype=np.float64) * BLOCK
        before = np.maximum(positions - _WARM_UP, 0)
        begins, _, _ = _draw_blocks(weights, _guess(weights, before), before, _WARM_UP)
        begins[0] = counts[first]
        ends, todo = np.empty_like(begins), np.arange(stop - first)
        while len(todo):
            ends[todo], members[first + todo], ranks[first + todo] = _draw_blocks(
                weights, begins[todo], positions[todo], BLOCK
            )
            wanted = np.concatenate((begins[:1], ends[:-1]))
            todo = np.flatnonzero((begins != wanted).any(axis=1))
            begins[todo] = wanted[todo]
        counts[first:stop], counts[stop] = begins, ends[-1]
    return {
        "members": members.reshape(-1)[:size],
        "counts": counts.astype(np.int64),
        "ranks": ranks.reshape(-1)[:size],
    }


def _guess(weights: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns counts float64 [L, K] close to the shares at each position, rounded by largest
    remainder so that they sum to it.
    """
    exact = weights * positions[:, None]
    counts = np.floor(exact)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    return counts + (rank < (positions - counts.sum(axis=1))[:, None])


def _draw_blocks(
    weights: np.ndarray, begins: np.ndarray, positions: np.ndarray, steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws the next `steps` samples after counts [L, K] at positions [L]. Returns the counts after
    them, members and ranks [L, steps].
    """
    counts, lanes, n = begins.copy(), np.arange(len(begins)), positions.copy()
    members, ranks = (
        np.empty((steps, len(lanes)), np.int16),
        np.empty((steps, len(lanes)), np.uint16),
    )
    lag = np.empty_like(counts)
    for step in range(steps):
        np.multiply(weights, np.maximum(n, 1.0)[:, None], out=lag)
        np.subtract(lag, counts, out=lag)
        chosen = lag.argmax(axis=1)  # the first of the largest
        members[step], ranks[step] = chosen, counts[lanes, chosen] - begins[lanes, chosen]
        counts[lanes, chosen] += 1
        n += 1
    return counts, members.T, ranks.T
