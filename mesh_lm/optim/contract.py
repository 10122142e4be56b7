"""The interface of an optimizer: a rule that turns gradients into directions. Each is one file,
based on optax, and a line in `mesh_lm.optim.rules`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import jax

from sharding_rules.rules import FLAT

Params = dict[str, jax.Array]
"""Arrays by the name of the parameter: weights, gradients, or optimizer state."""
Slots = dict[str, Params]
"""Optimizer state by the name of the slot, such as "mu"."""


@dataclasses.dataclass(frozen=True)
class ArraySpec:
    """The description of an array of a run's state, from which it is initialised, sharded, saved,
    restored and planned.
    """

    shape: tuple[int, ...]
    """The shape in memory, where a stacked parameter has its layers by pipeline stage."""
    dtype: Any
    axes: tuple[str | None, ...]
    """Logical axes, which the rules map to mesh axes."""
    form: Literal["weight", "flat"] = "weight"
    """weight: an array with the dimensions of a parameter, or some of them. flat: the matrices of a
    layer, concatenated into one padded vector that is sharded over the replicas
    (`mesh_lm.parallel.flat`)."""
    block: int = 1
    """Elements of a parameter's last dimension that share an element of this array, such as a
    scale. Rules that shard the parameter must leave each block on one device."""

    @property
    def stacked(self) -> bool:
        """Whether its first dimension is the layers of a segment."""
        return self.axes[:1] == ("layers",)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, over all devices."""
        size = jax.numpy.dtype(self.dtype).itemsize
        for length in self.shape:
            size *= length
        return size

    def like(self, dtype: Any) -> ArraySpec:
        """Returns the description with another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def without(self, *dims: int) -> ArraySpec:
        """Returns the description without some dimensions, as for a mean over them."""
        dropped = {dim % len(self.shape) for dim in dims}
        remaining = [dim for dim in range(len(self.shape)) if dim not in dropped]
        shape = tuple(self.shape[dim] for dim in remaining)
        axes = tuple(self.axes[dim] for dim in remaining)
        return dataclasses.replace(self, shape=shape, axes=axes)

    def blocked(self, size: int) -> ArraySpec:
        """Returns the description of float32 values that blocks of the last dimension share."""
        return dataclasses.replace(
            self,
            shape=(*self.shape[:-1], self.shape[-1] // size),
            dtype=jax.numpy.dtype("float32"),
            block=size,
        )


ArraySpecs = Mapping[str, ArraySpec]


class Rule(Protocol):
    """The update rule of one optimizer. Clipping, learning rate and weight decay are shared by all
    (`mesh_lm.optim.Optimizer`).

    A frozen dataclass: its fields are the rule's hyperparameters, with bounds from
    `mesh_lm.config.option`, and options of the command line (--optimizer.rule.FIELD).
    """

    elementwise: ClassVar[bool]
    """Whether the update of an element depends on that element only. Then the rule also works on
    flat vectors."""

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """Returns, for each slot and parameter, the array that the slot has for it, which starts as
        zeros. A slot may omit parameters.
        """
        ...

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        """Returns (directions, updated slots). A parameter moves by minus the learning rate times
        its direction.

        It is traced under jit. count: int32, the number of earlier updates. leaves: the parameters,
        whose logical axes tell matrices from other parameters. Gradients and directions are
        float32. Stacked parameters have layers as leading dimension; padding rows are zero.
        Under optimizer.offload, and for a rule with `by_layer = True`, it is called for some
        parameters at a time, one layer of them: what it returns for a parameter may depend on that
        parameter and layer alone.
        """
        ...


UNDECAYED = ("bias", "scale", "sinks")
"""Last parts of the names of parameters that are not matrices, whatever their shape."""


def is_matrix(name: str, axes: Sequence[str | None]) -> bool:
    """Returns whether a parameter with these logical axes is a matrix, to which weight decay
    applies. A stack of vectors is not a matrix.

    A flat vector counts as one, because it consists of matrices.
    """
    if FLAT in axes:
        return True
    n_dims = len(axes) - ("layers" in axes)
    return n_dims > 1 and name.rsplit(".", 1)[-1] not in UNDECAYED


def decayed(leaves: ArraySpecs) -> frozenset[str]:
    """Returns the parameters that weight decay applies to: matrices."""
    return frozenset(name for name, leaf in leaves.items() if is_matrix(name, leaf.axes))
