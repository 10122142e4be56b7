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
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mesh_lm.optim import Optimizer
from mesh_lm.parallel.flat import FlatVector, Matrix
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.parallel.relayout import canonical_sharding, to_canonical, to_memory
from mesh_lm.schedules.stages import StackLayout
from mesh_lm.state import COUNTERS, MASTER, State, abstract_state, parts, placement
from mesh_lm.state.digest import digest, digests, hexadecimal, mismatches
from mesh_lm.state.unflatten import extract_matrix, insert_matrix, shard_over_replicas, zero_vector


@dataclasses.dataclass(frozen=True)
class DiskArray:
    """One array on disk, and its form in memory."""

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: Any
    source: tuple[str, str]
    """The part of the state, and the name in it, that hold the array."""
    sharding: jax.NamedSharding
    """Its sharding, with rows in memory order."""
    rows: int
    """Rows in memory; 0: the array is not stacked."""
    stack: StackLayout | None
    """The layout of a stacked array's layers."""
    vector: FlatVector | None = None
    """The flat vector that holds the array in memory, and its place there (`matrix`)."""
    matrix: Matrix | None = None
    on_host: bool = False
    """Whether the array in memory that holds it is in the hosts' memory (optimizer.offload)."""

    @property
    def is_copied(self) -> bool:
        """Whether the array on disk is made in the hosts' memory, and the state keeps its own."""
        return self.vector is not None or self.on_host

    @property
    def key(self) -> str:
        """The leaf's name in digests."""
        return f"{self.part}/{self.name}"

    @property
    def canonical(self) -> jax.NamedSharding:
        """The sharding of the array on the devices with layers in model order."""
        if self.stack is None:
            return self.sharding
        memory_shape = (self.rows, *self.shape[1:]) if self.rows else self.shape
        return canonical_sharding(self.sharding, memory_shape, self.stack)

    def extract(self, x: jax.Array) -> jax.Array:
        """Returns the array, layers in model order, from the array in memory that holds it.

        Donates `x` unless it is flat. x: on the devices.
        """
        if self.vector and self.matrix:
            x = extract_matrix(self.vector, self.matrix, x, self.sharding)
        return to_canonical(x, self.stack, self.sharding) if self.stack else x

    def insert(self, array: jax.Array, flat: jax.Array | None = None) -> jax.Array:
        """Inverse of `extract`; donates both arguments.

        flat: the flat vector with the preceding matrices; None for the first one.
        """
        if self.stack:
            array = to_memory(array, self.stack, self.sharding)
        if not (self.vector and self.matrix):
            return array
        if flat is None:
            flat = zero_vector(self.vector, self.dtype)
        flat = insert_matrix(self.vector, self.matrix, flat, array)
        # Two such programs under way have hung two processes on two cores (jax 0.11.2).
        jax.block_until_ready(flat)
        array.delete()
        return flat


def entries(layout: ModelLayout, optimizer: Optimizer) -> list[DiskArray]:
    """Returns all arrays of a checkpoint but the counters, part by part, in the order of the
    model's parameters.
    """
    flat = layout.flat
    matrices_by_vector = _matrices_by_vector(layout)
    arrays: list[DiskArray] = []
    for part, declared in parts(layout, optimizer).items():
        disk_part = "params" if part == MASTER else part
        for name, leaf in declared.leaves.items():
            if leaf.form == "flat":
                for matrix in matrices_by_vector[name]:
                    array = dataclasses.replace(
                        matrix,
                        part=disk_part,
                        dtype=leaf.dtype,
                        source=(part, name),
                        on_host=declared.on_host,
                    )
                    arrays.append(array)
                continue
            if part == "params" and name in flat.names:
                continue  # the layers' copy of a flat master
            stack = layout.stack_of(name, declared.kind) if leaf.stacked else None
            array = DiskArray(
                part=disk_part,
                name=name,
                shape=(stack.n_layers, *leaf.shape[1:]) if stack else leaf.shape,
                dtype=leaf.dtype,
                source=(part, name),
                sharding=declared.shardings[name],
                rows=leaf.shape[0] if stack else 0,
                stack=stack,
                on_host=declared.on_host,
            )
            arrays.append(array)
    part_order = list(dict.fromkeys(array.part for array in arrays))
    name_order = {name: position for position, name in enumerate(layout.shapes)}
    return sorted(arrays, key=lambda array: (part_order.index(array.part), name_order[array.name]))


