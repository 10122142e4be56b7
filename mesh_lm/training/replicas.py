"""Whether devices that should hold the same bits do.

What it finds: a bit that memory or a transfer changed in one of several copies, and an update that one device computed wrongly. Copies are
those of a sharding: all weights under DDP, those of the other `data` groups under HSDP, and the scalars everywhere.

What it does not find. What only one device holds (a checkpoint's digests are for that). A gradient that one device computed wrongly: all of
them add it up. Under ZeRO, more than one step back: each step gathers every weight anew from the device that updates it, so that a flipped
bit is gone after it, or everywhere.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mesh_lm.errors import listed
from mesh_lm.state.digest import digest, leaf_name


class ReplicasDiffer(RuntimeError):
    """Devices that should hold the same bits do not: the state is not to be trusted, nor saved."""


def require_equal(state: Mapping[str, Any]) -> None:
    """Raises ReplicasDiffer, with the leaves and devices, where `differing` finds any. Every process of a run calls it."""
    if lines := differing(state):
        told = listed("copies of the state are not the same bits; a device, its memory or a link computes wrongly", lines)
        raise ReplicasDiffer(
            f"{told}\nnothing of it was saved: continue from the newest checkpoint, without that device if it is named again"
        )


def differing(state: Mapping[str, Any]) -> list[str]:
    """A line for each part of a leaf whose copies are not the same bits, with the devices in the minority; empty where all is well.

    state: nested dicts of arrays on one mesh. Every process of a run calls it, and gets the same. Each device digests what it holds, by
    one program without collectives; only digests travel. Where two copies disagree, or as many on either side, all are named.
    """
    leaves = [(path, x) for path, x in jax.tree_util.tree_flatten_with_path(state)[0] if _parts(x.sharding, x.shape).copied]
    if not leaves:
        return []
    arrays = [x for _, x in leaves]
    mesh = arrays[0].sharding.mesh
    found = program(mesh, tuple(x.sharding.spec for x in arrays))(*arrays)
    rows = np.asarray(multihost_utils.process_allgather(found, tiled=True))  # [devices, leaves, 2]
    values = rows[..., 0].astype(np.uint64) << np.uint64(32) | rows[..., 1]
    devices = mesh.devices.reshape(-1)
    return [
        f"{leaf_name(path)}{line}"
        for (path, x), column in zip(leaves, values.T, strict=True)
        for line in _minorities(_parts(x.sharding, x.shape), column, devices)
    ]


@functools.lru_cache(maxsize=8)
def program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> Callable[..., jax.Array]:
    """Jitted: arrays with these specs -> uint32 [devices, arrays, 2], by device in the mesh's order, digests of its own blocks."""

    def own(*blocks: jax.Array) -> jax.Array:
        return jnp.stack([digest(block) for block in blocks])[None]

    rows = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False))


class _Parts:
    """Which part of an array each device of its mesh holds."""

    def __init__(self, sharding: NamedSharding, shape: tuple[int, ...]) -> None:
        held = sharding.devices_indices_map(shape)
        indices = [tuple((s.start, s.stop) for s in held[device] or ()) for device in cast(Mesh, sharding.mesh).devices.flat]
        numbers = {index: number for number, index in enumerate(dict.fromkeys(indices))}
        self.of_device = np.array([numbers[index] for index in indices])
        self.copied = len(numbers) < len(indices)


_parts = functools.lru_cache(maxsize=1024)(_Parts)


def _minorities(parts: _Parts, values: np.ndarray, devices: np.ndarray) -> list[str]:
    """Of one leaf: a line for each part whose copies differ. values: the digests, by device."""
    _, firsts = np.unique(parts.of_device, return_index=True)
    wrong = values != values[firsts][parts.of_device]
    lines = []
    for part in np.unique(parts.of_device[wrong]):
        holders = np.flatnonzero(parts.of_device == part)
        (top, votes), *others = Counter(values[holders].tolist()).most_common()
        tie = any(count == votes for _, count in others)
        named = [_name(devices[i]) for i in holders if tie or values[i] != top]
        lines.append(
            f": {', '.join(named)} hold different bits, and no majority tells which are right"
            if tie
            else f": {', '.join(named)} {'holds' if len(named) == 1 else 'hold'} other bits than the {votes} other copies"
        )
    return lines


def _name(device: Any) -> str:
    return f"device {device.id} (process {device.process_index}, {device})"
