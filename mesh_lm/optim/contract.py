"""What a step asks of an optimizer: a rule that turns gradients into directions. One file each, over optax; a line in `RULES`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import jax

Params = dict[str, jax.Array]
"""By the name of the parameter: weights, gradients, or what an optimizer keeps beside them."""
Slots = dict[str, Params]
"""By the name of the slot ("mu"): what an optimizer keeps from step to step."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """A named array of a run's state before it exists: all that initialises, places, saves, restores and plans it."""

    shape: tuple[int, ...]
    """In memory: a stacked parameter has its layers as the pipeline's stages have them."""
    dtype: Any
    axes: tuple[str | None, ...]
    """Logical axes, which the rules map to mesh axes."""
    form: Literal["weight", "flat"] = "weight"
    """weight: an array with the dimensions of a parameter, or some of them. flat: the matrices of a layer one after another in one padded
    vector, cut over the replicas (`mesh_lm.optim.flat`)."""

    @property
    def stacked(self) -> bool:
        """Whether its first dimension is that of the layers of a segment."""
        return self.axes[:1] == ("layers",)

    @property
    def nbytes(self) -> int:
        size = jax.numpy.dtype(self.dtype).itemsize
        for side in self.shape:
            size *= side
        return size

    def like(self, dtype: Any) -> ArraySpec:
        """The same with another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def without(self, *dims: int) -> ArraySpec:
        """The same without some dimensions, as a mean over them has it."""
        dropped = {dim % len(self.shape) for dim in dims}
        kept = [dim for dim in range(len(self.shape)) if dim not in dropped]
        return dataclasses.replace(self, shape=tuple(self.shape[d] for d in kept), axes=tuple(self.axes[d] for d in kept))


ArraySpecs = Mapping[str, ArraySpec]


class Rule(Protocol):
    """The arithmetic of one optimizer. Clipping, the learning rate and weight decay are the same for all (`mesh_lm.optim.Optimizer`)."""

    elementwise: bool
    """Whether what happens to an element depends on that element alone. Then the rule can be given flat vectors."""

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """slot -> name of the parameter -> what is kept beside it; a parameter may have nothing in a slot. All begin as zeros."""
        ...

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:  # fmt: skip
        """(directions, slots after the step). A parameter moves by minus the learning rate times its direction.

        Pure, under jit. count: int32, updates made before this one. leaves: of the parameters, whose logical axes say what is a matrix.
        Gradients and directions are float32; stacked parameters have layers in front, and rows of padding are zero.
        """
        ...


FLAT = "flat"
"""The last logical axis of a flat vector; and the row of rules.optimizer that has the mesh axes that cut those."""
UNDECAYED = ("bias", "scale", "sinks")
"""Last parts of the names of parameters that are no matrices, whatever their shape."""


def is_matrix(name: str, axes: Sequence[str | None]) -> bool:
    """Whether a parameter with these logical axes is a matrix, which weight decay applies to. A stack of vectors is none.

    A flat vector is: it holds nothing but matrices.
    """
    return FLAT in axes or (len(axes) - ("layers" in axes) > 1 and name.rsplit(".", 1)[-1] not in UNDECAYED)


def decayed(leaves: ArraySpecs) -> frozenset[str]:
    """The parameters that weight decay applies to: matrices."""
    return frozenset(name for name, leaf in leaves.items() if is_matrix(name, leaf.axes))
