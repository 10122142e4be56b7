"""Arrays in the memory of their devices, and in the pinned memory of the hosts of these devices."""

from __future__ import annotations

from typing import Any

import jax

HOST = "pinned_host"
"""JAX's name of host memory that a device can copy to and from by itself."""


def on_host(sharding: jax.NamedSharding) -> jax.NamedSharding:
    """Returns the same sharding, in the hosts' pinned memory."""
    moved = sharding.with_memory_kind(HOST)
    if moved.memory_kind == HOST:
        return moved
    # Devices that can only be compiled for have no memories, and JAX silently drops the kind. An
    # abstract mesh keeps it.
    return jax.NamedSharding(
        sharding.mesh.abstract_mesh,  # pyright: ignore[reportAttributeAccessIssue]
        sharding.spec,
        memory_kind=HOST,
    )


def is_on_host(x: Any) -> bool:
    """Returns whether an array, or its description, is in the hosts' memory."""
    return x.sharding.memory_kind == HOST


def copied_to_device(x: jax.Array) -> jax.Array:
    """Returns a copy of an array on the devices, with the same shards."""
    assert isinstance(x.sharding, jax.NamedSharding)
    sharding = jax.NamedSharding(x.sharding.mesh, x.sharding.spec)
    return _copied(x, sharding, None)


def moved_to_device(x: jax.Array, sharding: jax.NamedSharding) -> jax.Array:
    """Returns an array with this sharding, which has the same shards, on the devices. Deletes its
    input.
    """
    moved = _copied(x, sharding, None)
    x.delete()
    return moved


def moved_to_host(x: jax.Array) -> jax.Array:
    """Returns an array with the same shards in the hosts' memory. Deletes its input."""
    assert isinstance(x.sharding, jax.NamedSharding)
    moved = _copied(x, x.sharding.with_memory_kind(HOST), HOST)
    x.delete()
    return moved


def _copied(x: jax.Array, sharding: jax.sharding.Sharding, memory_kind: str | None) -> jax.Array:
    """Returns a copy, once it is complete. memory_kind: of the sharding; None: the devices' own."""
    shards = []
    for shard in x.addressable_shards:
        target = jax.sharding.SingleDeviceSharding(shard.device, memory_kind=memory_kind)
        shards.append(jax.device_put(shard.data, target))
    copy = jax.make_array_from_single_device_arrays(x.shape, sharding, shards)
    return jax.block_until_ready(copy)
