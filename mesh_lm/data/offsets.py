"""Where documents begin, read from the memory map of an .idx, so that a corpus of a billion
documents needs no memory for them.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

_BLOCK = 2**20
"""Offsets converted at once."""


class Offsets:
    """An array of token offsets, int64 [n + 1]: sequence i is the tokens offsets[i] to
    offsets[i + 1] - 1. Thread-safe.

    It is indexed as an array by a number, a slice or an integer array, but not by negative ones.
    `np.asarray` reads all of it.
    """

    def __init__(self, pointers: np.ndarray, itemsize: int, end: int, base: int = 0) -> None:
        """Takes byte offsets in a file.

        Args:
          pointers: int64 [n], not aligned, as they are in the file.
          itemsize: bytes per token.
          end: the last offset.
          base: is subtracted from all offsets.
        """
        self._pointers = pointers
        self._itemsize = itemsize
        self._end = end
        self._base = base
        # Sizes are powers of 2, and a division takes much longer.
        self._shift = itemsize.bit_length() - 1

    def __len__(self) -> int:
        """Returns n + 1."""
        return len(self._pointers) + 1

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        """Returns offsets, int64 with the shape of the index."""
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        numbers = np.asarray(index)
        n = len(self._pointers)
        if n == 0:
            return np.full(numbers.shape, self._end - self._base)
        # Not `take`, which would first copy all of an unaligned array.
        offsets = self._pointers[np.minimum(numbers, n - 1)] >> self._shift
        if self._base:
            offsets -= self._base
        if numbers.max(initial=0) < n:
            return offsets
        return np.where(numbers == n, self._end - self._base, offsets)

    def search(self, values: np.ndarray) -> np.ndarray:
        """Returns how many offsets are below each value, int64 [n].

        It is `np.searchsorted`, which would read all of the file.
        """
        low = np.zeros(values.shape, np.int64)
        high = np.full(values.shape, len(self), np.int64)
        while (low < high).any():
            middle = (low + high) // 2
            is_open = low < high
            is_below = self[np.minimum(middle, len(self) - 1)] < values
            low = np.where(is_open & is_below, middle + 1, low)
            high = np.where(is_open & ~is_below, middle, high)
        return low

    def part(self, first: int, stop: int) -> Offsets:
        """Returns the offsets of the sequences first to stop - 1, relative to the first."""
        pointers = self._pointers[first:stop]
        return Offsets(pointers, self._itemsize, int(self[stop]), int(self[first]))

    def blocks(self) -> Iterator[np.ndarray]:
        """Yields all offsets in order, int64 [at most 2^20] at a time."""
        for i in range(0, len(self), _BLOCK):
            yield self[i : i + _BLOCK]

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        """Returns all offsets in memory."""
        return np.concatenate([*self.blocks()]).astype(dtype or np.int64, copy=False)
