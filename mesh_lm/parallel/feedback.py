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
    """The array of the state for one parameter's gradient."""

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
    """Returns the mesh axes over which the engine sums the gradient of a parameter, in the order of
    the mesh; without those of size 1.
    """
    mesh = layout.shard.mesh
    spec = layout.shardings("params")[name].spec
    sharded_axes = {axis for entry in spec for axis in axes_of(entry)}
    summed_axes = layout.shard.rules.manual_axes() - sharded_axes
    return tuple(axis for axis in mesh.axis_names if axis in summed_axes and mesh.shape[axis] > 1)


def feedback_of(layout: ModelLayout) -> dict[str, Feedback]:
    """Returns the error feedback of the matrices, by the names of the parameters; empty unless
    their gradients are summed in int8.
    """
    if layout.shard.rules.reduction != "int8":
        return {}
    mesh = layout.shard.mesh
    shardings = layout.shardings("params")
    feedback: dict[str, Feedback] = {}
    for name, leaf in layout.leaves.items():
        axes = replica_axes(layout, name)
        if name in layout.buffers or not axes or not is_matrix(name, leaf.axes):
            continue
        n_replicas = math.prod(mesh.shape[axis] for axis in axes)
        dim = int(leaf.stacked)
        spec = list(shardings[name].spec)
        spec += [None] * (len(leaf.shape) - len(spec))
        array = ArraySpec(
            (*leaf.shape[:dim], n_replicas, *leaf.shape[dim:]),
            jnp.dtype("float32"),
            (*leaf.axes[:dim], None, *leaf.axes[dim:]),
        )
        sharding = NamedSharding(mesh, PartitionSpec(*spec[:dim], axes, *spec[dim:]))
        feedback[name] = Feedback(array, sharding, axes)
    return feedback


def summed(
    layout: ModelLayout, name: str, feedback: Feedback, grad: jax.Array, left_out: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns (a gradient summed over the replicas in int8, what this replica has left out so far),
    inside the engine's region.

    left_out: what it had left out before.
    """

    def on_device(grad: jax.Array, left_out: jax.Array) -> tuple[jax.Array, jax.Array]:
        corrected = grad.astype(jnp.float32) + left_out.squeeze(feedback.dim)
        total, left_out = int8_sum(corrected, feedback.replica_axes)
        return total, jnp.expand_dims(left_out, feedback.dim)

    grad_spec = layout.shard.spec("params", layout.axes[name])
    specs = (grad_spec, feedback_spec(layout, feedback))
    return layout.shard.shard_map(on_device, specs, specs)(grad, left_out)


def feedback_spec(layout: ModelLayout, feedback: Feedback) -> PartitionSpec:
    """Returns the spec of such an array in the engine's region: sharded over the axes that XLA
    handles.
    """
    auto_axes = frozenset(layout.shard.mesh.axis_names) - layout.shard.rules.manual_axes()
    return layout.shard.restrict(feedback.sharding.spec, auto_axes)


def zeros(layout: ModelLayout) -> Params:
    """Returns the arrays before the first step."""
    return {
        name: jnp.zeros(row.array.shape, row.array.dtype)
        for name, row in feedback_of(layout).items()
    }
