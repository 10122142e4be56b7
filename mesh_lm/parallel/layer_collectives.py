"""The two collectives of a layer whose matrices are flat vectors over the replicas
(`mesh_lm.parallel.flat`): gather and sum.

They are used layer by layer (`mesh_lm.parallel.zero3`) and by pipeline stages
(`mesh_lm.parallel.stage_transfers`), inside the engine's region, which is manual over the replicas.
XLA would replicate what they return over the axes that it handles, so they run on local shards.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mesh_lm.parallel.flat import FlatVector
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.parallel.reductions import sum_dtype


class LayerCollectives:
    """Gathers one row of a segment's vectors, and sums the gradients of one layer."""

    def __init__(self, layout: ModelLayout, segment: str) -> None:
        self.layout = layout
        self.shard = layout.shard
        self.vectors = layout.flat.gathered_by(segment)

    def gather(
        self, vectors: Params, row: jax.Array, predecessor: jax.Array
    ) -> tuple[Params, jax.Array]:
        """Returns (the matrices of the layer in a row, `finished` of them).

        vectors: those of this segment, and perhaps of others. predecessor: `finished` of what
        must come before.
        """

        def on_device(
            vectors: Params, row: jax.Array, predecessor: jax.Array
        ) -> tuple[Params, jax.Array]:
            matrices: Params = {}
            for vector in self.vectors:
                shard = lax.dynamic_index_in_dim(vectors[vector.name], row, keepdims=False)
                shard = _copied_to_device(shard)
                # One all-gather for each vector, over the replicas.
                matrices |= vector.all_gather_row(self.ordered(shard, predecessor))
                predecessor = self._finished(matrices[vector.matrices[0].name], predecessor)
            return matrices, predecessor

        specs = {vector.name: vector_spec(self.layout, vector) for vector in self.vectors}
        run = self.shard.shard_map(
            on_device, (specs, PartitionSpec(), PartitionSpec()), (self.specs, PartitionSpec())
        )
        matrices, predecessor = run({name: vectors[name] for name in specs}, row, predecessor)
        return {name: w.astype(self.types[name]) for name, w in matrices.items()}, predecessor

    def reduce(self, grads: Params, predecessor: jax.Array) -> tuple[Params, jax.Array]:
        """Returns (this replica's shards of a layer's gradients, summed over the replicas,
        `finished` of them).
        """
        dtype = sum_dtype(self.shard.rules)

        def on_device(grads: Params, predecessor: jax.Array) -> tuple[Params, jax.Array]:
            shards: Params = {}
            for vector in self.vectors:
                vector_grads = {
                    m.name: self.ordered(grads[m.name], predecessor) for m in vector.matrices
                }
                # One reduce-scatter for each vector, over the replicas.
                shards[vector.name] = vector.reduce_scatter_row(vector_grads, dtype)
                predecessor = self._finished(shards[vector.name], predecessor)
            return shards, predecessor

        row_specs = {
            vector.name: PartitionSpec(*vector_spec(self.layout, vector)[1:])
            for vector in self.vectors
        }
        run = self.shard.shard_map(
            on_device, (self.specs, PartitionSpec()), (row_specs, PartitionSpec())
        )
        return run(grads, predecessor)

    # XLA:CPU starts independent collectives in any order, so that devices may wait for one another:
    # there, each waits for those before it.

    def finished(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """Returns, on CPUs, a number that exists once x does, which is sharded by `spec`."""
        if not self.on_cpu:
            return jnp.float32(0)
        run = self.shard.shard_map(
            lambda x: self._finished(x, jnp.float32(0)), spec, PartitionSpec()
        )
        return run(x)

    def ordered(self, x: jax.Array, predecessor: jax.Array) -> jax.Array:
        """Returns x, on CPUs not before `predecessor` exists.

        It keeps its bits if what comes before is finite; if it is not, the step is skipped.
        """
        return x * (1 + 0 * predecessor).astype(x.dtype) if self.on_cpu else x

    def _finished(self, x: jax.Array, predecessor: jax.Array) -> jax.Array:
        return x.ravel()[0].astype(jnp.float32) if self.on_cpu else predecessor

    @property
    def on_cpu(self) -> bool:
        """Whether the program is for CPUs."""
        return self.shard.mesh.devices.flat[0].platform == "cpu"

    # Shapes and shardings.

    def constrain_matrices(self, tree: Params) -> Params:
        """Returns matrices of one layer, or their gradients, sharded as the layer uses them."""
        return {name: lax.with_sharding_constraint(x, self.specs[name]) for name, x in tree.items()}

    def constrain_stacked(self, tree: Params) -> Params:
        """Returns stacks of them, [rows, ...], sharded the same way."""
        return {
            name: lax.with_sharding_constraint(x, PartitionSpec(None, *self.specs[name]))
            for name, x in tree.items()
        }

    @cached_property
    def types(self) -> dict[str, Any]:
        """The types in which the layers get their matrices."""
        return {matrix.name: v.dtype for v in self.vectors for matrix in v.matrices}

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """The specs of one layer's matrices over the axes that XLA handles."""
        auto_axes = frozenset(self.shard.mesh.axis_names) - self.shard.rules.manual_axes()
        specs: dict[str, PartitionSpec] = {}
        for name in self.types:
            layer_spec = PartitionSpec(*self.layout.flat.specs[name][1:])
            specs[name] = self.shard.restrict(layer_spec, auto_axes)
        return specs

    @cached_property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of the matrices of one layer, in the engine's region."""
        manual_axes = self.shard.rules.manual_axes()
        matrices = {}
        for name, dtype in self.types.items():
            spec = self.shard.restrict(self.layout.flat.specs[name], manual_axes)
            sharding = jax.NamedSharding(self.shard.mesh, spec)
            local_shape = sharding.shard_shape(self.layout.memory_shapes[name].shape)
            matrices[name] = jax.ShapeDtypeStruct(local_shape[1:], dtype)
        return matrices


def vector_spec(layout: ModelLayout, vector: FlatVector) -> PartitionSpec:
    """Returns the spec of a vector in the engine's region: sharded over the axes that XLA
    handles.
    """
    auto_axes = frozenset(layout.shard.mesh.axis_names) - layout.shard.rules.manual_axes()
    axes = tuple(axis for axis in vector.shard_axes if axis in auto_axes) or None
    return PartitionSpec(None, axes) if vector.rows else PartitionSpec(axes)


def row_of(tree: Any, row: jax.Array | int) -> Any:
    """Returns a row of each array."""
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, row, keepdims=False), tree)


def with_row(stacked: Params, row: jax.Array, values: Params) -> Params:
    """Returns arrays [rows, ...] with a row replaced."""
    return {
        name: lax.dynamic_update_index_in_dim(x, values[name], row, 0)
        for name, x in stacked.items()
    }


def with_row_added(totals: Params, row: jax.Array, values: Params) -> Params:
    """Returns arrays [rows, ...] with values added to a row, in place inside a loop."""
    return with_row(totals, row, jax.tree.map(jnp.add, row_of(totals, row), values))


def zeros_on_device(like: Params) -> Params:
    """Returns zeros of these shapes and types, on the device wherever `like` is."""
    return {name: jnp.zeros(x.shape, x.dtype) for name, x in like.items()}


def _copied_to_device(x: jax.Array) -> jax.Array:
    """Returns an array on the device, whose host has it under optimizer.offload=master."""
    if jax.typeof(x).memory_space == jax.memory.Space.Host:
        return jax.device_put(x, jax.memory.Space.Device)
    return x
