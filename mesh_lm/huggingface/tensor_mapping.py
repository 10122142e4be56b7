"""How tensors of one layout lie in an array of another: reading any part of ours from theirs, and writing theirs from ours.

A dimension is a letter: L layers, D embed, N heads, K kv heads, H head dim, F mlp, V vocabulary, S positions, f fused (q k v, gate and up).
Ours is a word of single letters ("LDfKH"); theirs has a word for each of its dimensions, so that "KH D" is a matrix whose rows are heads
and their widths merged. L and f that do not occur in theirs number separate tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Sizes = Mapping[str, int]
"""Size of each dimension, by its letter."""

Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dimension."""

Read = Callable[[str, tuple[slice, ...]], np.ndarray]
"""(a tensor's name, a slice of each of its dimensions) -> that part of it."""


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """One array of ours and the tensors that hold the same numbers."""

    ours: str
    """Our parameter, such as "blocks.attention.kv.weight"."""
    dims: str
    """Its dimensions, such as "LDfKH"."""
    layout: str
    """The dimensions of each tensor of theirs, such as "KH D"."""
    theirs: tuple[str, ...]
    """Their names, {} standing for the layer; more than one where f numbers tensors."""

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Of each tensor of theirs."""
        return tuple(math.prod(sizes[d] for d in group) for group in self.layout.split())

    def names(self, sizes: Sizes) -> list[str]:
        """Of all tensors of theirs, layer by layer."""
        return [name.format(layer) for layer in range(sizes["L"] if "L" in self.dims else 1) for name in self.theirs]

    def read(self, box: Box, sizes: Sizes, read: Read, dtype: np.dtype) -> np.ndarray:
        """The part of ours from (start, stop) in each dimension. What lies beyond their size, the padding of a vocabulary, is 0.

        Reads each of their numbers that the part needs once, and no other.
        """
        held = {d: (min(start, sizes[d]), min(stop, sizes[d])) for d, (start, stop) in zip(self.dims, box, strict=True)}
        out = np.zeros([stop - start for start, stop in box], dtype)
        numbered = [d for d in self.dims if d not in self.layout]
        for at in itertools.product(*(range(*held[d]) for d in numbered)):
            which = dict(zip(numbered, at, strict=True))
            name = self.theirs[which.get("f", 0)].format(which.get("L"))
            outer = {d: i - held[d][0] for d, i in which.items()}
            for runs in itertools.product(*(_runs(group, held, sizes) for group in self.layout.split())):
                one_by_one = outer | {d: i for _, inner in runs for d, i in inner.items()}
                rest = [d for d in self.layout if d != " " and d not in one_by_one]
                part = read(name, tuple(where for where, _ in runs)).reshape([held[d][1] - held[d][0] for d in rest])
                place: tuple[Any, ...] = tuple(one_by_one.get(d, slice(held[d][1] - held[d][0])) for d in self.dims)
                out[place] = part.transpose([rest.index(d) for d in self.dims if d in rest])
        return out

    def write(self, layer: np.ndarray, sizes: Sizes) -> list[np.ndarray]:
        """One layer of ours -> its tensors of theirs, in the order of `theirs`. Rows of padding are cut."""
        dims = self.dims.removeprefix("L")
        layer = layer[tuple(slice(sizes[d]) for d in dims)]
        parts = np.moveaxis(layer, dims.index("f"), 0) if "f" not in self.layout and "f" in dims else layer[None]
        rest = dims if "f" in self.layout else dims.replace("f", "")
        order = [rest.index(d) for d in self.layout if d != " "]
        return [np.ascontiguousarray(part.transpose(order).reshape(self.shape(sizes))) for part in parts]


def _runs(group: str, box: Mapping[str, tuple[int, int]], sizes: Sizes) -> Iterator[tuple[slice, dict[str, int]]]:
    """The stretches of a merged dimension that cover a box, each with the places in the box of the letters that are walked one by one."""
    cut = [i for i, d in enumerate(group) if box[d] != (0, sizes[d])]
    last = cut[-1] if cut else 0  # behind it, and in it, what the box wants is in one piece
    below = math.prod(sizes[d] for d in group[last + 1 :])
    for at in itertools.product(*(range(*box[d]) for d in group[:last])):
        before = 0
        for d, i in zip(group, at, strict=False):
            before = before * sizes[d] + i
        start, stop = ((before * sizes[group[last]] + i) * below for i in box[group[last]])
        yield slice(start, stop), {d: i - box[d][0] for d, i in zip(group, at, strict=False)}
