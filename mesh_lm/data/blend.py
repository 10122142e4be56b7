"""Several prefixes in proportion to weights, in the sample order of Megatron-LM's `BlendedDataset`, and how it goes on at a resume.

Sample n is drawn from the member that lags most behind its share: the first with the largest w n - c, where c counts its samples so far (at
n = 0, w itself). All of it in double precision, multiplied and subtracted apart: a fused multiply-add breaks ties otherwise.

Source: helpers.cpp (`build_blending_indices`), blended_dataset.py and blended_megatron_dataset_builder.py of Megatron-LM (megatron-core
0.16.1). Legend: K members, N samples, L blocks computed side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from mesh_lm.data.index_cache import Arrays, IndexCache
from mesh_lm.data.rows import SampleOrder, TokenWindows, merged
from mesh_lm.errors import ConfigError

BLOCK = 256
"""Samples between two stored counts."""
_WARM_UP = 64
_SIDE_BY_SIDE = 2**15
_SURPLUS = 1.005
"""Samples that a member's own order is built for, above its share of the blend."""


def parse(blend: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Prefixes and their weights, as Megatron reads `--data-path`: an even number of words of which every other is a number is weights.

    Raises:
      ConfigError: numbers in only some places, a weight that is not above 0, a prefix given twice.
    """
    words = [word.strip() for word in blend]
    numbers = [_number(word) for word in words[::2]]
    shown = f"data.blend={' '.join(words)}"
    if len(words) % 2 == 0 and None not in numbers:
        prefixes, weights = words[1::2], [number for number in numbers if number is not None]
    elif any(number is not None for number in numbers):
        raise ConfigError(f"{shown}: give prefixes only, or a weight before each prefix")
    else:
        prefixes, weights = words, None
    if bad := [weight for weight in weights or () if not 0 < weight < math.inf]:
        raise ConfigError(f"{shown}: weight {bad[0]:g} must be a number above 0; leave a prefix out that is to have none")
    if twice := {prefix for prefix in prefixes if prefixes.count(prefix) > 1}:
        raise ConfigError(f"{shown}: {min(twice)} is given twice; give it once, with the sum of the weights")
    return prefixes, weights


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def normalized(weights: Sequence[float]) -> list[float]:
    """Megatron's `normalize`: divided by their sum."""
    array = np.array(weights, np.float64)
    return (array / np.sum(array)).tolist()


def shares(weights: Sequence[float], n_samples: int) -> list[int]:
    """Samples that each member gives at least, of n_samples in all; weights: normalized."""
    return [math.ceil(n_samples * weight) for weight in weights]


def sizes(weights: Sequence[float] | None, epoch_sizes: Sequence[int], n_samples: int) -> list[int]:
    """Samples that Megatron asks each member's own order for.

    weights: normalized, None where the config gives none: then one epoch of each, as long as that is enough. epoch_sizes: samples in one
    epoch of each member.
    """
    if weights is None and len(epoch_sizes) == 1:
        return [n_samples]
    if weights is None:
        if n_samples <= sum(epoch_sizes):
            return list(epoch_sizes)
        weights = normalized(epoch_sizes)
    return [math.ceil(share * _SURPLUS) for share in shares(weights, n_samples)]


class Blend:
    """The order of a blend. Safe to read from several threads; keeps memory maps only.

    Args:
      members: an order each.
      weights: normalized.
      size: samples that will be used, as far as is known; a run that skips batches reads on, and the order with it.
      ahead: samples behind them that are read before it is known that nobody wants them.
      consumed: samples that each member gave before position `start`.
      start: first position.
    """

    def __init__(
        self, members: Sequence[SampleOrder], weights: Sequence[float], size: int, *, ahead: int = 0, consumed: Sequence[int], start: int,
        cache: IndexCache,
    ) -> None:  # fmt: skip
        self.seq_len, self._members, self._size, self._start = members[0].seq_len, members, max(1, size), start
        self._consumed, self._cache = np.array(consumed, np.int64), cache
        self._weights = normalized(weights)  # twice, as Megatron does
        self._index = self._made(self._size + ahead) if len(members) > 1 else None

    def __len__(self) -> int:
        return self._start + self._size

    def read(self, indices: np.ndarray) -> TokenWindows:
        """The windows at the positions int64 [B]; raises ConfigError for a token id that the model lacks."""
        here = indices - self._start
        if self._index is None:
            return self._members[0].read(self._consumed[0] + here)
        index = self._reaching(int(here.max(initial=-1)) + 1)
        which = index["members"][here].astype(np.int64)
        numbers = self._consumed[which] + index["counts"][here // BLOCK, which] + index["ranks"][here]
        return merged(which, lambda i, rows: self._members[i].read(numbers[rows]))

    def consumed(self, position: int) -> list[int]:
        """Samples that each member gave before this position, from the very start on."""
        n = position - self._start
        if self._index is None:
            return [int(self._consumed[0]) + n]
        index, block = self._reaching(n), n // BLOCK
        here = np.bincount(index["members"][block * BLOCK : n], minlength=len(self._members))
        return (self._consumed + index["counts"][block] + here).tolist()

    def _made(self, size: int) -> Arrays:
        return self._cache.get(
            "blend", {"weights": self._weights, "size": size}, lambda: blend_index(np.array(self._weights), size), size=size
        )

    def _reaching(self, n: int) -> Arrays:
        """The index, of n samples at least: a longer one begins as the shorter."""
        index = self._index
        assert index is not None
        while (size := len(index["members"])) < n:
            index = self._index = self._made(n + size // 8)
        return index


def blend_index(weights: np.ndarray, size: int) -> Arrays:
    """Which member each sample comes from, and which of its samples it is.

    The order is sequential by nature: each choice depends on all before. But the counts at any place are nearly the shares, and a wrong
    guess there is forgotten within a few steps. So blocks are computed side by side, each from a guess made a little before it; a block
    that did not start where the one before it ended is computed again from there, until all agree. What agrees is exact, by induction.

    Returns members int16 [N]; counts int64 [N / BLOCK + 1, K], samples of each member before each block; ranks uint16 [N], the member's
    samples before this one in its block.
    """
    n_blocks = -(-size // BLOCK)
    members, ranks = np.empty((n_blocks, BLOCK), np.int16), np.empty((n_blocks, BLOCK), np.uint16)
    counts = np.zeros((n_blocks + 1, len(weights)))
    for first in range(0, n_blocks, _SIDE_BY_SIDE):
        stop = min(first + _SIDE_BY_SIDE, n_blocks)
        places = np.arange(first, stop, dtype=np.float64) * BLOCK
        before = np.maximum(places - _WARM_UP, 0)
        begins, _, _ = _side_by_side(weights, _guess(weights, before), before, _WARM_UP)
        begins[0] = counts[first]
        ends, todo = np.empty_like(begins), np.arange(stop - first)
        while len(todo):
            ends[todo], members[first + todo], ranks[first + todo] = _side_by_side(weights, begins[todo], places[todo], BLOCK)
            wanted = np.concatenate((begins[:1], ends[:-1]))
            todo = np.flatnonzero((begins != wanted).any(axis=1))
            begins[todo] = wanted[todo]
        counts[first:stop], counts[stop] = begins, ends[-1]
    return {"members": members.reshape(-1)[:size], "counts": counts.astype(np.int64), "ranks": ranks.reshape(-1)[:size]}


def _guess(weights: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Counts near the shares of n samples, that sum to n: rounded down, and one more for the largest remainders; float64 [L, K]."""
    exact = weights * places[:, None]
    counts = np.floor(exact)
    rank = np.argsort(np.argsort(counts - exact, axis=1, kind="stable"), axis=1)
    return counts + (rank < (places - counts.sum(axis=1))[:, None])


def _side_by_side(weights: np.ndarray, begins: np.ndarray, places: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The next `steps` samples after the given counts [L, K] at the given places [L]: counts after them, members and ranks [L, steps]."""
    counts, lanes, n = begins.copy(), np.arange(len(begins)), places.copy()
    members, ranks = np.empty((steps, len(lanes)), np.int16), np.empty((steps, len(lanes)), np.uint16)
    lag = np.empty_like(counts)
    for step in range(steps):
        np.multiply(weights, np.maximum(n, 1.0)[:, None], out=lag)
        np.subtract(lag, counts, out=lag)
        chosen = lag.argmax(axis=1)  # the first of the largest
        members[step], ranks[step] = chosen, counts[lanes, chosen] - begins[lanes, chosen]
        counts[lanes, chosen] += 1
        n += 1
    return counts, members.T, ranks.T
