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
    sharding: NamedSharding, shape: Sequence[int], over: Sequence[str], first: int
) -> NamedSharding:
    """The sharding with the mesh axes `over` added, as far as the dimensions from `first` on
    divide.

    For an axis of n devices, the dimension whose local size has the largest common divisor with n
    is sharded by that divisor.
    """
    spec = [
        axes_of(entry) for entry in (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    ]
    local = list(sharding.shard_shape(tuple(shape)))
    mesh: Any = sharding.mesh
    for axis in over:
        n = mesh.shape[axis]
        n_shards, dim = max(
            ((math.gcd(n, local[dim]), -dim) for dim in range(first, len(shape))), default=(1, 0)
        )
        if n_shards == 1:
            continue
        inner = axis
        if n_shards < n:
            mesh, inner = _split(mesh, axis, n_shards), f"{axis}{_INNER}"
            spec = [
                tuple(b for a in entry for b in ((axis, inner) if a == axis else (a,)))
                for entry in spec
            ]
        spec[-dim] = (*spec[-dim], inner)
        local[-dim] //= n_shards
    return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in spec)))


def extract_matrix(
    vector: FlatVector, matrix: Matrix, flat: jax.Array, sharding: NamedSharding
) -> jax.Array:
    """One matrix of a flat vector, with all rows in memory, sharded as by `shard_over_replicas`.
    The vector is not donated.
    """
    return _out(vector, matrix, sharding)(flat)


def unflatten_matrices(
    flat: FlatLayout, tree: Params, where: Mapping[str, NamedSharding]
) -> Params:
    """A tree of arrays, such as gradients, with matrices in place of flat vectors. where: the
    shardings of the matrices.
    """
    matrices = {
        m.name: extract_matrix(vector, m, tree[vector.name], where[m.name])
        for vector in flat.vectors
        for m in vector.matrices
    }
    return {**{name: x for name, x in tree.items() if name not in flat.leaves}, **matrices}


@functools.cache
def _zeros(vector: FlatVector, dtype: Any) -> Any:
    return jax.jit(lambda: jnp.zeros(vector.array_spec.shape, dtype), out_shardings=vector.sharding)


def zero_vector(vector: FlatVector, dtype: Any) -> jax.Array:
    """Zeros, for `insert_matrix` to fill."""
    return _zeros(vector, dtype)()


def insert_matrix(
    vector: FlatVector, matrix: Matrix, flat: jax.Array, array: jax.Array
) -> jax.Array:
    """The vector with this matrix written into it. array: sharded as by `shard_over_replicas`.
    Donates the vector.
    """
    return _into(vector, matrix, array.sharding)(flat, array)


@functools.cache
def _out(vector: FlatVector, matrix: Matrix, sharding: NamedSharding) -> Any:
    mesh: Any = sharding.mesh
    dims, over = _replica_dims(sharding, vector), _on(mesh, vector.replica_axes)

    def extract(row: jax.Array) -> jax.Array:
        # This shard's part of the matrix with zeros around it; the sum over shards is the matrix.
        # Summing bits preserves -0.0.
        begin = (lax.axis_index(over) if vector.replicas > 1 else 0) * vector.shard_size
        bits = lax.bitcast_convert_type(jnp.pad(row, matrix.size), f"uint{8 * row.dtype.itemsize}")
        # a negative index would count from the end
        first = jnp.maximum(matrix.offset + matrix.size - begin, 0)
        bits = lax.dynamic_slice_in_dim(bits, first, matrix.size)
        bits = lax.psum(bits, over) if vector.replicas > 1 else bits
        local = lax.bitcast_convert_type(bits, row.dtype).reshape(matrix.local)
        for dim, axis in dims:
            size = local.shape[dim] // lax.axis_size(axis)
            local = lax.dynamic_slice_in_dim(local, lax.axis_index(axis) * size, size, dim)
        return local

    source = _refined(vector.spec, mesh)
    body = jax.shard_map(
        lambda held: vector.map_rows(extract, held),
        mesh=mesh,
        in_specs=source,
        out_specs=sharding.spec,
        check_vma=False,
    )
    return jax.jit(body, in_shardings=NamedSharding(mesh, source), out_shardings=sharding)


@functools.cache
def _into(vector: FlatVector, matrix: Matrix, sharding: NamedSharding) -> Any:
    mesh: Any = sharding.mesh
    dims, over = _replica_dims(sharding, vector), _on(mesh, vector.replica_axes)

    def insert(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        held, part = row
        for dim in sorted({dim for dim, _ in dims}):
            part = lax.all_gather(
                part, tuple(axis for at, axis in dims if at == dim), axis=dim, tiled=True
            )
        begin = (lax.axis_index(over) if vector.replicas > 1 else 0) * vector.shard_size
        rest = vector.shard_size * vector.replicas - matrix.offset - matrix.size
        local = lax.dynamic_slice_in_dim(
            jnp.pad(part.reshape(-1), (matrix.offset, rest)), begin, vector.shard_size
        )
        index = begin + jnp.arange(vector.shard_size)
        return jnp.where(
            (index >= matrix.offset) & (index < matrix.offset + matrix.size), local, held
        )

    target = _refined(vector.spec, mesh)
    body = jax.shard_map(
        lambda held, part: vector.map_rows(insert, (held, part)),
        mesh=mesh,
        in_specs=(target, sharding.spec),
        out_specs=target,
        check_vma=False,
    )
    where = NamedSharding(mesh, target)
    return jax.jit(
        body, in_shardings=(where, sharding), out_shardings=vector.sharding, donate_argnums=0
    )


def _replica_dims(sharding: NamedSharding, vector: FlatVector) -> list[tuple[int, str]]:
    """(dimension of one row, mesh axis) for each replica axis that shards a matrix."""
    mesh: Any = sharding.mesh
    over = {b for axis in vector.replica_axes for b in _parts(mesh, axis)}
    entries = (*sharding.spec,)[bool(vector.rows) :]
    return [
        (dim, axis) for dim, entry in enumerate(entries) for axis in axes_of(entry) if axis in over
    ]


def _split(mesh: Mesh, axis: str, inner: int) -> Mesh:
    """The mesh with one axis split into two, of which the outer one keeps its name. The order of
    devices is unchanged.
    """
    at, sizes = mesh.axis_names.index(axis), list(mesh.devices.shape)
    names = [*mesh.axis_names[: at + 1], f"{axis}{_INNER}", *mesh.axis_names[at + 1 :]]
    shape = [*sizes[:at], sizes[at] // inner, inner, *sizes[at + 1 :]]
    return Mesh(mesh.devices.reshape(shape), names)


def _parts(mesh: Mesh, axis: str) -> tuple[str, ...]:
    """The axes that an axis was split into."""
    return (axis, inner) if (inner := f"{axis}{_INNER}") in mesh.axis_names else (axis,)


def _on(mesh: Mesh, axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(part for axis in axes for part in _parts(mesh, axis))


def _refined(spec: PartitionSpec, mesh: Mesh) -> PartitionSpec:
    return PartitionSpec(*(_on(mesh, axes_of(entry)) or None for entry in spec))