def _matrices_by_vector(layout: ModelLayout) -> dict[str, list[DiskArray]]:
    """Returns the arrays on disk of each flat vector, as those of the master."""
    if not layout.flat.vectors:
        return {}
    shardings = layout.shardings("params")
    matrices: dict[str, list[DiskArray]] = {}
    for vector in layout.flat.vectors:
        matrices[vector.name] = []
        for matrix in vector.matrices:
            sharding = shard_over_replicas(
                shardings[matrix.name],
                layout.memory_shapes[matrix.name].shape,
                vector.replica_axes,
                first=bool(vector.rows),
            )
            array = DiskArray(
                part="params",
                name=matrix.name,
                shape=layout.shapes[matrix.name].shape,
                dtype=vector.array_spec.dtype,
                source=(MASTER, vector.name),
                sharding=sharding,
                rows=vector.rows,
                stack=layout.stack_of(matrix.name) if vector.rows else None,
                vector=vector,
                matrix=matrix,
            )
            matrices[vector.name].append(array)
    return matrices


def stored(layout: ModelLayout, optimizer: Optimizer) -> State:
    """Returns shapes, dtypes and shardings of a checkpoint's arrays.

    Those that are flat on the devices, or offloaded, are in host memory.
    """
    abstract = abstract_state(layout, optimizer)
    tree: State = {name: abstract[name] for name in COUNTERS}
    for entry in entries(layout, optimizer):
        sharding = entry.canonical
        if entry.is_copied:
            sharding = sharding.with_memory_kind(placement.HOST)
        part = tree.setdefault(entry.part, {})
        part[entry.name] = jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=sharding)
    return tree


def host_bytes(layout: ModelLayout, optimizer: Optimizer) -> int:
    """Returns the bytes of what `to_disk` makes in the hosts' memory, for each device."""
    nbytes = 0
    for entry in entries(layout, optimizer):
        if entry.is_copied:
            size = math.prod(entry.canonical.shard_shape(entry.shape))
            nbytes += size * np.dtype(entry.dtype).itemsize
    return nbytes


def to_disk(
    layout: ModelLayout, optimizer: Optimizer, state: State
) -> tuple[State, dict[str, str]]:
    """Returns the arrays to save, as `stored` describes them, and the digest of each leaf
    (`mesh_lm.state.digest`).

    Donates the arrays that are neither flat nor offloaded, which `back` restores; reordering layers
    needs memory for one extra leaf. The others are kept; an offloaded array is on the devices for
    as long as it is digested. An error, such as out of memory, leaves an incomplete state and must
    end the run.
    """
    tree: State = {name: state[name] for name in COUNTERS}
    device_tree = dict(tree)
    flat_digests = {}
    loaded = _Loaded()
    for entry in entries(layout, optimizer):
        part, name = entry.source
        array = entry.extract(loaded.on_device(entry, state[part][name]))
        if entry.is_copied:
            flat_digests[entry.key] = _digest(array)
        if entry.is_copied:
            # A copy also of an offloaded array that is already what is saved: Orbax does not copy
            # what is in host memory, and writes it while the next step donates the state.
            array = placement.moved_to_host(array)
        else:
            device_tree.setdefault(entry.part, {})[entry.name] = array
        tree.setdefault(entry.part, {})[entry.name] = array
    loaded.clear()
    return tree, {**digests(device_tree), **hexadecimal(flat_digests)}


class _Loaded:
    """The last offloaded vector that was copied to the devices: several arrays in a row are made
    from one.
    """

    def __init__(self) -> None:
        self._source: tuple[str, str] | None = None
        self._copy: jax.Array | None = None

    def on_device(self, entry: DiskArray, x: jax.Array) -> jax.Array:
        """Returns the array in memory that holds an entry, on the devices."""
        if not entry.on_host:
            return x
        if not entry.vector:
            return placement.copied_to_device(x)  # which `extract` donates
        if self._copy is None or self._source != entry.source:
            self.clear()
            self._copy = placement.copied_to_device(x)
            self._source = entry.source
        return self._copy

    def clear(self) -> None:
        """Frees the copy."""
        if self._copy is not None:
            self._copy.delete()
        self._copy = None


