"""Maps our parameters to Hugging Face tensors: reads any part of our array from their tensors, and
converts ours to theirs.

A dimension is a letter: L layers, E experts, D embed, N heads, K kv heads, H head dim, F mlp, V
vocabulary, S positions, f fused (q k v, gate and up). Our dimensions are a string of letters
("LDfKH"); theirs are separated by spaces, and several letters form one merged dimension: "KH D" is
a matrix whose rows are heads x head width. If L, E or f is missing from theirs, it numbers separate
tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

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
    hf_names: tuple[str, ...]
    """Their tensor names, with {} for the layer, and another {} for the expert if E numbers
    tensors; several if f numbers tensors."""
    hf_dims: str
    """The dimensions of each of their tensors, such as "KH D"."""
    first_layer: int = 0
    """The number that their names have for our first layer."""

    def shape(self, sizes: Sizes) -> tuple[int, ...]:
        """Returns the shape of each of their tensors."""
        return tuple(math.prod(sizes[d] for d in group) for group in self.hf_dims.split())

    def names(self, sizes: Sizes) -> list[str]:
        """Returns the names of all their tensors, layer by layer."""
        n_layers = sizes["L"] if "L" in self.dims else 1
        return [name for layer in range(n_layers) for name in self.layer_names(layer, sizes)]

    def layer_names(self, layer: int, sizes: Sizes) -> list[str]:
        """Returns the names of the tensors of one of our layers, in the order of `write`."""
        n_experts = sizes["E"] if "E" in self._numbering_dims else 1
        return [
            name.format(self.first_layer + layer, expert)
            for expert in range(n_experts)
            for name in self.hf_names
        ]

    @property
    def _numbering_dims(self) -> list[str]:
        """Our dimensions that number separate tensors."""
        return [d for d in self.dims if d not in self.hf_dims]

    def read(self, box: Box, sizes: Sizes, read: Read, dtype: np.dtype) -> np.ndarray:
        """Returns the part of our array from (start, stop) in each dimension. Rows beyond their
        size (vocabulary padding) are 0.

        Reads only the numbers that the part needs, each once.
        """
        out = np.zeros([stop - start for start, stop in box], dtype)
        bounds = {
            d: (min(start, sizes[d]), min(stop, sizes[d]))
            for d, (start, stop) in zip(self.dims, box, strict=True)
        }
        lengths = {d: stop - start for d, (start, stop) in bounds.items()}
        groups = self.hf_dims.split()
        numbering_dims = self._numbering_dims
        for numbers in itertools.product(*(range(*bounds[d]) for d in numbering_dims)):
            number = dict(zip(numbering_dims, numbers, strict=True))
            layer = self.first_layer + number.get("L", 0)
            name = self.hf_names[number.get("f", 0)].format(layer, number.get("E"))

            # Each slice of the tensor is the part of `out` at these offsets in some dimensions,
            # and all of the others.
            for runs in itertools.product(*(_runs(group, bounds, sizes) for group in groups)):
                offsets = {d: i - bounds[d][0] for d, i in number.items()}
                for run in runs:
                    offsets |= run.offsets
                part_dims = [d for d in "".join(groups) if d not in offsets]
                part = read(name, tuple(run.rows for run in runs))
                part = part.reshape([lengths[d] for d in part_dims])
                position = tuple(offsets.get(d, slice(lengths[d])) for d in self.dims)
                out[position] = part.transpose(
                    [part_dims.index(d) for d in self.dims if d in part_dims]
                )
        return out

    def write(self, layer: np.ndarray, sizes: Sizes) -> list[np.ndarray]:
        """Converts one layer of our array to their tensors, in the order of `layer_names`. Drops
        padding rows.
        """
        dims = self.dims.removeprefix("L")
        layer = layer[tuple(slice(sizes[d]) for d in dims)]
        # The dimensions that number tensors come first, E before f, as in `layer_names`.
        numbering_dims = [d for d in "Ef" if d in self._numbering_dims]
        n = len(numbering_dims)
        layer = np.moveaxis(layer, [dims.index(d) for d in numbering_dims], range(n))
        parts = [layer[numbers] for numbers in np.ndindex(*layer.shape[:n])]
        part_dims = [d for d in dims if d not in numbering_dims]
        order = [part_dims.index(d) for d in self.hf_dims if d != " "]
        shape = self.shape(sizes)
        return [np.ascontiguousarray(part.transpose(order).reshape(shape)) for part in parts]


class _Run(NamedTuple):
    """Contiguous rows of a merged dimension."""

    rows: slice
    offsets: dict[str, int]
    """Offset within the box of each letter for which the rows have one index."""


def _runs(group: str, bounds: Mapping[str, tuple[int, int]], sizes: Sizes) -> Iterator[_Run]:
    """Yields the runs of a merged dimension that cover a box. bounds: (start, stop) by letter."""
    # The letters after `last` are covered in full, so the box is contiguous from `last` on. Those
    # before it are iterated.
    partial = [i for i, d in enumerate(group) if bounds[d] != (0, sizes[d])]
    last = partial[-1] if partial else 0
    iterated = group[:last]
    rows_per_index = math.prod(sizes[d] for d in group[last + 1 :])
    start, stop = bounds[group[last]]
    for indices in itertools.product(*(range(*bounds[d]) for d in iterated)):
        base = 0
        offsets = {}
        for d, i in zip(iterated, indices, strict=True):
            base = base * sizes[d] + i
            offsets[d] = i - bounds[d][0]
        base *= sizes[group[last]]
        yield _Run(slice((base + start) * rows_per_index, (base + stop) * rows_per_index), offsets)
