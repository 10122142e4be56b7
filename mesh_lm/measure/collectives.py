"""The time of each collective over each axis of a mesh, by the size of its array."""

from __future__ import annotations

import os
import socket
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesh_lm.measure.fit import fitted
from sharding_rules.lab.ledger import wire_bytes
from sharding_rules.lab.profile import Measured, Point

DTYPE = jnp.float32
"""On a CPU XLA would turn bf16 into f32 around an all-reduce, which then sends twice the bytes."""
Collective = Callable[[jax.Array, str, int], jax.Array]
"""(a device's shard, mesh axis, its size) -> the result on the device."""


def _broadcast(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.pbroadcast(x, (axis,), 0)


def _broadcast_in_rounds(x: jax.Array, axis: str, n: int) -> jax.Array:
    """Returns what `_broadcast` does. In each round the devices that have the array send it on."""
    position = lax.axis_index(axis)
    n_done = 1
    while n_done < n:
        pairs = [(i, i + n_done) for i in range(min(n_done, n - n_done))]
        received = lax.ppermute(x, axis, pairs)
        is_new = (position >= n_done) & (position < 2 * n_done)
        x = jnp.where(is_new, received, x)
        n_done *= 2
    return x


def _permute(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


def _all_reduce(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.psum(x, axis)


def _all_gather(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.all_gather(x, axis, tiled=True)


def _reduce_scatter(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.psum_scatter(x, axis, tiled=True)


def _all_to_all(x: jax.Array, axis: str, n: int) -> jax.Array:
    return lax.all_to_all(x, axis, 0, 0, tiled=True)


COLLECTIVES: dict[str, Collective] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "collective-broadcast": _broadcast,
    "collective-permute": _permute,
}
"""By the kind that XLA gives it."""


def measured(
    mesh: Mesh,
    sizes: Sequence[int],
    *,
    kinds: Sequence[str] = tuple(COLLECTIVES),
    seconds: float = 0.05,
    samples: int = 5,
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[Measured]:
    """Yields each collective over each mesh axis of at least two devices, with its fit.

    All groups along the axis run at once, as in a training step.

    Args:
      mesh: of devices that are here, of one or of several processes.
      sizes: bytes of the whole arrays (gathered, or before they are scattered); at least two.
      seconds: that one sample lasts at least, in which the collective repeats.
      samples: of each size, of which the median counts.
      say: told what cannot be measured.
    """
    nodes = node_names()
    for axis in mesh.axis_names:
        n = mesh.shape[axis]
        if n < 2:
            continue
        n_nodes = _nodes_along(mesh, axis, nodes)
        for kind in kinds:
            try:
                points = [
                    _point(mesh, axis, kind, size, seconds, samples) for size in sorted(set(sizes))
                ]
            except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
                say(f"{kind} over {axis} cannot be measured here: {str(error).splitlines()[0]}")
                continue
            fit = fitted([point.wire for point in points], [point.us for point in points])
            yield Measured(kind, axis, n, n_nodes, fit, tuple(points))


def node_names() -> dict[int, int]:
    """Returns the node of each process, as a number that processes of one node share.

    It is that of the host's name and of MESH_LM_NODE.
    """
    name = f"{socket.gethostname()} {os.environ.get('MESH_LM_NODE', '')}"
    own = np.uint32(zlib.crc32(name.encode()))
    if jax.process_count() == 1:
        return {0: int(own)}
    every = multihost_utils.process_allgather(own)
    return {process: int(node) for process, node in enumerate(every)}


def _nodes_along(mesh: Mesh, axis: str, nodes: dict[int, int]) -> int:
    """Returns the most nodes that a group along an axis spans."""
    dim = mesh.axis_names.index(axis)
    lines = mesh.devices.swapaxes(dim, -1).reshape(-1, mesh.shape[axis])
    return max(len({nodes[device.process_index] for device in line}) for line in lines)


def _point(mesh: Mesh, axis: str, kind: str, size: int, seconds: float, samples: int) -> Point:
    n = mesh.shape[axis]
    itemsize = jnp.dtype(DTYPE).itemsize
    n_elements = max(1, size // itemsize // n) * n
    n_local = n_elements // n if kind == "all-gather" else n_elements
    run, arguments = looped(mesh, axis, kind, n_local)
    us, spread = median_us(run, arguments, seconds, samples)
    payload = n_elements * itemsize
    return Point(payload, wire_bytes(kind, payload, n), us, spread)


def looped(
    mesh: Mesh, axis: str, kind: str, n_local: int, *, abstract: bool = False
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a program that runs a collective as often as its last argument says, and its first
    two arguments, which it takes over.

    A barrier makes each run wait for the one before it, and keeps XLA from moving the collective
    out of the loop.

    Args:
      n_local: elements of a device's shard.
      abstract: the arguments are shapes, for absent devices.
    """
    collective = COLLECTIVES[kind]
    if kind == "collective-broadcast" and mesh.devices.flat[0].platform == "cpu":
        collective = _broadcast_in_rounds  # XLA has no broadcast for CPUs
    spec = P(mesh.axis_names)
    sharding = NamedSharding(mesh, spec)

    def region(x: jax.Array, y: jax.Array, n_runs: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, _ = carry
            return lax.optimization_barrier((x, collective(x, axis, mesh.shape[axis])))

        return lax.fori_loop(0, n_runs, body, (x, y))

    in_region = jax.shard_map(
        region, mesh=mesh, in_specs=(spec, spec, P()), out_specs=(spec, spec), check_vma=False
    )
    n_result = _result_elements(kind, n_local, mesh.shape[axis])
    make = _shape if abstract else _zeros
    x = make(n_local * mesh.size, sharding)
    y = make(n_result * mesh.size, sharding)
    return jax.jit(in_region, donate_argnums=(0, 1)), (x, y)


def _result_elements(kind: str, n_local: int, n: int) -> int:
    if kind == "all-gather":
        return n * n_local
    return n_local // n if kind == "reduce-scatter" else n_local


def _zeros(n_elements: int, sharding: NamedSharding) -> jax.Array:
    shard = np.zeros(sharding.shard_shape((n_elements,)), DTYPE)
    return jax.make_array_from_callback((n_elements,), sharding, lambda index: shard)


def _shape(n_elements: int, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((n_elements,), DTYPE, sharding=sharding)


def median_us(
    run: Callable[..., Any], arguments: tuple[Any, ...], seconds: float, samples: int
) -> tuple[float, float]:
    """Returns the median microseconds of one run, and (highest - lowest) / median of the samples.

    Args:
      run: takes the arguments over, and returns their successors; its last argument is how often
        it repeats.
      seconds: that a sample lasts at least. All processes repeat equally often.
      samples: at least 1; one more, which compiles, does not count.
    """

    def once(n_runs: int) -> float:
        nonlocal arguments
        started_at = time.perf_counter()
        arguments = jax.block_until_ready(run(*arguments, np.int32(n_runs)))
        return time.perf_counter() - started_at

    once(1)
    # The second call may still be slower than those of a long loop.
    n_runs = 1
    elapsed = once(1)
    while _slowest(elapsed) < seconds / 4 and n_runs < _MOST_RUNS:
        n_runs *= 4
        elapsed = once(n_runs)
    n_runs = _agreed(max(1, round(n_runs * seconds / max(elapsed, 1e-9))))
    times = [1e6 * once(n_runs) / n_runs for _ in range(samples)]
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median


_MOST_RUNS = 4096
"""Of one sample, before it is found out how long they take."""


def _slowest(elapsed: float) -> float:
    """Returns the longest time of all processes."""
    if jax.process_count() == 1:
        return elapsed
    return float(multihost_utils.process_allgather(np.float32(elapsed)).max())


def _agreed(n: int) -> int:
    """Returns the least number of all processes."""
    if jax.process_count() == 1:
        return n
    return int(multihost_utils.process_allgather(np.int32(n)).min())