def back(layout: ModelLayout, optimizer: Optimizer, state: State, tree: State) -> State:
    """Returns the state that `to_disk` converted to `tree`, once the tree's arrays are copied to
    host memory.
    """
    restored: State = {}
    for name, part in state.items():
        restored[name] = dict(part) if isinstance(part, dict) else part
    for entry in entries(layout, optimizer):
        if not entry.is_copied:
            restored[entry.part][entry.name] = entry.insert(tree[entry.part][entry.name])
    return restored


def from_disk(
    layout: ModelLayout, optimizer: Optimizer, tree: State, saved: Mapping[str, str]
) -> tuple[State, list[str]]:
    """Returns the state of a checkpoint's arrays, placed as `stored` says, and a line for each
    array whose digest differs from `saved`.

    Donates the arrays. saved: digests by leaf; leaves without one are not compared.
    """
    declared = entries(layout, optimizer)
    counters = {name: tree[name] for name in COUNTERS}
    device_tree: State = dict(counters)
    for entry in declared:
        if not entry.is_copied:
            device_tree.setdefault(entry.part, {})[entry.name] = tree[entry.part][entry.name]
    actual = digests(device_tree)

    state_parts = parts(layout, optimizer)
    state: State = {part: {} for part in state_parts}
    flat_digests = {}
    for part, entries_of_part in _by_source_part(declared).items():
        for entry in entries_of_part:
            name = entry.source[1]
            array = tree[entry.part].pop(entry.name)
            if entry.is_copied:
                array = placement.moved_to_device(array, entry.canonical)
                flat_digests[entry.key] = _digest(array)
            array = entry.insert(array, state[part].get(name))
            if entry.on_host and not entry.vector:
                array = placement.moved_to_host(array)
            state[part][name] = array
        # The params are computed from the master while it is on the devices.
        if part == MASTER:
            state = with_used(layout, state)
        if state_parts[part].on_host:
            for name in layout.flat.leaves.keys() & state[part].keys():
                state[part][name] = placement.moved_to_host(state[part][name])
    actual |= hexadecimal(flat_digests)
    return counters | state, mismatches(actual, saved)


def _by_source_part(declared: list[DiskArray]) -> dict[str, list[DiskArray]]:
    """Returns the arrays by the part of the state that holds them."""
    entries_by_part: dict[str, list[DiskArray]] = {}
    for entry in declared:
        entries_by_part.setdefault(entry.source[0], []).append(entry)
    return entries_by_part


def with_used(layout: ModelLayout, state: State, every: bool = False) -> State:
    """Returns the state with the params that are computed from the master.

    every: also those that each layer gathers.
    """
    if not layout.flat.vectors:
        return state
    read = {
        vector.name: state[MASTER][vector.name]
        for vector in layout.flat.vectors
        if every or not vector.gathered_by_layer
    }
    copies = {
        name: placement.copied_to_device(x) for name, x in read.items() if placement.is_on_host(x)
    }
    computed = _compute_params(layout, every)({**read, **copies})
    if copies:
        jax.block_until_ready(computed)
        for copy in copies.values():
            copy.delete()
    return state | {"params": {**state["params"], **computed}}


def complete_weights(layout: ModelLayout, state: State) -> Params:
    """Returns what a model is bound to: all parameters as the layers use them, also those that each
    layer gathers, and the buffers.
    """
    if layout.flat.gathered_names:
        state = with_used(layout, state, every=True)
    return {**state["params"], **state.get("buffers", {})}


@functools.lru_cache(maxsize=8)
def _compute_params(layout: ModelLayout, every: bool) -> Any:
    """Returns the program that computes params from the master."""
    flat = layout.flat
    shardings = layout.shardings("params")
    names = flat.names if every else flat.names - flat.gathered_names
    return jax.jit(
        functools.partial(flat.compute_params, every=every),
        out_shardings={name: shardings[name] for name in sorted(names)},
    )


def without_used(layout: ModelLayout, state: State) -> State:
    """Returns a state, which may be abstract, without the params that `with_used` computes."""
    params = {name: x for name, x in state["params"].items() if name not in layout.flat.names}
    return state | {"params": params}


def _digest(array: jax.Array) -> np.ndarray:
    """Returns the digest.

    Blocks, because on XLA:CPU with few cores the collectives of two running programs can starve
    each other.
    """
    mesh = array.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
    replicated = jax.NamedSharding(mesh, jax.P())
    return np.asarray(jax.jit(digest, out_shardings=replicated)(array))
