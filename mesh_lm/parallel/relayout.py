"""Stacked leaves between memory (rows, sharded over the mesh axis pipeline) and disk (canonical: the layers in model order).

The canonical form of a leaf keeps all layers on every stage and cuts another dimension over pipeline instead, so that one all-to-all
exchanges the two. It runs in a loop over the rows of a stage: at its peak a device holds its part of both forms and two rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from mesh_lm.schedules.stages import StackLayout
from sharding_rules import ShardingRuleError, axes_of

_AXIS = "pipeline"


def canonical_sharding(sharding: NamedSharding, shape: Sequence[int], stack: StackLayout) -> NamedSharding:
    """Where the canonical form [n_layers, ...] of a leaf lies that is [rows, ...] in memory, with this sharding and shape.

    Where rows are layers it is the sharding in memory. A leaf none of whose dimensions the number of stages divides is whole on every
    stage, which takes P times the memory: fine for vectors, hard for matrices.

    Raises ShardingRuleError where the rows are cut over anything but pipeline.
    """
    if stack.is_contiguous:
        return sharding
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    cut = [axis for axis in axes_of(spec[0]) if sharding.mesh.shape[axis] > 1]
    if cut != [_AXIS]:
        raise ShardingRuleError(
            f"the dimension layers is cut over the mesh axes {cut} in {stack.stages} pipeline stages; with uneven stages or "
            "pipeline.chunks > 1 it can be cut over pipeline alone: give the others to another dimension"
        )
    moved: list[Any] = [None, *spec[1:]]
    if dim := _exchanged(sharding, shape, stack):
        moved[dim] = (*axes_of(spec[dim]), _AXIS)  # innermost, so that a device trades with those that hold its part of the row
    return NamedSharding(sharding.mesh, PartitionSpec(*moved), memory_kind=sharding.memory_kind)


def to_canonical(leaf: jax.Array, stack: StackLayout, sharding: NamedSharding) -> jax.Array:
    """[rows, ...], which has this sharding, to [n_layers, ...] with its canonical one, bit for bit. The leaf itself is deleted."""
    return leaf if stack.is_contiguous else _replaced(leaf, _program(stack, sharding, leaf.shape, False))


def to_memory(leaf: jax.Array, stack: StackLayout, sharding: NamedSharding) -> jax.Array:
    """[n_layers, ...] with its canonical sharding to [rows, ...] with this one; padding is zero. The leaf itself is deleted."""
    return leaf if stack.is_contiguous else _replaced(leaf, _program(stack, sharding, (stack.padded_rows, *leaf.shape[1:]), True))


def _replaced(leaf: jax.Array, program: Any) -> jax.Array:
    """Deletes what donation cannot reuse, for the two forms differ in shape. Waits, lest the next leaf be there twice as well."""
    moved = program(leaf)
    leaf.delete()
    return jax.block_until_ready(moved)


@functools.cache
def _program(stack: StackLayout, sharding: NamedSharding, shape: tuple[int, ...], to_memory: bool) -> Any:
    """The jitted relayout of a leaf that is [rows, ...] = shape in memory."""
    dim, canonical = _exchanged(sharding, shape, stack), canonical_sharding(sharding, shape, stack)
    local = canonical.shard_shape((stack.n_layers, *shape[1:]))
    layers = stack.layer_of_row().reshape(stack.stages, -1).T
    # [rows of a stage, P]; padding is a layer past the last, which a scatter drops and a gather fills with zero.
    layers = np.where(layers < 0, stack.n_layers + np.arange(stack.padded_rows).reshape(layers.shape), layers)

    def collect(rows: jax.Array) -> jax.Array:
        """A device's part [rows of a stage, ...] to its part [n_layers, ...]."""

        def row(held: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            mine, layer = step
            if dim is None:
                theirs = lax.all_gather(mine, _AXIS)
            else:
                parts = jnp.moveaxis(mine.reshape(*local[1:dim], stack.stages, *local[dim:]), dim - 1, 0)
                theirs = lax.all_to_all(parts, _AXIS, 0, 0, tiled=True)
            return held.at[layer].set(theirs, mode="drop", unique_indices=True), None

        return lax.scan(row, jnp.zeros(local, rows.dtype), (rows, jnp.asarray(layers)))[0]

    def deal(held: jax.Array) -> jax.Array:
        """The inverse."""

        def row(_: None, layer: jax.Array) -> tuple[None, jax.Array]:
            if dim is None:
                return None, held.at[layer[lax.axis_index(_AXIS)]].get(mode="fill", fill_value=0)
            theirs = held.at[layer].get(mode="fill", fill_value=0)
            parts = jnp.moveaxis(lax.all_to_all(theirs, _AXIS, 0, 0, tiled=True), 0, dim - 1)
            return None, parts.reshape(*local[1:dim], -1, *local[dim + 1 :])

        return lax.scan(row, None, jnp.asarray(layers))[1]

    ours, source, target = (deal, canonical, sharding) if to_memory else (collect, sharding, canonical)
    # Manual over the whole mesh: the partitioner has nothing to decide, and nothing else can travel.
    moved = jax.shard_map(ours, mesh=sharding.mesh, in_specs=source.spec, out_specs=target.spec, check_vma=False)
    return jax.jit(moved, in_shardings=source, out_shardings=target)


def _exchanged(sharding: NamedSharding, shape: Sequence[int], stack: StackLayout) -> int | None:
    """The first dimension after the rows of which each device can give every stage an equal part: the earlier, the longer the runs."""
    local = sharding.shard_shape(tuple(shape))
    return next((dim for dim in range(1, len(shape)) if local[dim] % stack.stages == 0), None)
