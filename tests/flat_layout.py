"""Reads flat vectors with NumPy, by the description of their layout, without the code under
test."""

from __future__ import annotations

import itertools
import math

import jax
import numpy as np
from support import in_memory_order, in_model_order, initial, shard_on

from mesh_lm.parallel.flat import FlatVector
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import COUNTERS, MASTER, State
from sharding_rules import Rules, axes_of


def matrices(vector: FlatVector, x: np.ndarray, layout: ModelLayout) -> dict[str, np.ndarray]:
    """The matrices of one vector, with their rows in memory order."""
    mesh, rows = dict(vector.mesh.shape), math.prod(x.shape[:-1])
    cut = [mesh[axis] for axis in vector.shard_axes]
    parts = np.moveaxis(x.reshape(rows, vector.replicas, *cut, vector.shard_size), 1, -2)
    parts = parts.reshape(rows, *cut, vector.replicas * vector.shard_size)
    out, params = {}, layout.shardings("params")
    for matrix in vector.matrices:
        shape, spec = layout.memory_shapes[matrix.name].shape, params[matrix.name].spec
        out[matrix.name] = np.zeros(shape, x.dtype)
        own = list(spec)[bool(vector.rows) :]
        for place in itertools.product(*map(range, cut)):
            at, box = dict(zip(vector.shard_axes, place, strict=True)), []
            for size, entry in zip(matrix.local, own, strict=False):
                index = 0
                for axis in axes_of(entry):
                    index = index * mesh[axis] + at.get(axis, 0)
                box.append(slice(index * size, (index + 1) * size))
            part = parts[:, *place, matrix.offset : matrix.offset + matrix.size].reshape(
                rows, *matrix.local
            )
            out[matrix.name][(..., *box)] = part if vector.rows else part[0]
    return out


def flattened(vector: FlatVector, whole: dict[str, np.ndarray], layout: ModelLayout) -> np.ndarray:
    """The inverse of `matrices`: a vector with these matrices, whose rows are in memory order."""
    x = np.zeros(vector.array_spec.shape, vector.array_spec.dtype)
    places = matrices(vector, np.arange(x.size).reshape(x.shape), layout)
    for name, index in places.items():
        x.flat[index] = whole[name]
    return x


def engine_weights(layout: ModelLayout, plain: Rules | str = "ddp") -> dict[str, jax.Array]:
    """The weights of seed 0 as the engine reads them, with the vectors that layers gather. plain:
    rules for one device."""
    whole = {
        name: in_memory_order(layout, name, x)
        for name, x in initial(ModelLayout.of(layout.config, shard_on(plain))).items()
    }
    vectors = {v.name: v for v in layout.flat.vectors if v.gathered_by_layer}
    out = {
        name: jax.device_put(flattened(v, whole, layout), v.sharding) for name, v in vectors.items()
    }
    where = {
        name: sharding
        for name, sharding in layout.shardings("params").items()
        if name not in layout.flat.gathered_names
    }
    return out | {
        name: jax.device_put(
            whole[name].astype(layout.flat.compute_dtypes.get(name, np.float32)), s
        )
        for name, s in where.items()
    }


def unflattened(layout: ModelLayout, part: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A part of a state on the host, "master" or a slot, by parameter, with layers in model order
    and without padding."""
    vectors = {vector.name: vector for vector in layout.flat.vectors}
    found = {}
    for name, x in part.items():
        found |= matrices(vectors[name], x, layout) if name in vectors else {name: x}
    rows = {name: layout.stack_of(name).row_of_layer() for name in found if name in layout.stacked}
    return {name: x[rows[name]] if name in rows else x for name, x in found.items()}


def on_disk(layout: ModelLayout, state: State) -> dict[str, np.ndarray]:
    """The arrays in a checkpoint of a state: {"params/blocks.mlp.up.weight": array}, with layers in
    model order and fp32 weights."""
    out = {}
    for part, held in state.items():
        if part in COUNTERS:
            out[part] = np.asarray(held)
            continue
        vectors = layout.flat.leaves if part not in ("params", "buffers") else {}
        follows = layout.flat.names if part == "params" else ()
        plain = {
            name: in_model_order(layout, name, x)
            for name, x in held.items()
            if name not in vectors and name not in follows
        }
        apart = unflattened(
            layout, {name: np.asarray(held[name]) for name in vectors if name in held}
        )
        out |= {
            f"{'params' if part == MASTER else part}/{name}": x
            for name, x in {**plain, **apart}.items()
        }
    return out
