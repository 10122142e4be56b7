"""The distributed optimizer's layout: matrices as padded vectors that are sharded over the
replicas, whatever their dimensions.

The layers use `params`, in which each matrix is replicated, in the type that layers cast it to. The
fp32 master and the optimizer's slots are flat: for each layer, the matrices of its segment with the
same sharding are concatenated into one vector, which is padded so that it divides by any number of
replicas, and each replica has one shard. One reduce-scatter sums the gradients; one all-gather
makes `params` from the new master (as in Megatron-LM's distributed optimizer and ZeRO-1, arXiv
1910.02054).

Checkpoints have no flat vectors: on disk a matrix is one array (`mesh_lm.state.disk_form`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh_lm.optim.contract import ArraySpec, Params, is_matrix
from mesh_lm.parallel.reductions import int8_reduce_scatter
from sharding_rules import Rules, axes_of
from sharding_rules.rules import FLAT

_F32 = jnp.dtype("float32")
_ALIGNED = 128
"""Shards of a vector are multiples of this many elements, so that each starts at an address where
copies and collectives are fast."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """The place of one parameter in a vector."""

    name: str
    local: tuple[int, ...]
    """Shape of the shard that one device has of the parameter, or of one layer of it."""
    offset: int
    """Index of its first element in the vector."""

    @property
    def size(self) -> int:
        """Elements on one device."""
        return math.prod(self.local)


@dataclasses.dataclass(frozen=True)
class FlatVector:
    """A vector [rows, n] with the matrices of a segment that have the same sharding, a layer a row;
    or [n] with one other matrix.
    """

    name: str
    mesh: Any
    matrices: tuple[Matrix, ...]
    rows: int
    """Rows of the stacked parameters in memory, over all stages; 0: the parameter is not
    stacked."""
    dtype: Any
    """Type of the matrices that layers use."""
    replica_axes: tuple[str, ...]
    """The mesh axes of the replicas: they shard the vector, and the matrices are replicated along
    them."""
    shard_axes: tuple[str, ...]
    """The mesh axes that shard the matrices themselves. Those that the engine is manual over come
    first."""
    gathered_by_layer: bool = False
    """Whether the layers have no copy of the matrices: each gathers its own from the master when it
    runs (ZeRO-3)."""
    node_axis: str = ""
    """The one of the replicas' axes that is inside a node, the first of them; empty: none
    (`Rules.node_axis`)."""

    @property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """The replicas' axes in the order in which a sum goes through them: inside a node first,
        then across nodes.
        """
        across = tuple(axis for axis in self.replica_axes if axis != self.node_axis)
        return tuple(
            level for level in ((self.node_axis,) if self.node_axis else (), across) if level
        )

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        return math.prod(self.mesh.shape[axis] for axis in self.replica_axes)

    @property
    def shard_size(self) -> int:
        """Elements of a row on one device, padding included."""
        last = self.matrices[-1]
        unit = self.replicas * _ALIGNED
        return -(-(last.offset + last.size) // unit) * _ALIGNED

    @property
    def array_spec(self) -> ArraySpec:
        """The vector as an array of the state."""
        n = (
            self.shard_size
            * self.replicas
            * math.prod(self.mesh.shape[axis] for axis in self.shard_axes)
        )
        return (
            ArraySpec((self.rows, n), _F32, ("layers", FLAT), "flat")
            if self.rows
            else ArraySpec((n,), _F32, (FLAT,), "flat")
        )

    @property
    def spec(self) -> PartitionSpec:
        """The PartitionSpec of the vector: sharded over the replicas' axes first, then over those
        of the matrices.
        """
        flat = (*self.replica_axes, *self.shard_axes) or None
        return PartitionSpec("pipeline", flat) if self.rows else PartitionSpec(flat)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of the vector on this layout's mesh."""
        return NamedSharding(self.mesh, self.spec)

    # The following methods run on one device, inside a region that is manual over every mesh axis.

    def pack(self, row: Mapping[str, jax.Array]) -> jax.Array:
        """A device's shards of the matrices of one layer -> [shard_size * replicas],
        zero-padded.
        """
        parts = [row[matrix.name].reshape(-1) for matrix in self.matrices]
        row_vector = jnp.concatenate(parts)
        return jnp.pad(row_vector, (0, self.shard_size * self.replicas - row_vector.size))

    def unpack(self, row: jax.Array) -> Params:
        """The inverse of `pack`."""
        return {m.name: row[m.offset : m.offset + m.size].reshape(m.local) for m in self.matrices}

    def map_rows(self, f: Callable[[Any], Any], local: Any) -> Any:
        """f(row) for all rows that a device holds, in a loop, so that at most one extra row is in
        memory.
        """
        return lax.scan(lambda _, row: (None, f(row)), None, local)[1] if self.rows else f(local)

    def reduce_scatter(self, grads: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        """This replica's gradients of the matrices -> its shard of the sum over the replicas,
        float32, summed in `dtype`.
        """
        own = {matrix.name: grads[matrix.name] for matrix in self.matrices}
        return self.map_rows(lambda row: self.reduce_scatter_row(row, dtype), own)

    def reduce_scatter_row(self, row: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        """`reduce_scatter` of one layer."""
        vector = self.pack(row).astype(dtype)
        for level in self.levels:
            vector = lax.psum_scatter(vector, level, tiled=True)
        return vector.astype(jnp.float32)

    def int8_reduce_scatter(
        self, grads: Mapping[str, jax.Array], so_far: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Params]:
        """(`reduce_scatter` in int8, what rounding has left out) of gradients plus what was left
        out so far.

        See `mesh_lm.parallel.feedback`.
        """

        def row(arrays: tuple[Params, Params]) -> tuple[jax.Array, Params]:
            vector, left_out = int8_reduce_scatter(
                self.pack(arrays[0]) + self.pack(arrays[1]), self.replica_axes
            )
            return vector, {name: x[None] for name, x in self.unpack(left_out).items()}

        own = tuple(
            {matrix.name: each[matrix.name] for matrix in self.matrices} for each in (grads, so_far)
        )
        return self.map_rows(row, own)

    def all_gather(self, shard: jax.Array) -> Params:
        """A shard of the master -> the matrices as the layers use them."""
        return self.map_rows(self.all_gather_row, shard)

    def all_gather_row(self, row: jax.Array) -> Params:
        """`all_gather` of one layer."""
        # The barrier keeps the cast before the all-gather: XLA would gather fp32 and then cast.
        row = lax.optimization_barrier(row.astype(self.dtype))
        for level in reversed(self.levels):
            row = lax.all_gather(row, level, tiled=True)
        return self.unpack(row)


@dataclasses.dataclass(frozen=True)
class FlatLayout:
    """The flat vectors of a model's parameters, and the matrices in them."""

    vectors: tuple[FlatVector, ...] = ()
    specs: Mapping[str, PartitionSpec] = dataclasses.field(default_factory=dict)
    """PartitionSpecs of the matrices, as the layers use them."""

    @classmethod
    def of(
        cls,
        rules: Rules,
        leaves: Mapping[str, ArraySpec],
        where: Mapping[str, NamedSharding],
        compute: Mapping[str, Any],
        segment_of: Callable[[str], str],
    ) -> FlatLayout:
        """The flat layout of parameters in memory: leaves, shardings and compute types by name."""
        groups: dict[tuple[Any, ...], list[str]] = {}
        for name, leaf in leaves.items():
            replica_axes = replica_axes_of(rules, segment_of(name))
            if not replica_axes or not is_matrix(name, leaf.axes):
                continue
            own_axes = {a for entry in where[name].spec for a in axes_of(entry)}
            sizes = where[name].mesh.shape
            replica_axes = tuple(a for a in replica_axes if sizes[a] > 1 and a not in own_axes)
            # a shard is a part of its node's
            replica_axes = tuple(sorted(replica_axes, key=lambda a: a != rules.node_axis))
            manual = rules.manual_axes()
            shard_axes = sorted(
                (
                    a
                    for a in sizes
                    if a in own_axes and sizes[a] > 1 and not (leaf.stacked and a == "pipeline")
                ),
                key=lambda a: a not in manual,
            )
            part = segment_of(name) if leaf.stacked else name
            groups.setdefault(
                (part, tuple(shard_axes), replica_axes, str(compute[name])), []
            ).append(name)
        parts = [key[0] for key in groups]
        vectors = []
        for (part, shard_axes, replica_axes, dtype), names in groups.items():
            leaf, sharding = leaves[names[0]], where[names[0]]
            rows, by_layer = (
                leaf.shape[0] if leaf.stacked else 0,
                leaf.stacked and bool(gathered_axes_of(rules, part)),
            )
            local_shapes = [
                where[n].shard_shape(leaves[n].shape)[int(leaf.stacked) :] for n in names
            ]
            offsets = itertools.accumulate((math.prod(local) for local in local_shapes), initial=0)
            matrices = tuple(
                Matrix(*each) for each in zip(names, local_shapes, offsets, strict=False)
            )
            vector_name = (
                part
                if not leaf.stacked
                else f"{part}/{'+'.join(shard_axes) or 'whole'}"
                + (f"/{dtype}" if parts.count(part) > 1 else "")
            )
            node = rules.node_axis if rules.node_axis in replica_axes else ""
            vectors.append(
                FlatVector(
                    vector_name,
                    sharding.mesh,
                    matrices,
                    rows,
                    jnp.dtype(dtype),
                    replica_axes,
                    shard_axes,
                    by_layer,
                    node,
                )
            )
        specs = {m.name: where[m.name].spec for v in vectors for m in v.matrices}
        return cls(tuple(vectors), specs)

    @cached_property
    def names(self) -> frozenset[str]:
        """The parameters that are flat."""
        return frozenset(self.specs)

    @cached_property
    def gathered_names(self) -> frozenset[str]:
        """The parameters that each layer gathers when it runs. The layers have a copy of all
        others.
        """
        return frozenset(m.name for v in self.vectors if v.gathered_by_layer for m in v.matrices)

    def gathered_by(self, segment: str) -> list[FlatVector]:
        """The vectors of a segment whose layers gather their own matrices."""
        return [
            v for v in self.vectors if v.gathered_by_layer and v.name.partition("/")[0] == segment
        ]

    @cached_property
    def leaves(self) -> dict[str, ArraySpec]:
        """The vectors, by their names."""
        return {vector.name: vector.array_spec for vector in self.vectors}

    @cached_property
    def shardings(self) -> dict[str, NamedSharding]:
        """The shardings of the vectors, by name."""
        return {vector.name: vector.sharding for vector in self.vectors}

    @cached_property
    def compute_dtypes(self) -> dict[str, Any]:
        """The types of the flat parameters that the layers use."""
        return {matrix.name: vector.dtype for vector in self.vectors for matrix in vector.matrices}

    def compute_params(self, masters: Params, every: bool = False) -> Params:
        """The flat parameters of which the layers have a copy, from the vectors of the master: one
        all-gather per layer.

        every: also those that each layer gathers when it runs.
        """
        vectors = [vector for vector in self.vectors if every or not vector.gathered_by_layer]

        def gathered(shards: Params) -> Params:
            out: Params = {}
            for vector in vectors:
                out |= vector.all_gather(serialized_on_cpu(shards[vector.name], out, vector.mesh))
            return out

        if not vectors:
            return {}
        shards = {vector.name: vector.spec for vector in vectors}
        mesh, specs = (
            vectors[0].mesh,
            {m.name: self.specs[m.name] for vector in vectors for m in vector.matrices},
        )
        return jax.shard_map(
            gathered, mesh=mesh, in_specs=(shards,), out_specs=specs, check_vma=False
        )({name: masters[name] for name in shards})

    def reduce_scatter(
        self,
        grads: Mapping[str, jax.Array],
        before: Any,
        so_far: Mapping[str, jax.Array],
        dtype: Any,
    ) -> tuple[Params, Params]:
        """On one device: this replica's gradients of the matrices -> (its shard of the sum, for
        each vector; what is left out).

        grads: gradients of other parameters among them are summed already, as `before` is. Those of
        vectors that layers gather are not among them: the layers sum them. so_far: of matrices
        whose gradients are summed in int8, what earlier sums have left out.
        """
        out: Params = {}
        left_out: Params = {}
        before = before, {name: g for name, g in grads.items() if name not in self.names}
        for vector in self.vectors:
            if vector.gathered_by_layer:
                continue
            local = {
                m.name: serialized_on_cpu(grads[m.name], (before, out), vector.mesh)
                for m in vector.matrices
            }
            if vector.matrices[0].name in so_far:
                out[vector.name], new = vector.int8_reduce_scatter(local, so_far)
                left_out |= new
            else:
                out[vector.name] = vector.reduce_scatter(local, dtype)
        return out, left_out


def serialized_on_cpu(x: jax.Array, before: Any, mesh: Any) -> jax.Array:
    """x. On CPUs it depends on all arrays in `before`, so that collectives that read it come after
    those that make them.

    XLA:CPU starts independent collectives inside and outside of a loop in any order, so that two
    processes may confuse one with the other. Multiplied by 1 + 0 y, x keeps its bits if y is
    finite; if it is not, the step is skipped anyway.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return x
    first = [y.ravel()[0].astype(jnp.float32) for y in jax.tree.leaves(before)]
    return x * (1 + 0 * jnp.stack(first).sum()).astype(x.dtype) if first else x


def replica_axes_of(rules: Rules, segment: str) -> tuple[str, ...]:
    """The mesh axes that shard the flat vectors of a segment, or of a parameter outside of
    segments; empty: its matrices are not flat.
    """
    row = rules.row("optimizer", f"{segment}/{FLAT}")
    return axes_of(rules.column("optimizer")[row]) if row else ()


def gathered_axes_of(rules: Rules, segment: str) -> tuple[str, ...]:
    """The mesh axes over which each layer of a segment gathers its flat matrices; empty: the layers
    have a copy of them.
    """
    row = rules.row("params", f"{segment}/{FLAT}")
    return axes_of(rules.params[row]) if row else ()
