"""Copies of the training state's shards in host memory. A process copies what its own devices hold,
and replicated shards once.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np

from mesh_lm.state.digest import leaf_name
from mesh_lm.state.parts import State

Shards = dict[str, dict[str, np.ndarray]]
"""{leaf: {index: shard}}. An index is text such as "0:8,16:32"."""


def copied(state: State) -> Shards:
    """Returns this process's shards in host memory; it waits for the arrays, which may be donated
    afterwards.
    """
    shards: dict[str, dict[str, jax.Array]] = {}
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        parts = shards[leaf_name(path)] = {}
        for shard in x.addressable_shards:
            if (index := _index(shard.index, x.shape)) not in parts:
                shard.data.copy_to_host_async()
                parts[index] = shard.data

    # Copied, because on CPU NumPy would share memory with the array, which the next step donates.
    def own(x: jax.Array) -> np.ndarray:
        return np.array(x) if next(iter(x.devices())).platform == "cpu" else np.asarray(x)

    return {leaf: {index: own(x) for index, x in parts.items()} for leaf, parts in shards.items()}


def put_back(copy: Shards, abstract: State) -> State:
    """Returns the arrays that were copied. abstract: their shapes, dtypes and shardings
    (jax.ShapeDtypeStruct).
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(abstract)
    return jax.tree.unflatten(
        tree, [assembled(leaf, copy[leaf_name(path)].__getitem__) for path, leaf in leaves]
    )


def assembled(abstract: jax.ShapeDtypeStruct, shard: Callable[[str], np.ndarray]) -> jax.Array:
    """Returns the array of which this process's devices hold shard(index), which is called once for
    each index.
    """
    where, read, arrays = abstract.sharding, dict[str, np.ndarray](), []
    assert where is not None
    for device, slices in where.addressable_devices_indices_map(abstract.shape).items():
        assert slices is not None
        if (index := _index(slices, abstract.shape)) not in read:
            read[index] = shard(index)
        arrays.append(jax.device_put(read[index], device, may_alias=False))
    return jax.make_array_from_single_device_arrays(abstract.shape, where, arrays)


def _index(slices: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    return ",".join(
        "{}:{}".format(*s.indices(size)[:2]) for s, size in zip(slices, shape, strict=True)
    )
