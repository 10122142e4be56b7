"""The state of a run as its checkpoints have it: one array per parameter, slot and buffer, layers in model order, whatever the mesh.

Nothing on disk is flat or padded, and there is no copy for the layers: "params" are the fp32 weights that the optimizer updates. So a run
with a distributed optimizer and one without write the same files.

What is flat leaves the devices matrix by matrix: each is made, digested, and copied into the host's memory before the next one is. On a
device that takes memory for its share of the matrix, and for one layer of it, whole over the replicas, a few times.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from mesh_lm.optim import Optimizer
from mesh_lm.optim.flat import FlatVector, Matrix
from mesh_lm.optim.unflatten import extract_matrix, insert_matrix, shard_over_replicas, zero_vector
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.parallel.relayout import canonical_sharding, to_canonical, to_memory
from mesh_lm.schedules.stages import StackLayout
from mesh_lm.state import COUNTERS, MASTER, State, abstract_state, parts
from mesh_lm.state.digest import digest, digests, hexadecimal

_HOST = "pinned_host"


@dataclasses.dataclass(frozen=True)
class DiskArray:
    """One array on disk, and where it is in memory."""

    part: str
    name: str
    shape: tuple[int, ...]
    dtype: Any
    source: tuple[str, str]
    """The part and the name in the state of what holds it."""
    where: jax.NamedSharding
    """With its rows as they are in memory."""
    rows: int
    """How many those are; 0: it is not stacked."""
    stack: StackLayout | None
    """Of what is stacked."""
    vector: FlatVector | None = None
    matrix: Matrix | None = None

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}"

    @property
    def canonical(self) -> jax.NamedSharding:
        """Of the array with its layers in model order, on the devices."""
        in_memory = (self.rows, *self.shape[1:]) if self.rows else self.shape
        return canonical_sharding(self.where, in_memory, self.stack) if self.stack else self.where

    def array(self, held: jax.Array) -> jax.Array:
        """The array on the devices, of what holds it in memory; takes over what is not flat."""
        if self.vector and self.matrix:
            held = extract_matrix(self.vector, self.matrix, held, self.where)
        return to_canonical(held, self.stack, self.where) if self.stack else held

    def held(self, array: jax.Array, so_far: jax.Array | None = None) -> jax.Array:
        """The inverse, which takes over both. so_far: the flat vector with the matrices before; None: this is its first."""
        array = to_memory(array, self.stack, self.where) if self.stack else array
        if not (self.vector and self.matrix):
            return array
        held = insert_matrix(self.vector, self.matrix, zero_vector(self.vector, self.dtype) if so_far is None else so_far, array)
        jax.block_until_ready(held)
        array.delete()
        return held


def entries(layout: ModelLayout, optimizer: Optimizer) -> list[DiskArray]:
    """Everything that a checkpoint holds but the counters, part by part, in the order of the model's parameters."""
    flat, out = layout.flat, []
    vectors = {vector.name: vector for vector in flat.vectors}
    places = {name: n for n, name in enumerate(layout.shapes)}
    specs = layout.shardings("params") if vectors else {}

    def of_vector(part: str, source: str, name: str, dtype: Any) -> list[DiskArray]:
        vector, found = vectors[name], []
        for matrix in vector.matrices:
            shape, in_memory = layout.shapes[matrix.name].shape, layout.memory_shapes[matrix.name].shape
            where = shard_over_replicas(specs[matrix.name], in_memory, vector.replica_axes, first=bool(vector.rows))
            stack = layout.stack_of(matrix.name) if vector.rows else None
            found.append(DiskArray(part, matrix.name, shape, dtype, (source, name), where, vector.rows, stack, vector, matrix))
        return found

    for part, declared in parts(layout, optimizer).items():
        on_disk, found = "params" if part == MASTER else part, []
        for name, leaf in declared.leaves.items():
            if leaf.form == "flat":
                found += of_vector(on_disk, part, name, leaf.dtype)
            elif not (part == "params" and name in flat.names):
                stack = layout.stack_of(name) if leaf.stacked else None
                shape = (stack.n_layers, *leaf.shape[1:]) if stack else leaf.shape
                rows = leaf.shape[0] if stack else 0
                found.append(DiskArray(on_disk, name, shape, leaf.dtype, (part, name), declared.shardings[name], rows, stack))
        out += found
    order = list(dict.fromkeys(entry.part for entry in out))
    return sorted(out, key=lambda entry: (order.index(entry.part), places[entry.name]))


def stored(layout: ModelLayout, optimizer: Optimizer) -> State:
    """Shapes, dtypes and shardings of what a checkpoint holds; what is flat on the devices is in the host's memory."""
    abstract, tree = abstract_state(layout, optimizer), {}
    for entry in entries(layout, optimizer):
        where = entry.canonical.with_memory_kind(_HOST) if entry.vector else entry.canonical
        tree.setdefault(entry.part, {})[entry.name] = jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=where)
    return {**{name: abstract[name] for name in COUNTERS}, **tree}


