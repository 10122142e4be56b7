"""Maps our parameters to Hugging Face tensors: reads any part of our array from their tensors, and
converts ours to theirs.

A dimension is a letter: L layers, D embed, N heads, K kv heads, H head dim, F mlp, V vocabulary, S
positions, f fused (q k v, gate and up). Our dimensions are a string of letters ("LDfKH"); theirs
are separated by spaces, and several letters form one merged dimension: "KH D" is a matrix whose
rows are heads x head width. If L or f is missing from theirs, it numbers separate tensors.
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
"""(tensor name, slices) -> that part of the tensor."""


@dataclasses.dataclass(frozen=True)
class TensorMapping:
    """One of our parameters and the tensors that hold the same numbers."""

    param: str
    """The name of our parameter, such as "blocks.attention.kv.weight"."""
    dims: str
    """Its dimensions, such as "LDfKH"."""
    layout: str
    """The dimensions of each of their tensors, such as "KH D"."""
    hf_names: tuple[str, ...]
    """Their tensor names, with {} for the layer; several if f numbers tensors."""

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape of each of their tensors."""
        return tuple(math.prod(sizes[d] for d in group) for group in self.layout.split())

    def names(self, sizes: Sizes) -> list[str]:
        """Returns the names of all their tensors, layer by layer."""
        return [
            name.format(layer)
            for layer in range(sizes["L"] if "L" in self.dims else 1)
            for name in self.hf_names
        ]

    def read(self, box: Box, sizes: Sizes, read: Read, dtype: np.dtype) -> np.ndarray:
        """Returns the part of our array from (start, stop) in each dimension. Rows beyond their
        size (vocabulary padding) are 0.

        Reads only the numbers that the part needs, each once.
        """
        held = {
            d: (min(start, sizes[d]), min(stop, sizes[d]))
            for d, (start, stop) in zip(self.dims, box, strict=True)
        }
        out = np.zeros([stop - start for start, stop in box], dtype)
        numbered = [d for d in self.dims if d not in self.layout]
        for at in itertools.product(*(range(*held[d]) for d in numbered)):
            which = dict(zip(numbered, at, strict=True))
            name = self.hf_names[which.get("f", 0)].format(which.get("L"))
            outer = {d: i - held[d][0] for d, i in which.items()}
            for runs in itertools.product(
                *(_runs(group, held, sizes) for group in self.layout.split())
            ):
                one_by_one = outer | {d: i for _, inner in runs for d, i in inner.items()}
                rest = [d for d in self.layout if d != " " and d not in one_by_one]
                part = read(name, tuple(where for where, _ in runs)).reshape(
                    [held[d][1] - held[d][0] for d in rest]
                )
                place: tuple[Any, ...] = tuple(
                    one_by_one.get(d, slice(held[d][1] - held[d][0])) for d in self.dims
                )
                out[place] = part.transpose([rest.index(d) for d in self.dims if d in rest])
        return out

    def write(self, layer: np.ndarray, sizes: Sizes) -> list[np.ndarray]:
        """Converts one layer of our array to their tensors, in the order of `hf_names`. Drops
        padding rows.
        """
        dims = self.dims.removeprefix("L")
        layer = layer[tuple(slice(sizes[d]) for d in dims)]
        parts = (
            np.moveaxis(layer, dims.index("f"), 0)
            if "f" not in self.layout and "f" in dims
            else layer[None]
        )
        rest = dims if "f" in self.layout else dims.replace("f", "")
        order = [rest.index(d) for d in self.layout if d != " "]
        return [
            np.ascontiguousarray(part.transpose(order).reshape(self.shape(sizes))) for part in parts
        ]


def _runs(
    group: str, box: Mapping[str, tuple[int, int]], sizes: Sizes
) -> Iterator[tuple[slice, dict[str, int]]]:
    """Yields the contiguous slices of a merged dimension that cover a box, with the indices of the
    letters that are iterated.
    """
    partial = [i for i, d in enumerate(group) if box[d] != (0, sizes[d])]
    last = partial[-1] if partial else 0  # from this letter on, the box is contiguous
    below = math.prod(sizes[d] for d in group[last + 1 :])
    for at in itertools.product(*(range(*box[d]) for d in group[:last])):
        before = 0
        for d, i in zip(group, at, strict=False):
            before = before * sizes[d] + i
        start, stop = ((before * sizes[group[last]] + i) * below for i in box[group[last]])
        yield slice(start, stop), {d: i - box[d][0] for d, i in zip(group, at, strict=False)}
