"""Converts stacked arrays between memory (rows, sharded over the mesh axis pipeline) and disk
(canonical: layers in model order).

The canonical form of an array has all layers on every stage and shards another dimension over
pipeline instead, so that an all-to-all converts one into the other. It runs in a loop over the rows
of a stage: at the peak a device holds its shards of both forms and two rows.

Optimizer state that is divided by layers (`sharding_rules.owner`) has its rows over pipeline and
the axes of the owners; then each owner is a stage here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh_lm.schedules.stages import StackLayout
from sharding_rules import ShardingRuleError, axes_of

_PIPELINE = "pipeline"


def canonical_sharding(
    sharding: NamedSharding, shape: Sequence[int], stack: StackLayout
) -> NamedSharding:
    """Returns the sharding of the canonical form [n_layers, ...] of an array that has this sharding
    and shape [rows, ...] in memory.

    If the rows are the layers in model order, it is the sharding in memory. An array without a
    dimension that divides by the number of stages is replicated on every stage, which takes P times
    the memory: fine for vectors, a problem for matrices.

    Raises ShardingRuleError if the rows are sharded over anything but pipeline and the owners of
    layers.
    """
    if stack.is_contiguous:
        return sharding
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    row_axes = _row_axes(sharding)
    n_shards = math.prod(sharding.mesh.shape[axis] for axis in row_axes)
    has_stages = sharding.mesh.shape[_PIPELINE] > 1
    if n_shards != stack.stages or (has_stages and row_axes[0] != _PIPELINE):
        raise ShardingRuleError(
            f"the dimension layers is sharded over the mesh axes {list(row_axes)} in "
            f"{stack.stages} pipeline stages; with uneven stages or pipeline.chunks > 1 it can be "
            "sharded over pipeline only: use the others for another dimension"
        )
    canonical_spec: list[Any] = [None, *spec[1:]]
    dim = _exchanged_dim(sharding, shape, stack)
    if dim is not None:
        # Innermost, so that a device exchanges with those that have the same shard of the row.
        canonical_spec[dim] = (*axes_of(spec[dim]), *row_axes)
    return NamedSharding(
        sharding.mesh, PartitionSpec(*canonical_spec), memory_kind=sharding.memory_kind
    )


def to_canonical(leaf: jax.Array, stack: StackLayout, sharding: NamedSharding) -> jax.Array:
    """Returns the array [n_layers, ...] with its canonical sharding, from [rows, ...] with this
    sharding, bit for bit. Deletes its input.
    """
    if stack.is_contiguous:
        return leaf
    return _converted(leaf, _program(stack, sharding, leaf.shape, is_load=False))


def to_memory(leaf: jax.Array, stack: StackLayout, sharding: NamedSharding) -> jax.Array:
    """Returns the array [rows, ...] with this sharding, from [n_layers, ...] with its canonical
    sharding; padding is zero. Deletes its input.
    """
    if stack.is_contiguous:
        return leaf
    shape = (stack.padded_rows, *leaf.shape[1:])
    return _converted(leaf, _program(stack, sharding, shape, is_load=True))


def _converted(leaf: jax.Array, program: Any) -> jax.Array:
    """Returns the converted array. Deletes the input, since shapes differ and donation cannot reuse
    it, and waits, so that one array at a time exists twice.
    """
    converted = program(leaf)
    leaf.delete()
    return jax.block_until_ready(converted)


@functools.cache
def _program(
    stack: StackLayout, sharding: NamedSharding, shape: tuple[int, ...], is_load: bool
) -> Any:
    """Returns the jitted conversion of an array that is [rows, ...] = shape in memory."""
    dim = _exchanged_dim(sharding, shape, stack)
    canonical = canonical_sharding(sharding, shape, stack)
    row_axes = _row_axes(sharding)
    local = canonical.shard_shape((stack.n_layers, *shape[1:]))
    layers = stack.layer_of_row().reshape(stack.stages, -1).T
    # [rows of a stage, P]. Padding rows get an index past the last layer: a scatter drops them, a
    # gather fills them with zero.
    layers = np.where(
        layers < 0, stack.n_layers + np.arange(stack.padded_rows).reshape(layers.shape), layers
    )

    def collect(rows: jax.Array) -> jax.Array:
        """Returns a device's shard [n_layers, ...], from its shard [rows of a stage, ...]."""

        def put_row(
            canonical: jax.Array, step: tuple[jax.Array, jax.Array]
        ) -> tuple[jax.Array, None]:
            row, layer = step
            if dim is None:
                # No dimension divides: every stage gets complete rows.
                exchanged = lax.all_gather(row, row_axes)
            else:
                # Every stage gets its part of the row of every other one.
                parts = row.reshape(*local[1:dim], stack.stages, *local[dim:])
                parts = jnp.moveaxis(parts, dim - 1, 0)
                exchanged = lax.all_to_all(parts, row_axes, 0, 0, tiled=True)
            return canonical.at[layer].set(exchanged, mode="drop", unique_indices=True), None

        return lax.scan(put_row, jnp.zeros(local, rows.dtype), (rows, jnp.asarray(layers)))[0]

    def deal(canonical: jax.Array) -> jax.Array:
        """Returns the inverse of `collect`."""

        def take_row(_: None, layer: jax.Array) -> tuple[None, jax.Array]:
            if dim is None:
                stage_layer = layer[lax.axis_index(row_axes)]
                return None, canonical.at[stage_layer].get(mode="fill", fill_value=0)
            exchanged = canonical.at[layer].get(mode="fill", fill_value=0)
            # Every stage gets all parts of its own row.
            parts = lax.all_to_all(exchanged, row_axes, 0, 0, tiled=True)
            parts = jnp.moveaxis(parts, 0, dim - 1)
            return None, parts.reshape(*local[1:dim], -1, *local[dim + 1 :])

        return lax.scan(take_row, None, jnp.asarray(layers))[1]

    if is_load:
        convert, source, target = deal, canonical, sharding
    else:
        convert, source, target = collect, sharding, canonical
    # Manual over the whole mesh, so that XLA's partitioner cannot add communication.
    on_devices = jax.shard_map(
        convert, mesh=sharding.mesh, in_specs=source.spec, out_specs=target.spec, check_vma=False
    )
    return jax.jit(on_devices, in_shardings=source, out_shardings=target)


def _exchanged_dim(sharding: NamedSharding, shape: Sequence[int], stack: StackLayout) -> int | None:
    """Returns the first dimension after the rows that divides by the number of stages, if any.
    Earlier dimensions make longer contiguous runs.
    """
    local = sharding.shard_shape(tuple(shape))
    return next((dim for dim in range(1, len(shape)) if local[dim] % stack.stages == 0), None)


def _row_axes(sharding: NamedSharding) -> tuple[str, ...]:
    """Returns the mesh axes that shard the rows, without those of size 1."""
    entry = sharding.spec[0] if sharding.spec else None
    return tuple(axis for axis in axes_of(entry) if sharding.mesh.shape[axis] > 1)
