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


class LayerCollectives:
    """Gathers one row of a segment's vectors, and sums the gradients of one layer."""

    def __init__(self, layout: ModelLayout, segment: str) -> None:
        self.layout, self.shard, self.vectors = (
            layout,
            layout.shard,
            layout.flat.gathered_by(segment),
        )

    def gather(self, vectors: Params, row: jax.Array, after: jax.Array) -> tuple[Params, jax.Array]:
        """(the matrices of the layer in a row, `finished` of them). vectors: those of this segment,
        and perhaps of others.
        """

        def on_device(
            vectors: Params, row: jax.Array, after: jax.Array
        ) -> tuple[Params, jax.Array]:
            out: Params = {}
            for vector in self.vectors:
                shard = lax.dynamic_index_in_dim(vectors[vector.name], row, keepdims=False)
                out |= vector.all_gather_row(self.ordered(shard, after))
                after = self._finished(out[vector.matrices[0].name], after)
            return out, after

        specs = {vector.name: local_spec(self.layout, vector) for vector in self.vectors}
        run = self.shard.shard_map(
            on_device, (specs, PartitionSpec(), PartitionSpec()), (self.specs, PartitionSpec())
        )
        used, after = run({name: vectors[name] for name in specs}, row, after)
        return {name: w.astype(self.types[name]) for name, w in used.items()}, after

    def reduce(self, grads: Params, after: jax.Array) -> tuple[Params, jax.Array]:
        """(this replica's shards of a layer's gradients, summed over the replicas, `finished` of
        them).
        """
        dtype = jnp.bfloat16 if self.shard.rules.reduction == "bfloat16" else jnp.float32

        def on_device(grads: Params, after: jax.Array) -> tuple[Params, jax.Array]:
            out: Params = {}
            for vector in self.vectors:
                own = {m.name: self.ordered(grads[m.name], after) for m in vector.matrices}
                out[vector.name] = vector.reduce_scatter_row(own, dtype)
                after = self._finished(out[vector.name], after)
            return out, after

        specs = {
            vector.name: PartitionSpec(*local_spec(self.layout, vector)[1:])
            for vector in self.vectors
        }
        return self.shard.shard_map(
            on_device, (self.specs, PartitionSpec()), (specs, PartitionSpec())
        )(grads, after)

    # XLA:CPU starts independent collectives in any order, so that devices may wait for one another:
    # there, each waits for those before it.

    def finished(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        """On CPUs, a number that exists once x does, which is sharded by `spec`."""
        if not self.on_cpu:
            return jnp.float32(0)
        return self.shard.shard_map(
            lambda x: self._finished(x, jnp.float32(0)), spec, PartitionSpec()
        )(x)

    def ordered(self, x: jax.Array, after: jax.Array) -> jax.Array:
        """x, on CPUs not before `after` exists. It keeps its bits if what comes before is finite;
        if it is not, the step is skipped.
        """
        return x * (1 + 0 * after).astype(x.dtype) if self.on_cpu else x

    def _finished(self, x: jax.Array, after: jax.Array) -> jax.Array:
        return x.ravel()[0].astype(jnp.float32) if self.on_cpu else after

    @property
    def on_cpu(self) -> bool:
        """Whether the program is for CPUs."""
        return self.shard.mesh.devices.flat[0].platform == "cpu"

    # Shapes and shardings.

    def of_matrices(self, tree: Params) -> Params:
        """Matrices of one layer, or their gradients, sharded as the layer uses them."""
        return {name: lax.with_sharding_constraint(x, self.specs[name]) for name, x in tree.items()}

    def of_stacked(self, tree: Params) -> Params:
        """The same for stacks of them, [rows, ...]."""
        return {
            name: lax.with_sharding_constraint(x, PartitionSpec(None, *self.specs[name]))
            for name, x in tree.items()
        }

    @cached_property
    def types(self) -> dict[str, Any]:
        """The types in which the layers get their matrices."""
        return {m.name: v.dtype for v in self.vectors for m in v.matrices}

    @cached_property
    def specs(self) -> dict[str, PartitionSpec]:
        """The specs of one layer's matrices over the axes that XLA handles."""
        auto = frozenset(self.shard.mesh.axis_names) - self.shard.rules.manual_axes()
        return {
            name: self.shard.restrict(PartitionSpec(*self.layout.flat.specs[name][1:]), auto)
            for name in self.types
        }

    @cached_property
    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The matrices of one layer."""
        by_hand = self.shard.rules.manual_axes()
        out = {}
        for name, dtype in self.types.items():
            where = jax.NamedSharding(
                self.shard.mesh, self.shard.restrict(self.layout.flat.specs[name], by_hand)
            )
            out[name] = jax.ShapeDtypeStruct(
                where.shard_shape(self.layout.memory_shapes[name].shape)[1:], dtype
            )
        return out


def local_spec(layout: ModelLayout, vector: FlatVector) -> PartitionSpec:
    """The spec of a vector in the engine's region: sharded over the axes that XLA handles."""
    auto = frozenset(layout.shard.mesh.axis_names) - layout.shard.rules.manual_axes()
    return PartitionSpec(
        *(None,) * bool(vector.rows), tuple(a for a in vector.shard_axes if a in auto) or None
    )


def row_of(tree: Any, row: jax.Array | int) -> Any:
    """A row of each array."""
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, row, keepdims=False), tree)


def with_row(stacked: Params, row: jax.Array, values: Params) -> Params:
    """Arrays [rows, ...] with a row replaced."""
    return {
        name: lax.dynamic_update_index_in_dim(x, values[name], row, 0)
        for name, x in stacked.items()
    }
