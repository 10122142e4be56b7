"""Converts the training state between memory and its form in checkpoints: one array per parameter,
slot and buffer, layers in model order.

Nothing on disk is flat or padded, and the layers' copy of the weights is not saved: "params" are
the fp32 weights that the optimizer updates. So runs with and without a distributed optimizer write
the same files.

Flat vectors leave the devices matrix by matrix: each matrix is gathered, digested and copied to
host memory before the next one. A device needs memory for its share of the matrix and for a few
copies of one layer, replicated over the data-parallel axes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mesh_lm.optim import Optimizer
from mesh_lm.parallel.flat import FlatVector, Matrix
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.parallel.relayout import canonical_sharding, to_canonical, to_memory
from mesh_lm.schedules.stages import StackLayout
from mesh_lm.state import COUNTERS, MASTER, State, abstract_state, parts
from mesh_lm.state.digest import digest, digests, hexadecimal
from mesh_lm.state.unflatten import extract_matrix, insert_matrix, shard_over_replicas, zero_vector

_HOST = "pinned_host"


@dataclasses.dataclass(frozen=True)
class DiskArray:
    """One array on disk, and its form in memory."""

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: Any
    source: tuple[str, str]
    """The part of the state, and the name in it, that hold the array."""
    where: jax.NamedSharding
    """Its sharding, with rows in memory order."""
    rows: int
    """Rows in memory; 0: the array is not stacked."""
    stack: StackLayout | None
    """The layout of a stacked array's layers."""
    vector: FlatVector | None = None
    matrix: Matrix | None = None

    @property
    def key(self) -> str:
        """The leaf's name in digests."""
        return f"{self.part}/{self.name}"

    @property
    def canonical(self) -> jax.NamedSharding:
        """The sharding of the array on the devices with layers in model order."""
        in_memory = (self.rows, *self.shape[1:]) if self.rows else self.shape
        return canonical_sharding(self.where, in_memory, self.stack) if self.stack else self.where

    def array(self, held: jax.Array) -> jax.Array:
        """Returns the array, layers in model order, from what holds it in memory. Donates `held`
        unless it is flat.
        """
        if self.vector and self.matrix:
            held = extract_matrix(self.vector, self.matrix, held, self.where)
        return to_canonical(held, self.stack, self.where) if self.stack else held

    def held(self, array: jax.Array, so_far: jax.Array | None = None) -> jax.Array:
        """Inverse of `array`; donates both arguments. so_far: the flat vector with the preceding
        matrices; None for the first one.
        """
        array = to_memory(array, self.stack, self.where) if self.stack else array
        if not (self.vector and self.matrix):
            return array
        held = insert_matrix(
            self.vector,
            self.matrix,
            zero_vector(self.vector, self.dtype) if so_far is None else so_far,
            array,
        )
        jax.block_until_ready(held)
        array.delete()
        return held


def entries(layout: ModelLayout, optimizer: Optimizer) -> list[DiskArray]:
    """Returns all arrays of a checkpoint but the counters, part by part, in the order of the
    model's parameters.
    """
    flat, out = layout.flat, []
    vectors = {vector.name: vector for vector in flat.vectors}
    places = {name: n for n, name in enumerate(layout.shapes)}
    specs = layout.shardings("params") if vectors else {}

    def of_vector(part: str, source: str, name: str, dtype: Any) -> list[DiskArray]:
        vector, arrays = vectors[name], []
        for matrix in vector.matrices:
            shape, in_memory = (
                layout.shapes[matrix.name].shape,
                layout.memory_shapes[matrix.name].shape,
            )
            where = shard_over_replicas(
                specs[matrix.name], in_memory, vector.replica_axes, first=bool(vector.rows)
            )
            stack = layout.stack_of(matrix.name) if vector.rows else None
            arrays.append(
                DiskArray(
                    part,
                    matrix.name,
                    shape,
                    dtype,
                    (source, name),
                    where,
                    vector.rows,
                    stack,
                    vector,
                    matrix,
                )
            )
        return arrays

    for part, declared in parts(layout, optimizer).items():
        on_disk = "params" if part == MASTER else part
        for name, leaf in declared.leaves.items():
            if leaf.form == "flat":
                out += of_vector(on_disk, part, name, leaf.dtype)
            elif not (part == "params" and name in flat.names):
                stack = layout.stack_of(name) if leaf.stacked else None
                shape = (stack.n_layers, *leaf.shape[1:]) if stack else leaf.shape
                rows = leaf.shape[0] if stack else 0
                out.append(
                    DiskArray(
                        on_disk,
                        name,
                        shape,
                        leaf.dtype,
                        (part, name),
                        declared.shardings[name],
                        rows,
                        stack,
                    )
                )
    order = list(dict.fromkeys(entry.part for entry in out))
    return sorted(out, key=lambda entry: (order.index(entry.part), places[entry.name]))


def stored(layout: ModelLayout, optimizer: Optimizer) -> State:
    """Returns shapes, dtypes and shardings of a checkpoint's arrays; those that are flat on the
    devices are in host memory.
    """
    abstract, tree = abstract_state(layout, optimizer), {}
    for entry in entries(layout, optimizer):
        where = entry.canonical.with_memory_kind(_HOST) if entry.vector else entry.canonical
        tree.setdefault(entry.part, {})[entry.name] = jax.ShapeDtypeStruct(
            entry.shape, entry.dtype, sharding=where
        )
    return {**{name: abstract[name] for name in COUNTERS}, **tree}


