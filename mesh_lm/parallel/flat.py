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
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, NamedTuple

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
    """The first of the replicas' axes, if its devices are in one node (`Rules.node_axis`); else
    empty."""

    @property
    def levels(self) -> tuple[tuple[str, ...], ...]:
        """The replicas' axes in the order in which a sum goes through them: inside a node first,
        then across nodes.
        """
        inside = tuple(axis for axis in self.replica_axes if axis == self.node_axis)
        across = tuple(axis for axis in self.replica_axes if axis != self.node_axis)
        return tuple(level for level in (inside, across) if level)

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
        n_shards = math.prod(self.mesh.shape[axis] for axis in self.shard_axes)
        n = self.shard_size * self.replicas * n_shards
        if self.rows:
            return ArraySpec((self.rows, n), _F32, ("layers", FLAT), "flat")
        return ArraySpec((n,), _F32, (FLAT,), "flat")

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
        """Returns a device's shards of the matrices of one layer as a vector
        [shard_size * replicas], zero-padded.
        """
        parts = [row[matrix.name].reshape(-1) for matrix in self.matrices]
        row_vector = jnp.concatenate(parts)
        return jnp.pad(row_vector, (0, self.shard_size * self.replicas - row_vector.size))

    def unpack(self, row: jax.Array) -> Params:
        """Returns the matrices of a vector: the inverse of `pack`."""
        return {m.name: row[m.offset : m.offset + m.size].reshape(m.local) for m in self.matrices}

    def map_rows(self, f: Callable[[Any], Any], local: Any) -> Any:
        """Returns f(row) for all rows that a device has, in a loop, so that at most one extra row
        is in memory.
        """
        if not self.rows:
            return f(local)
        return lax.scan(lambda _, row: (None, f(row)), None, local)[1]

    def reduce_scatter(self, grads: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        """Returns this replica's shard of the sum over the replicas, float32, summed in `dtype`.

        grads: this replica's gradients of the matrices, and perhaps of others.
        """
        matrix_grads = {matrix.name: grads[matrix.name] for matrix in self.matrices}
        return self.map_rows(lambda row: self.reduce_scatter_row(row, dtype), matrix_grads)

    def reduce_scatter_row(self, row: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
        """Returns `reduce_scatter` of one layer."""
        vector = self.pack(row).astype(dtype)
        # One reduce-scatter a level: inside a node, then of a device's part across nodes.
        for level in self.levels:
            vector = lax.psum_scatter(vector, level, tiled=True)
        return vector.astype(jnp.float32)

    def int8_reduce_scatter(
        self, grads: Mapping[str, jax.Array], old_feedback: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, Params]:
        """Returns (`reduce_scatter` in int8, what rounding has left out so far).

        old_feedback: what it had left out before, which is added to the gradients. See
        `mesh_lm.parallel.feedback`.
        """

        def reduce_row(arrays: tuple[Params, Params]) -> tuple[jax.Array, Params]:
            row_grads, row_feedback = arrays
            vector, left_out = int8_reduce_scatter(
                self.pack(row_grads) + self.pack(row_feedback), self.replica_axes
            )
            return vector, {name: x[None] for name, x in self.unpack(left_out).items()}

        matrix_grads = {matrix.name: grads[matrix.name] for matrix in self.matrices}
        matrix_feedback = {matrix.name: old_feedback[matrix.name] for matrix in self.matrices}
        return self.map_rows(reduce_row, (matrix_grads, matrix_feedback))

    def all_gather(self, shard: jax.Array) -> Params:
        """Returns the matrices as the layers use them, from a shard of the master."""
        return self.map_rows(self.all_gather_row, shard)

    def all_gather_row(self, row: jax.Array) -> Params:
        """Returns `all_gather` of one layer."""
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
        shardings: Mapping[str, NamedSharding],
        compute_dtypes: Mapping[str, Any],
        segment_of: Callable[[str], str],
    ) -> FlatLayout:
        """Returns the flat layout of parameters in memory: leaves, shardings and compute types by
        name.
        """
        groups: dict[_Group, list[str]] = {}
        for name, leaf in leaves.items():
            if replica_axes_of(rules, segment_of(name)) and is_matrix(name, leaf.axes):
                group = _group_of(
                    rules, name, leaf, shardings[name], compute_dtypes[name], segment_of(name)
                )
                groups.setdefault(group, []).append(name)
        parts = [group.part for group in groups]
        vectors = []
        for group, names in groups.items():
            leaf = leaves[names[0]]
            sharding = shardings[names[0]]
            # One layer of a device's shard of each matrix, one after the other.
            matrices = []
            offset = 0
            for name in names:
                local = shardings[name].shard_shape(leaves[name].shape)[int(leaf.stacked) :]
                matrices.append(Matrix(name, local, offset))
                offset += math.prod(local)
            vectors.append(
                FlatVector(
                    name=group.vector_name(leaf.stacked, parts.count(group.part) > 1),
                    mesh=sharding.mesh,
                    matrices=tuple(matrices),
                    rows=leaf.shape[0] if leaf.stacked else 0,
                    dtype=jnp.dtype(group.dtype),
                    replica_axes=group.replica_axes,
                    shard_axes=group.shard_axes,
                    gathered_by_layer=leaf.stacked and bool(gathered_axes_of(rules, group.part)),
                    node_axis=rules.node_axis if rules.node_axis in group.replica_axes else "",
                )
            )
        specs = {m.name: shardings[m.name].spec for v in vectors for m in v.matrices}
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
        """Returns the vectors of a segment whose layers gather their own matrices."""
        gathered = [vector for vector in self.vectors if vector.gathered_by_layer]
        return [vector for vector in gathered if vector.name.partition("/")[0] == segment]

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
        """Returns the flat parameters of which the layers have a copy, from the vectors of the
        master: one all-gather per layer.

        every: also the parameters that each layer gathers when it runs.
        """
        vectors = [vector for vector in self.vectors if every or not vector.gathered_by_layer]
        if not vectors:
            return {}

        def all_gather(shards: Params) -> Params:
            # The distributed optimizer's all-gather, after its update.
            params: Params = {}
            for vector in vectors:
                shard = serialized_on_cpu(shards[vector.name], params, vector.mesh)
                params |= vector.all_gather(shard)
            return params

        shard_specs = {vector.name: vector.spec for vector in vectors}
        param_specs = {m.name: self.specs[m.name] for vector in vectors for m in vector.matrices}
        run = jax.shard_map(
            all_gather,
            mesh=vectors[0].mesh,
            in_specs=(shard_specs,),
            out_specs=param_specs,
            check_vma=False,
        )
        return run({name: masters[name] for name in shard_specs})

    def reduce_scatter(
        self,
        grads: Mapping[str, jax.Array],
        earlier: Any,
        old_feedback: Mapping[str, jax.Array],
        dtype: Any,
    ) -> tuple[Params, Params]:
        """Returns, on one device, (this replica's shard of the sum for each vector, the new error
        feedback).

        Args:
          grads: this replica's gradients of the matrices, without those of vectors that layers
            gather: the layers sum them. Gradients of other parameters among them are summed
            already.
          earlier: arrays whose collectives come before these.
          old_feedback: of matrices whose gradients are summed in int8, what earlier sums have left
            out.
        """
        shards: Params = {}
        new_feedback: Params = {}
        earlier = earlier, {name: g for name, g in grads.items() if name not in self.names}
        for vector in self.vectors:
            if vector.gathered_by_layer:
                continue
            matrix_grads = {
                m.name: serialized_on_cpu(grads[m.name], (earlier, shards), vector.mesh)
                for m in vector.matrices
            }
            if vector.matrices[0].name in old_feedback:
                shards[vector.name], feedback = vector.int8_reduce_scatter(
                    matrix_grads, old_feedback
                )
                new_feedback |= feedback
            else:
                shards[vector.name] = vector.reduce_scatter(matrix_grads, dtype)
        return shards, new_feedback


class _Group(NamedTuple):
    """The matrices of one vector have these in common."""

    part: str
    """The segment, or the name of a parameter outside of segments."""
    shard_axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    dtype: str

    def vector_name(self, stacked: bool, is_one_of_several: bool) -> str:
        """Returns the name of the vector, which is saved nowhere."""
        if not stacked:
            return self.part
        name = f"{self.part}/{'+'.join(self.shard_axes) or 'whole'}"
        return f"{name}/{self.dtype}" if is_one_of_several else name


def _group_of(
    rules: Rules, name: str, leaf: ArraySpec, sharding: NamedSharding, dtype: Any, segment: str
) -> _Group:
    """Returns the group of one matrix, whose vector is sharded over its replicas."""
    sizes = sharding.mesh.shape
    sharded_axes = {axis for entry in sharding.spec for axis in axes_of(entry)}
    replica_axes = [
        axis
        for axis in replica_axes_of(rules, segment)
        if sizes[axis] > 1 and axis not in sharded_axes
    ]
    # The axis inside a node comes first, so that a device's shard is a part of its node's.
    replica_axes.sort(key=lambda axis: axis != rules.node_axis)
    shard_axes = [axis for axis in sizes if axis in sharded_axes and sizes[axis] > 1]
    if leaf.stacked and "pipeline" in shard_axes:
        shard_axes.remove("pipeline")  # shards the rows
    manual_axes = rules.manual_axes()
    shard_axes.sort(key=lambda axis: axis not in manual_axes)
    part = segment if leaf.stacked else name
    return _Group(part, tuple(shard_axes), tuple(replica_axes), str(dtype))


def serialized_on_cpu(x: jax.Array, earlier: Any, mesh: Any) -> jax.Array:
    """Returns x. On CPUs it depends on all arrays in `earlier`, so that collectives that read it
    come after those that make them.

    XLA:CPU starts independent collectives inside and outside of a loop in any order, so that two
    processes may confuse one with the other. Multiplied by 1 + 0 y, x keeps its bits if y is
    finite; if it is not, the step is skipped anyway.
    """
    if mesh.devices.flat[0].platform != "cpu":
        return x
    elements = [y.ravel()[0].astype(jnp.float32) for y in jax.tree.leaves(earlier)]
    if not elements:
        return x
    return x * (1 + 0 * jnp.stack(elements).sum()).astype(x.dtype)


def replica_axes_of(rules: Rules, segment: str) -> tuple[str, ...]:
    """Returns the mesh axes that shard the flat vectors of a segment, or of a parameter outside of
    segments; empty: its matrices are not flat.
    """
    row = rules.row("optimizer", f"{segment}/{FLAT}")
    return axes_of(rules.column("optimizer")[row]) if row else ()


def gathered_axes_of(rules: Rules, segment: str) -> tuple[str, ...]:
    """Returns the mesh axes over which each layer of a segment gathers its flat matrices; empty:
    the layers have a copy of them.
    """
    row = rules.row("params", f"{segment}/{FLAT}")
    return axes_of(rules.params[row]) if row else ()
