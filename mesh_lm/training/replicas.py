"""Checks that replicas of the state hold the same bits on all devices.

It finds a bit that memory or a transfer flipped in one replica, and an update that one device
computed wrongly. Replicas are those of a sharding: all weights under DDP, those of the other `data`
groups under HSDP, and the scalars everywhere.

It does not find errors in shards that only one device holds (a checkpoint's digests do), nor a
wrong gradient of one device, which all of them sum. Under ZeRO it does not find an error that is
more than one step old: each step gathers every weight from the device that updates it, so a flipped
bit is overwritten, or copied to all replicas.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mesh_lm.errors import listed
from mesh_lm.state.digest import digest, leaf_name
from mesh_lm.state.placement import copied_to_device, is_on_host

_LATER = 2.0
"""Seconds by which a process reports a fault of another one's device later than that one."""


class ReplicasDiffer(RuntimeError):
    """Replicas of the state differ: it must be neither trusted nor saved."""


def require_equal(state: Mapping[str, Any]) -> None:
    """Raises ReplicasDiffer with the leaves and devices that `differing` finds. Every process must
    call it.
    """
    differences = _differences(state)
    if not differences:
        return
    yield_to_the_blamed({process for _, processes in differences for process in processes})
    problem = listed(
        "replicas of the state differ; a device, its memory or a link is faulty",
        [line for line, _ in differences],
    )
    raise ReplicasDiffer(
        f"{problem}\nthis state was not saved: continue from the newest checkpoint, without "
        "that device if it is named again"
    )


def yield_to_the_blamed(processes: Collection[int]) -> None:
    """Waits for a moment if none of these is this process: the launcher takes the node of the first
    that fails for the cause.
    """
    if processes and jax.process_index() not in processes:
        time.sleep(_LATER)


def differing(state: Mapping[str, Any]) -> list[str]:
    """Returns a line for each shard whose replicas differ, with the devices in the minority; empty
    if all replicas are equal.

    state: nested dicts of arrays on one mesh. Every process must call it, and gets the same result.
    Each device computes digests of its shards, in one program without collectives; only digests are
    gathered. Without a majority all devices are named.
    """
    return [line for line, _ in _differences(state)]


def _differences(state: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Returns the lines of `differing`, each with the processes of the devices that it names."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    leaves = [(path, x) for path, x in leaves if _shards(x.sharding, x.shape).replicated]
    if not leaves:
        return []
    mesh = leaves[0][1].sharding.mesh
    digests = shard_digests([x for _, x in leaves])
    # uint32 [devices, leaves, 2], as uint64 [devices, leaves].
    rows = np.asarray(multihost_utils.process_allgather(digests, tiled=True))
    values = rows[..., 0].astype(np.uint64) << np.uint64(32) | rows[..., 1]
    devices = mesh.devices.reshape(-1)
    differences = []
    for (path, x), leaf_values in zip(leaves, values.T, strict=True):
        for line, processes in _minorities(_shards(x.sharding, x.shape), leaf_values, devices):
            differences.append((f"{leaf_name(path)}{line}", processes))
    return differences


def shard_digests(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns uint32 [devices, arrays, 2], digests of each device's shards in mesh order.

    Arrays on the hosts are on the devices one after another, for as long as they are digested.
    """
    mesh = arrays[0].sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
    if not any(map(is_on_host, arrays)):
        return program(mesh, _specs(arrays))(*arrays)
    columns: dict[int, jax.Array] = {}
    on_device = [i for i, x in enumerate(arrays) if not is_on_host(x)]
    if on_device:
        digests = shard_digests([arrays[i] for i in on_device])
        columns |= {i: digests[:, column : column + 1] for column, i in enumerate(on_device)}
    for i, x in enumerate(arrays):
        if i in columns:
            continue
        copy = copied_to_device(x)
        columns[i] = jax.block_until_ready(program(mesh, _specs([x]))(copy))
        copy.delete()
    return jnp.concatenate([columns[i] for i in range(len(arrays))], axis=1)


def _specs(arrays: Sequence[Any]) -> tuple[PartitionSpec, ...]:
    return tuple(x.sharding.spec for x in arrays)


@functools.lru_cache(maxsize=64)
def program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[..., jax.Array]:
    """Returns a jitted function: arrays with these specs -> uint32 [devices, arrays, 2], digests of
    each device's shards in mesh order.
    """

    def on_device(*blocks: jax.Array) -> jax.Array:
        return jnp.stack([digest(block) for block in blocks])[None]

    # Manual over the whole mesh, so that there are no collectives.
    out_specs = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    )


class _Shards:
    """The numbers of the shards of an array on the devices of its mesh."""

    def __init__(self, sharding: NamedSharding, shape: tuple[int, ...]) -> None:
        slices_by_device = sharding.devices_indices_map(shape)
        blocks = [
            tuple((s.start, s.stop) for s in slices_by_device[device] or ())
            for device in cast(Mesh, sharding.mesh).devices.flat
        ]
        numbers = {block: number for number, block in enumerate(dict.fromkeys(blocks))}
        self.numbers = np.array([numbers[block] for block in blocks])
        """For each device, in mesh order."""
        self.replicated = len(numbers) < len(blocks)


_shards = functools.lru_cache(maxsize=1024)(_Shards)


def _minorities(
    shards: _Shards, values: np.ndarray, devices: np.ndarray
) -> list[tuple[str, list[int]]]:
    """Returns a line for each shard of one leaf whose replicas differ, and the processes that it
    names. values: the digests, by device.
    """
    # Compare each device with the first one that has the same shard.
    _, first_devices = np.unique(shards.numbers, return_index=True)
    differs = values != values[first_devices][shards.numbers]
    lines = []
    for shard in np.unique(shards.numbers[differs]):
        replicas = np.flatnonzero(shards.numbers == shard)
        (majority, votes), *minorities = Counter(values[replicas].tolist()).most_common()
        is_tie = any(other_votes == votes for _, other_votes in minorities)
        blamed = [devices[i] for i in replicas if is_tie or values[i] != majority]
        names = ", ".join(map(_name, blamed))
        if is_tie:
            line = f": {names} hold different bits, and no majority shows which are right"
        else:
            verb = "differs" if len(blamed) == 1 else "differ"
            line = f": {names} {verb} from the {votes} other replicas"
        lines.append((line, [device.process_index for device in blamed]))
    return lines


def _name(device: Any) -> str:
    return f"device {device.id} (process {device.process_index}, {device})"