def to_disk(
    layout: ModelLayout, optimizer: Optimizer, state: State
) -> tuple[State, dict[str, str]]:
    """Returns the arrays to save, as `stored` describes them, and the digest of each leaf
    (`mesh_lm.state.digest`).

    Donates the arrays that are not flat, which `back` restores; reordering layers needs memory for
    one extra leaf. Flat vectors are kept. An error, such as out of memory, leaves an incomplete
    state and must end the run.
    """
    counters = {name: state[name] for name in COUNTERS}
    tree, plain, flat_digests = dict(counters), dict(counters), {}
    for entry in entries(layout, optimizer):
        part, name = entry.source
        array = entry.array(state[part][name])
        if entry.vector:
            flat_digests[entry.key] = _digest(array)
            array = _to_host(array)
        else:
            plain.setdefault(entry.part, {})[entry.name] = array
        tree.setdefault(entry.part, {})[entry.name] = array
    return tree, {**digests(plain), **hexadecimal(flat_digests)}


def back(layout: ModelLayout, optimizer: Optimizer, state: State, tree: State) -> State:
    """Returns the state that `to_disk` converted to `tree`, once the tree's arrays are copied to
    host memory.
    """
    out = {name: dict(part) if isinstance(part, dict) else part for name, part in state.items()}
    for entry in entries(layout, optimizer):
        if not entry.vector:
            out[entry.part][entry.name] = entry.held(tree[entry.part][entry.name])
    return out


def from_disk(
    layout: ModelLayout, optimizer: Optimizer, tree: State, saved: Mapping[str, str]
) -> tuple[State, list[str]]:
    """Returns the state of a checkpoint's arrays, placed as `stored` says, and a line for each
    array whose digest differs from `saved`.

    Donates the arrays. saved: digests by leaf; leaves without one are not compared.
    """
    counters = {name: tree[name] for name in COUNTERS}
    declared = entries(layout, optimizer)
    plain: State = dict(counters)
    for entry in declared:
        if not entry.vector:
            plain.setdefault(entry.part, {})[entry.name] = tree[entry.part][entry.name]
    actual, flat_digests, state = (
        digests(plain),
        {},
        {part: {} for part in parts(layout, optimizer)},
    )
    for entry in declared:
        (part, name), array = entry.source, tree[entry.part].pop(entry.name)
        if entry.vector:
            array = _to_device(array, entry.canonical)
            flat_digests[entry.key] = _digest(array)
        state[part][name] = entry.held(array, state[part].get(name))
    actual |= hexadecimal(flat_digests)
    mismatches = [
        f"{leaf}: digest {actual[leaf]}, saved as {was}"
        for leaf, was in saved.items()
        if actual.get(leaf, was) != was
    ]
    return with_used(layout, counters | state), mismatches


def with_used(layout: ModelLayout, state: State, every: bool = False) -> State:
    """Returns the state with the params that are computed from the master; `every`: also those that
    each layer gathers.
    """
    if not layout.flat.vectors:
        return state
    return state | {"params": {**state["params"], **_used(layout, every)(state[MASTER])}}


def complete_weights(layout: ModelLayout, state: State) -> Params:
    """Returns what a model is bound to: all parameters as the layers use them, also those that each
    layer gathers, and the buffers.
    """
    weights = with_used(layout, state, every=True) if layout.flat.gathered_names else state
    return {**weights["params"], **state.get("buffers", {})}


@functools.lru_cache(maxsize=8)
def _used(layout: ModelLayout, every: bool) -> Any:
    where, flat = layout.shardings("params"), layout.flat
    names = flat.names if every else flat.names - flat.gathered_names
    return jax.jit(
        functools.partial(flat.compute_params, every=every),
        out_shardings={name: where[name] for name in sorted(names)},
    )


def without_used(layout: ModelLayout, state: State) -> State:
    """Returns a state, which may be abstract, without the params that `with_used` computes."""
    return state | {
        "params": {name: x for name, x in state["params"].items() if name not in layout.flat.names}
    }


def _digest(array: jax.Array) -> np.ndarray:
    """Returns the digest. Blocks, because on XLA:CPU with few cores the collectives of two running
    programs can starve each other.
    """
    replicated = jax.NamedSharding(array.sharding.mesh, jax.P())  # pyright: ignore[reportAttributeAccessIssue]
    return np.asarray(jax.jit(digest, out_shardings=replicated)(array))


def _to_host(array: jax.Array) -> jax.Array:
    """Moves an array to the memory of the hosts of its devices."""
    where = array.sharding.with_memory_kind(_HOST)
    shards = [
        jax.device_put(s.data, jax.sharding.SingleDeviceSharding(s.device, memory_kind=_HOST))
        for s in array.addressable_shards
    ]
    host = jax.block_until_ready(
        jax.make_array_from_single_device_arrays(array.shape, where, shards)
    )
    array.delete()
    return host


def _to_device(array: jax.Array, where: jax.NamedSharding) -> jax.Array:
    """Moves an array back to its devices."""
    shards = [
        jax.device_put(s.data, jax.sharding.SingleDeviceSharding(s.device))
        for s in array.addressable_shards
    ]
    device = jax.block_until_ready(
        jax.make_array_from_single_device_arrays(array.shape, where, shards)
    )
    array.delete()
    return device
