"""Conversion between flat vectors and matrices is exact, and the memory it needs on a GPU, for a
published run on 3,072."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesh_lm.config import load
from mesh_lm.optim import Optimizer
from mesh_lm.parallel import relayout
from mesh_lm.parallel.flat import FlatVector
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.planning.program import Program
from mesh_lm.state import unflatten
from mesh_lm.state.disk_form import DiskArray, entries
from tests.support import GPT, shard_on

COMPILE_BUDGET = 50


@pytest.mark.parametrize("mesh", [{"data": 6}, {"pipeline": 2, "data": 2, "tensor": 2}], ids=str)
def test_a_vector_and_its_matrices_are_the_same_bits(mesh: dict[str, int]) -> None:
    """6 replicas can shard a matrix of 32 x 32 only two ways; stages and tensor shard its rows and
    heads as well."""
    layout = ModelLayout.of(
        GPT, shard_on("distributed+megatron" if "tensor" in mesh else "distributed", **mesh)
    )
    (vector,) = [vector for vector in layout.flat.vectors if vector.rows]
    shardings = {
        m.name: unflatten.shard_over_replicas(
            layout.shardings("params")[m.name],
            layout.memory_shapes[m.name].shape,
            vector.replica_axes,
            first=1,
        )
        for m in vector.matrices
    }
    random = np.random.default_rng(0)
    # NaNs, infinities, -0.0
    bits = {
        name: random.integers(0, 2**32, layout.memory_shapes[name].shape, np.uint32)
        for name in shardings
    }
    flat = jax.device_put(np.zeros(vector.array_spec.shape, np.float32), vector.sharding)
    for matrix in vector.matrices:
        array = jax.device_put(bits[matrix.name].view(np.float32), shardings[matrix.name])
        flat = unflatten.insert_matrix(vector, matrix, flat, array)
    assert flat.sharding.is_equivalent_to(vector.sharding, flat.ndim)
    for matrix in vector.matrices:
        extracted = unflatten.extract_matrix(vector, matrix, flat, shardings[matrix.name])
        assert np.array_equal(np.asarray(extracted).view(np.uint32), bits[matrix.name])
    n_elements = sum(x.size for x in bits.values())
    n_nonzero = np.count_nonzero(np.asarray(flat).view(np.uint32))
    assert n_nonzero <= n_elements <= flat.size, "padding is zero"


def programs(entry: DiskArray) -> Iterator[tuple[str, Any, list[jax.ShapeDtypeStruct], int]]:
    """(name, program, its arguments, how many of them belong to the state) for each program that
    saves or restores an array."""
    in_memory = (entry.rows, *entry.shape[1:]) if entry.rows else entry.shape
    memory = jax.ShapeDtypeStruct(in_memory, entry.dtype, sharding=entry.sharding)
    disk = jax.ShapeDtypeStruct(entry.shape, entry.dtype, sharding=entry.canonical)
    if entry.vector and entry.matrix:
        flat = jax.ShapeDtypeStruct(
            entry.vector.array_spec.shape, entry.dtype, sharding=entry.vector.sharding
        )
        yield (
            "out",
            unflatten._extract_program(entry.vector, entry.matrix, entry.sharding),
            [flat],
            1,
        )
        yield (
            "into",
            unflatten._insert_program(entry.vector, entry.matrix, entry.sharding),
            [flat, memory],
            1,
        )
    if entry.stack and not entry.stack.is_contiguous:
        kept = int(not entry.vector)
        yield (
            "to canonical",
            relayout._program(entry.stack, entry.sharding, in_memory, False),
            [memory],
            kept,
        )
        yield (
            "to memory",
            relayout._program(entry.stack, entry.sharding, in_memory, True),
            [disk],
            kept,
        )


def on_device(array: jax.ShapeDtypeStruct) -> int:
    assert array.sharding is not None
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


@pytest.mark.deviceless
def test_saving_megatron_314b_takes_a_leaf_of_memory_more() -> None:
    """Each array needs, besides the state and its own shard on disk, at most one device's shard of
    the parameter in float32.

    That shard is replicated along the 48 replicas: a table needs it, because it is gathered at
    once. Stacked arrays are gathered row by row, so there it also covers the shard on disk. 1 MiB
    is for XLA's alignment.
    """
    config = load("configs/megatron_314b.py")
    made = Program.of(config, "h100", 3072)
    layout, seen, found = made.layout, set(), {}
    for entry in entries(layout, Optimizer(config.optimizer, 10)):
        in_memory = layout.memory_shapes[entry.name].shape
        block = on_device(
            jax.ShapeDtypeStruct(
                in_memory, jnp.float32, sharding=layout.shardings("params")[entry.name]
            )
        )
        for name, program, arguments, kept in programs(entry):
            lowered = program.lower(*arguments)
            # moments have the shapes of weights, the head that of the embedding
            if (text := lowered.as_text()) in seen:
                continue
            seen.add(text)
            memory = lowered.compile().memory_analysis()
            extra = memory.peak_memory_in_bytes - sum(map(on_device, arguments[:kept]))
            share = on_device(
                arguments[-1]
                if name == "into"
                else jax.ShapeDtypeStruct(in_memory, entry.dtype, sharding=entry.sharding)
            )
            spare = 0 if entry.rows and isinstance(entry.vector, FlatVector) else share
            found[entry.key, name] = extra / 2**30
            assert extra <= block + spare + 2**20, (
                f"{name} of {entry.key}: {extra / 2**30:.3f} GiB, of a leaf of {block / 2**30:.3f}"
            )
    assert {name for _, name in found} == {"out", "into", "to canonical", "to memory"}
    assert {key for key, _ in found} >= {
        "params/embedding",
        "params/positions",
        "params/blocks.mlp.up.weight",
    }
    assert max(found.values()) < 1.5, "GiB, of leaves of up to 6"


@pytest.mark.deviceless
def test_the_weights_that_the_layers_use_are_gathered_layer_by_layer() -> None:
    """The last program of a restore needs, besides the master and its results, a row and the tables
    in bf16."""
    flat = Program.of(load("configs/megatron_314b.py"), "h100", 3072).layout.flat
    master = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=flat.shardings[name])
        for name, leaf in flat.leaves.items()
    }
    memory: Any = jax.jit(flat.compute_params).lower(master).compile().memory_analysis()
    gathered = [
        (bool(vector.rows), 2 * vector.shard_size * vector.replicas) for vector in flat.vectors
    ]
    assert sorted(stacked for stacked, _ in gathered) == [False, False, False, True], (
        "the embedding, the head, positions; and the layers"
    )
    assert memory.temp_size_in_bytes <= sum(n for _, n in gathered)
