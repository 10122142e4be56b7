"""Converts between flat vectors and the arrays of a checkpoint, one matrix at a time.

No device holds a complete matrix: each is also sharded over the replicas, as far as its dimensions
divide, so that each host writes a share of it. 48 replicas can shard a dimension of 16,384 only 16
ways; the mesh axis is then split into 3 x 16 for this array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mesh_lm.optim.contract import Params
from mesh_lm.parallel.flat import FlatLayout, FlatVector, Matrix
from sharding_rules import axes_of

_INNER = "_inner"
"""Suffix of the name of the inner part of a split mesh axis, which shards a dimension."""


def shard_over_replicas(
    sharding: NamedSharding, shape: Sequence[int], axes: Sequence[str], first: int
) -> NamedSharding:
    """Returns the sharding with mesh axes added, as far as the dimensions from `first` on divide.

    For an axis of n devices, the dimension whose local size has the largest common divisor with n
    is sharded by that divisor.
    """
    missing = len(shape) - len(sharding.spec)
    spec = [axes_of(entry) for entry in (*sharding.spec, *(None,) * missing)]
    local = list(sharding.shard_shape(tuple(shape)))
    mesh: Any = sharding.mesh
    for axis in axes:
        n = mesh.shape[axis]
        dim = max(range(first, len(local)), key=lambda d: math.gcd(n, local[d]), default=None)
        if dim is None:
            continue
        n_shards = math.gcd(n, local[dim])
        if n_shards == 1:
            continue
        inner = axis
        if n_shards < n:
            inner = f"{axis}{_INNER}"
            mesh = _split(mesh, axis, n_shards)
            spec = [_insert_after(entry, axis, inner) for entry in spec]
        spec[dim] = (*spec[dim], inner)
        local[dim] //= n_shards
    return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in spec)))


def extract_matrix(
    vector: FlatVector, matrix: Matrix, flat: jax.Array, sharding: NamedSharding
) -> jax.Array:
    """Returns one matrix of a flat vector, with all rows in memory.

    It is sharded as by `shard_over_replicas`. The vector is not donated.
    """
    return _extract_program(vector, matrix, sharding)(flat)


def unflatten_matrices(
    flat: FlatLayout, tree: Params, shardings: Mapping[str, NamedSharding]
) -> Params:
    """Returns a tree of arrays, such as gradients, with matrices in place of flat vectors.

    shardings: of the matrices.
    """
    arrays = {name: x for name, x in tree.items() if name not in flat.leaves}
    for vector in flat.vectors:
        for matrix in vector.matrices:
            name = matrix.name
            arrays[name] = extract_matrix(vector, matrix, tree[vector.name], shardings[name])
    return arrays


def zero_vector(vector: FlatVector, dtype: Any) -> jax.Array:
    """Returns zeros, for `insert_matrix` to fill."""
    return _zeros_program(vector, dtype)()


def insert_matrix(
    vector: FlatVector, matrix: Matrix, flat: jax.Array, array: jax.Array
) -> jax.Array:
    """Returns the vector with this matrix written into it. Donates the vector.

    array: the matrix, sharded as by `shard_over_replicas`.
    """
    return _insert_program(vector, matrix, array.sharding)(flat, array)


@functools.cache
def _zeros_program(vector: FlatVector, dtype: Any) -> Any:
    return jax.jit(lambda: jnp.zeros(vector.array_spec.shape, dtype), out_shardings=vector.sharding)


@functools.cache
def _extract_program(vector: FlatVector, matrix: Matrix, sharding: NamedSharding) -> Any:
    mesh: Any = sharding.mesh
    replica_dims = _replica_dims(sharding, vector)
    replica_axes = _refined_axes(mesh, vector.replica_axes)

    def extract(row: jax.Array) -> jax.Array:
        # The row is this shard of the vector, which begins at its element `begin`.
        begin = (lax.axis_index(replica_axes) if vector.replicas > 1 else 0) * vector.shard_size

        # This shard's part of the matrix with zeros around it; the sum over shards is the matrix.
        # Summing bits preserves -0.0.
        bits = lax.bitcast_convert_type(jnp.pad(row, matrix.size), f"uint{8 * row.dtype.itemsize}")
        # A negative index would count from the end.
        first = jnp.maximum(matrix.offset + matrix.size - begin, 0)
        bits = lax.dynamic_slice_in_dim(bits, first, matrix.size)
        if vector.replicas > 1:
            bits = lax.psum(bits, replica_axes)
        local = lax.bitcast_convert_type(bits, row.dtype).reshape(matrix.local)

        for dim, axis in replica_dims:
            size = local.shape[dim] // lax.axis_size(axis)
            local = lax.dynamic_slice_in_dim(local, lax.axis_index(axis) * size, size, dim)
        return local

    source = _refined_spec(mesh, vector.spec)
    body = jax.shard_map(
        lambda flat: vector.map_rows(extract, flat),
        mesh=mesh,
        in_specs=source,
        out_specs=sharding.spec,
        check_vma=False,
    )
    return jax.jit(body, in_shardings=NamedSharding(mesh, source), out_shardings=sharding)


@functools.cache
def _insert_program(vector: FlatVector, matrix: Matrix, sharding: NamedSharding) -> Any:
    mesh: Any = sharding.mesh
    replica_dims = _replica_dims(sharding, vector)
    replica_axes = _refined_axes(mesh, vector.replica_axes)

    def insert(rows: tuple[jax.Array, jax.Array]) -> jax.Array:
        row, part = rows  # this shard of the vector, and of the matrix
        for dim in sorted({dim for dim, _ in replica_dims}):
            axes = tuple(axis for axis_dim, axis in replica_dims if axis_dim == dim)
            part = lax.all_gather(part, axes, axis=dim, tiled=True)

        # The matrix with zeros around it is as long as the vector; this shard begins at `begin`.
        begin = (lax.axis_index(replica_axes) if vector.replicas > 1 else 0) * vector.shard_size
        padding = vector.shard_size * vector.replicas - matrix.offset - matrix.size
        local = lax.dynamic_slice_in_dim(
            jnp.pad(part.reshape(-1), (matrix.offset, padding)), begin, vector.shard_size
        )
        index = begin + jnp.arange(vector.shard_size)
        return jnp.where(
            (index >= matrix.offset) & (index < matrix.offset + matrix.size), local, row
        )

    target = _refined_spec(mesh, vector.spec)
    body = jax.shard_map(
        lambda flat, part: vector.map_rows(insert, (flat, part)),
        mesh=mesh,
        in_specs=(target, sharding.spec),
        out_specs=target,
        check_vma=False,
    )
    return jax.jit(
        body,
        in_shardings=(NamedSharding(mesh, target), sharding),
        out_shardings=vector.sharding,
        donate_argnums=0,  # the vector is filled in place, one matrix after another
    )


def _replica_dims(sharding: NamedSharding, vector: FlatVector) -> list[tuple[int, str]]:
    """Returns (dimension of one row, mesh axis) for each replica axis that shards a matrix."""
    replica_axes = _refined_axes(sharding.mesh, vector.replica_axes)
    entries = (*sharding.spec,)[bool(vector.rows) :]
    return [
        (dim, axis)
        for dim, entry in enumerate(entries)
        for axis in axes_of(entry)
        if axis in replica_axes
    ]


def _split(mesh: Mesh, axis: str, n_inner: int) -> Mesh:
    """Returns the mesh with one axis split into two, of which the outer one keeps its name.

    The order of devices is unchanged.
    """
    position = mesh.axis_names.index(axis)
    names = _insert_after(mesh.axis_names, axis, f"{axis}{_INNER}")
    sizes = list(mesh.devices.shape)
    sizes[position : position + 1] = [sizes[position] // n_inner, n_inner]
    return Mesh(mesh.devices.reshape(sizes), names)


def _insert_after(axes: Sequence[str], axis: str, inner: str) -> tuple[str, ...]:
    """Returns mesh axes with `inner` after `axis`, if that is one of them."""
    if axis not in axes:
        return tuple(axes)
    end = axes.index(axis) + 1
    return (*axes[:end], inner, *axes[end:])


def _refined_axes(mesh: Any, axes: Sequence[str]) -> tuple[str, ...]:
    """Returns mesh axes with both parts of each axis that `mesh` has split."""
    refined: tuple[str, ...] = tuple(axes)
    for axis in axes:
        inner = f"{axis}{_INNER}"
        if inner in mesh.axis_names:
            refined = _insert_after(refined, axis, inner)
    return refined


def _refined_spec(mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(*(_refined_axes(mesh, axes_of(entry)) or None for entry in spec))
