"""The sums of gradients over devices at the end of a step's region.

Everything here runs inside the region (`mesh_lm.parallel.engine`), where each device has the sums
over its own microbatches. A gradient is summed over the manual axes that do not shard it. Those of
matrices that layers gather (zero3) are not among them: `mesh_lm.parallel.zero3` sums them in every
microbatch, and in a pipeline `mesh_lm.parallel.stage_transfers` does once a step.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mesh_lm.model import Sums
from mesh_lm.optim.contract import is_matrix
from mesh_lm.parallel import feedback
from mesh_lm.parallel.flat import FlatLayout
from mesh_lm.parallel.layer_collectives import vector_spec
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.parallel.reductions import sum_dtype, two_level_sum
from sharding_rules import ISLAND, axes_of


def manual_axes(layout: ModelLayout) -> frozenset[str]:
    """Returns the mesh axes that the engine is manual over when it trains.

    The axis of islands is not among them: a step runs inside of one (`mesh_lm.training.diloco`).
    """
    return layout.shard.rules.manual_axes() & set(layout.shard.mesh.axis_names) - {ISLAND}


def psum(tree: Any, axes: AbstractSet[str], layout: ModelLayout) -> Any:
    """Returns `lax.psum` over those of the axes that have more than one device."""
    mesh = layout.shard.mesh
    names = tuple(axis for axis in mesh.axis_names if axis in axes and mesh.shape[axis] > 1)
    return lax.psum(tree, names) if names else tree


def reduce_sums(sums: Sums, layout: ModelLayout) -> tuple[Sums, Sums]:
    """Returns (scalars summed over all devices, arrays summed over the devices of a stage).

    Arrays have a segment's layers as leading dimension, and each stage has its own layers.
    """
    axes = manual_axes(layout)
    scalars = {name: x for name, x in sums.items() if x.ndim == 0}
    arrays = {name: x for name, x in sums.items() if x.ndim > 0}
    # Few bytes, once a step.
    return psum(scalars, axes, layout), psum(arrays, axes - {"pipeline"}, layout)


def reduce_gradients(
    layout: ModelLayout,
    flat: FlatLayout,
    grads: Params,
    specs: dict[str, PartitionSpec],
    reduced_sums: Any,
    old_feedback: Params,
) -> tuple[Params, Params]:
    """Returns (the gradients, summed once over the manual axes that do not shard them; the new
    error feedback). Of flat vectors, it returns this replica's shards.

    Args:
      grads: this device's, of parameters, or of the vectors that layers gather.
      specs: of what the gradients are of, over the manual axes.
      reduced_sums: arrays whose collectives come before those of flat vectors.
      old_feedback: what sums in int8 have left out in earlier steps.
    """
    reduced: Params = {}
    new_feedback: Params = {}

    # 1. All gradients but those of matrices in flat vectors.
    int8_sums = feedback.feedback_of(layout)
    for name, grad in grads.items():
        if name in flat.names or name in flat.leaves:
            continue
        if name in int8_sums:
            reduced[name], new_feedback[name] = feedback.summed(
                layout, name, int8_sums[name], grad, old_feedback[name]
            )
        else:
            axes = manual_axes(layout) - _axes_in(specs[name])
            # Before the sum, because XLA makes a reduce-scatter only of a sum that is divided next.
            padded = layout.with_owners_padding(name, grad)
            reduced[name] = _summed(name, padded, axes, layout)
    if not flat.vectors:
        return reduced, new_feedback

    # 2. Matrices in flat vectors: a reduce-scatter for each vector, except for those that layers
    # gather, which the layers have summed during the backward pass.
    shards, vector_feedback = _reduce_scatter(
        layout, flat, grads, reduced, reduced_sums, old_feedback
    )
    new_feedback |= vector_feedback

    # 3. A reduce-scatter sums over the replicas. Vectors of parameters outside of the layers are
    # also summed over the other manual axes, such as the stages that share a tied embedding.
    for vector in flat.vectors:
        shard = grads[vector.name] if vector.gathered_by_layer else shards[vector.name]
        axes = manual_axes(layout) - _axes_in(vector.spec)
        reduced[vector.name] = psum(shard, axes, layout)
    return reduced, new_feedback


def cast_to_float32(run: Callable) -> Callable:
    """Returns the region `run` with its gradients cast to float32.

    A cast inside the region would turn ZeRO-2's reduce-scatters into all-reduces.
    """

    def cast(*arguments: Any) -> tuple[tuple[Sums, Sums], Params, Params]:
        sums, grads, new_feedback = run(*arguments)
        return sums, {name: g.astype(jnp.float32) for name, g in grads.items()}, new_feedback

    return cast


def _reduce_scatter(
    layout: ModelLayout,
    flat: FlatLayout,
    grads: Params,
    reduced: Params,
    reduced_sums: Any,
    old_feedback: Params,
) -> tuple[Params, Params]:
    """Returns (this replica's shards of the sums of flat vectors, their new error feedback).

    reduced: gradients of unsharded parameters that vectors contain besides matrices.
    """
    # The inner region is manual over the axes that the outer one leaves to XLA, so that matrices
    # are local arrays in it, which a vector has one after the other.
    auto_axes = frozenset(layout.shard.mesh.axis_names) - manual_axes(layout)
    specs: dict[str, PartitionSpec] = {}
    local_grads: Params = {}
    for name, sharding in layout.shardings("params").items():
        if name in grads:
            specs[name] = layout.shard.restrict(sharding.spec, auto_axes)
            local_grads[name] = grads[name] if name in flat.names else reduced[name]
    feedback_specs = {
        name: feedback.feedback_spec(layout, row)
        for name, row in feedback.feedback_of(layout).items()
        if name in flat.names
    }
    vector_specs = {
        vector.name: vector_spec(layout, vector)
        for vector in flat.vectors
        if not vector.gathered_by_layer
    }
    run = layout.shard.shard_map(
        partial(flat.reduce_scatter, dtype=sum_dtype(layout.shard.rules)),
        (specs, PartitionSpec(), feedback_specs),
        (vector_specs, feedback_specs),
    )
    return run(local_grads, reduced_sums, {name: old_feedback[name] for name in feedback_specs})


def _summed(name: str, grad: jax.Array, axes: AbstractSet[str], layout: ModelLayout) -> jax.Array:
    """Returns a gradient summed over manual axes, in the type and in the levels that the rules
    choose.
    """
    rules = layout.shard.rules
    mesh = layout.shard.mesh
    in_two_levels = rules.node_axis in axes and mesh.shape[rules.node_axis] > 1
    is_plain = rules.reduction != "bfloat16" and not in_two_levels
    if is_plain or not is_matrix(name, layout.axes[name]):
        return psum(grad, axes, layout)
    axes_across_nodes = [
        axis
        for axis in mesh.axis_names
        if axis in axes and axis != rules.node_axis and mesh.shape[axis] > 1
    ]

    def on_device(grad: jax.Array) -> jax.Array:
        # The type before the sum is that on the wire.
        grad = grad.astype(sum_dtype(layout.shard.rules))
        if in_two_levels:
            return two_level_sum(grad, rules.node_axis, axes_across_nodes)
        return psum(grad, axes, layout)

    # On local shards, because XLA:CPU aborts at a bf16 all-reduce of an array that it partitions
    # itself.
    spec = layout.shard.spec("params", layout.axes[name])
    return layout.shard.shard_map(on_device, spec, spec)(grad)


def _axes_in(spec: PartitionSpec) -> set[str]:
    """Returns the mesh axes that a spec shards over."""
    return {axis for entry in spec for axis in axes_of(entry)}