def to_disk(layout: ModelLayout, optimizer: Optimizer, state: State) -> tuple[State, dict[str, str]]:
    """What to save of a state, as `stored` describes it, and the digest of each leaf (`mesh_lm.state.digest`).

    It takes over what is not flat, which `back` gives back: to put its layers into model order needs the memory of one leaf more. What is
    flat stays where it is. An error, as that there is no memory, leaves a state that is no longer whole: the run ends.
    """
    counters = {name: state[name] for name in COUNTERS}
    tree, plain, found = dict(counters), dict(counters), {}
    for entry in entries(layout, optimizer):
        part, name = entry.source
        array = entry.array(state[part][name])
        if entry.vector:
            found[entry.key] = _digest(array)
            array = _to_host(array)
        else:
            plain.setdefault(entry.part, {})[entry.name] = array
        tree.setdefault(entry.part, {})[entry.name] = array
    return tree, {**digests(plain), **hexadecimal(found)}


def back(layout: ModelLayout, optimizer: Optimizer, state: State, tree: State) -> State:
    """The state again of which `to_disk` made this tree, once the tree's arrays are in the host's memory."""
    out = {name: dict(part) if isinstance(part, dict) else part for name, part in state.items()}
    for entry in entries(layout, optimizer):
        if not entry.vector:
            out[entry.part][entry.name] = entry.held(tree[entry.part][entry.name])
    return out


def from_disk(layout: ModelLayout, optimizer: Optimizer, tree: State, saved: Mapping[str, str]) -> tuple[State, list[str]]:
    """The state that a checkpoint's arrays are, placed as `stored` says; and a line for each whose digest is another than the saved one.

    It takes the arrays over. saved: by leaf; one that is not there is not compared.
    """
    counters = {name: tree[name] for name in COUNTERS}
    declared = entries(layout, optimizer)
    plain: State = dict(counters)
    for entry in declared:
        if not entry.vector:
            plain.setdefault(entry.part, {})[entry.name] = tree[entry.part][entry.name]
    told, found, state = digests(plain), {}, {part: {} for part in parts(layout, optimizer)}
    for entry in declared:
        (part, name), array = entry.source, tree[entry.part].pop(entry.name)
        if entry.vector:
            array = _to_device(array, entry.canonical)
            found[entry.key] = _digest(array)
        state[part][name] = entry.held(array, state[part].get(name))
    told |= hexadecimal(found)
    wrong = [f"{leaf}: digest {told[leaf]}, saved as {was}" for leaf, was in saved.items() if told.get(leaf, was) != was]
    return with_used(layout, counters | state), wrong


def with_used(layout: ModelLayout, state: State) -> State:
    """A state with those of its params that follow from the master."""
    if not layout.flat.vectors:
        return state
    return state | {"params": {**state["params"], **_used(layout)(state[MASTER])}}


@functools.lru_cache(maxsize=8)
def _used(layout: ModelLayout) -> Any:
    where = layout.shardings("params")
    return jax.jit(layout.flat.compute_params, out_shardings={name: where[name] for name in layout.flat.names})


def without_used(layout: ModelLayout, state: State) -> State:
    """A state, or an abstract one, without those: what `with_used` makes whole again."""
    return state | {"params": {name: x for name, x in state["params"].items() if name not in layout.flat.names}}


def _digest(array: jax.Array) -> np.ndarray:
    """It waits: of two programs under way on processes of few cores, one's collectives may starve the other's (XLA:CPU)."""
    everywhere = jax.NamedSharding(array.sharding.mesh, jax.P())  # pyright: ignore[reportAttributeAccessIssue]
    return np.asarray(jax.jit(digest, out_shardings=everywhere)(array))


def _to_host(array: jax.Array) -> jax.Array:
    """The array in the memory of the hosts that its shards' devices belong to. Deletes it on the devices."""
    where = array.sharding.with_memory_kind(_HOST)
    shards = [jax.device_put(s.data, jax.sharding.SingleDeviceSharding(s.device, memory_kind=_HOST)) for s in array.addressable_shards]
    host = jax.block_until_ready(jax.make_array_from_single_device_arrays(array.shape, where, shards))
    array.delete()
    return host


def _to_device(array: jax.Array, where: jax.NamedSharding) -> jax.Array:
    """The inverse."""
    shards = [jax.device_put(s.data, jax.sharding.SingleDeviceSharding(s.device)) for s in array.addressable_shards]
    device = jax.block_until_ready(jax.make_array_from_single_device_arrays(array.shape, where, shards))
    array.delete()
    return device
