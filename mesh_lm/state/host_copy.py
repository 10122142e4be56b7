"""Copies of the training state's shards in host memory.

A process copies the shards of its own devices, and replicated ones once.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from mesh_lm.state import placement
from mesh_lm.state.digest import leaf_name
from mesh_lm.state.parts import State

Shards = dict[str, dict[str, np.ndarray]]
"""{leaf: {index: shard}}. An index is text such as "0:8,16:32"."""


def copied(state: State) -> Shards:
    """Returns this process's shards in host memory.

    It waits for the arrays, which may be donated afterwards.
    """
    device_shards: dict[str, dict[str, jax.Array]] = {}
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        parts: dict[str, jax.Array] = {}
        for shard in x.addressable_shards:
            index = _index(shard.index, x.shape)
            if index not in parts:
                shard.data.copy_to_host_async()
                parts[index] = shard.data
        device_shards[leaf_name(path)] = parts
    # All transfers are under way before the first is waited for.
    return {
        leaf: {index: _to_numpy(x) for index, x in parts.items()}
        for leaf, parts in device_shards.items()
    }


def put_back(copy: Shards, abstract: State) -> State:
    """Returns the arrays that were copied.

    abstract: their shapes, dtypes and shardings (jax.ShapeDtypeStruct).
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    arrays = [assembled(leaf, copy[leaf_name(path)].__getitem__) for path, leaf in leaves]
    return jax.tree.unflatten(tree, arrays)


def assembled(abstract: jax.ShapeDtypeStruct, shard: Callable[[str], np.ndarray]) -> jax.Array:
    """Returns the array of which this process's devices hold shard(index).

    `shard` is called once for each index.
    """
    sharding = abstract.sharding
    assert sharding is not None
    shards: dict[str, np.ndarray] = {}
    arrays = []
    for device, slices in sharding.addressable_devices_indices_map(abstract.shape).items():
        assert slices is not None
        index = _index(slices, abstract.shape)
        if index not in shards:
            shards[index] = shard(index)
        target = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        arrays.append(jax.device_put(shards[index], target, may_alias=False))
    return jax.make_array_from_single_device_arrays(abstract.shape, sharding, arrays)


def _to_numpy(x: jax.Array) -> np.ndarray:
    # Copied where the array is in host memory, on a CPU's or under optimizer.offload: NumPy would
    # share it with the array, which the next step donates.
    is_on_cpu = next(iter(x.devices())).platform == "cpu"
    return np.array(x) if is_on_cpu or placement.is_on_host(x) else np.asarray(x)


def _index(slices: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    return ",".join(
        "{}:{}".format(*s.indices(size)[:2]) for s, size in zip(slices, shape, strict=True)
    )
