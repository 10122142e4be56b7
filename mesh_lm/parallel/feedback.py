"""The error feedback of sums in int8: what rounding has left out of a gradient so far, which each
replica adds to its next one.

The sum of what was sent then differs from the sum of the gradients by what the last step has left
out alone (arXiv 1901.09847). The array has the dimensions of its parameter, and one more for the
replicas: 4 bytes of memory for each element of a gradient on a device.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from mesh_lm.optim.contract import ArraySpec, is_matrix
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.parallel.reductions import int8_sum
from sharding_rules import axes_of


@dataclasses.dataclass(frozen=True)
class Feedback:
    """What is left out of one parameter's gradient, as an array of the state."""

    array: ArraySpec
    """[layers, replicas, ...] of a stacked parameter, [replicas, ...] of another."""
    sharding: NamedSharding
    replica_axes: tuple[str, ...]
    """The mesh axes over which the gradient is summed, in the order of the mesh."""

    @property
    def dim(self) -> int:
        """The dimension of the replicas, of which a device has one."""
        return int(self.array.stacked)


def replica_axes(layout: ModelLayout, name: str) -> tuple[str, ...]:
    """The mesh axes over which the engine sums the gradient of a parameter, in the order of the
    mesh; without those of size 1.
    """
    mesh, own = (
        layout.shard.mesh,
        {a for entry in layout.shardings("params")[name].spec for a in axes_of(entry)},
    )
    return tuple(
        a
        for a in mesh.axis_names
        if a in layout.shard.rules.manual_axes() - own and mesh.shape[a] > 1
    )


def feedback_of(layout: ModelLayout) -> dict[str, Feedback]:
    """The error feedback of the matrices, by the names of the parameters; empty unless their
    gradients are summed in int8.
    """
    out: dict[str, Feedback] = {}
    if layout.shard.rules.reduction != "int8":
        return out
    shardings = layout.shardings("params")
    for name, leaf in layout.leaves.items():
        axes = replica_axes(layout, name)
        if name in layout.buffers or not axes or not is_matrix(name, leaf.axes):
            continue
        n, at = math.prod(layout.shard.mesh.shape[a] for a in axes), int(leaf.stacked)
        spec = (*shardings[name].spec, *(None,) * (len(leaf.shape) - len(shardings[name].spec)))
        where = NamedSharding(layout.shard.mesh, PartitionSpec(*spec[:at], axes, *spec[at:]))
        array = ArraySpec(
            (*leaf.shape[:at], n, *leaf.shape[at:]),
            jnp.dtype("float32"),
            (*leaf.axes[:at], None, *leaf.axes[at:]),
        )
        out[name] = Feedback(array, where, axes)
    return out


def summed(
    layout: ModelLayout, name: str, feedback: Feedback, grad: jax.Array, before: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """(a gradient summed over the replicas in int8, what this replica has left out). before: what
    it has left out so far.

    Inside the engine's region.
    """

    def on_device(grad: jax.Array, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, left_out = int8_sum(
            grad.astype(jnp.float32) + before.squeeze(feedback.dim), feedback.replica_axes
        )
        return total, jnp.expand_dims(left_out, feedback.dim)

    spec = layout.shard.spec("params", layout.axes[name])
    wide = local_spec(layout, feedback)
    return layout.shard.shard_map(on_device, (spec, wide), (spec, wide))(grad, before)


def local_spec(layout: ModelLayout, feedback: Feedback) -> PartitionSpec:
    """The spec of such an array in the engine's region: sharded over the axes that XLA handles."""
    auto = frozenset(layout.shard.mesh.axis_names) - layout.shard.rules.manual_axes()
    return layout.shard.restrict(feedback.sharding.spec, auto)


def zeros(layout: ModelLayout) -> Params:
    """The arrays before the first step."""
    return {
        name: jnp.zeros(each.array.shape, each.array.dtype)
        for name, each in feedback_of(layout).items()
    }
