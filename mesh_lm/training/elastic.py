"""Continues a run on fewer devices: on the largest mesh that its config allows, with the same
global batch.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping

import jax

from mesh_lm import distributed
from mesh_lm.config import TrainConfig
from mesh_lm.distributed.heartbeat import Heartbeat
from mesh_lm.distributed.phases import Phases
from mesh_lm.errors import ConfigError
from mesh_lm.network.environment import ELASTIC, LEAST, NODES
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, MeshError, axes_of

_SHRINK = ("data", "fsdp")


def fit(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> TrainConfig:
    """Returns the config for the available devices if the launcher may continue with fewer nodes
    (--min-nodes); else the config itself.

    Call it after `distributed.start`. Raises distributed.FewerNodes, after
    reporting it to the launcher, if fewer nodes are enough. Raises ConfigError, already at the
    first start, if the available nodes or the --min-nodes cannot hold the run.
    """
    full = int(environment.get(ELASTIC, 0))
    if not full:
        return config
    n_nodes = int(environment[NODES])
    least = int(environment.get(LEAST, n_nodes))
    per_node = jax.device_count() // n_nodes
    try:
        on_nodes(config, full, least, per_node)
    except ConfigError as error:
        raise ConfigError(
            f"--min-nodes={least} is too few nodes for this config: {error}"
        ) from error
    fitting, n_filled = on_nodes(config, full, n_nodes, per_node)
    if n_filled < n_nodes:
        Heartbeat(Phases(), environment).send({"nodes": n_filled})
        raise distributed.FewerNodes
    if n_nodes < full:
        changes = f"{fitting.mesh}, train.microbatches={fitting.train.microbatches}"
        distributed.print_on_process0(f"elastic: {n_nodes} of {full} nodes: {changes}")
    return fitting


def on_nodes(config: TrainConfig, full: int, nodes: int, per_node: int) -> tuple[TrainConfig, int]:
    """Returns the config for at most `nodes` nodes of `per_node` devices, and how many nodes it
    fills. full: the nodes it was written for.

    Raises ConfigError if no mesh fits.
    """
    try:
        config = dataclasses.replace(config, mesh=config.mesh.resolve(full * per_node))
    except MeshError as error:
        raise ConfigError(str(error)) from error
    devices = nodes * per_node
    while devices:
        fitting = fitted(config, devices)
        size = math.prod(fitting.mesh.sizes().values())
        if size % per_node == 0:
            return fitting, size // per_node
        devices = size // per_node * per_node  # only full nodes are used
    raise ConfigError(
        f"no mesh that {config.mesh} can shrink to fills whole nodes of {per_node} devices, out of "
        f"{nodes}"
    )


def fitted(config: TrainConfig, n_devices: int) -> TrainConfig:
    """Returns the config on the largest mesh of at most n_devices that it allows; among equal
    sizes, on the one with the largest fsdp.

    island, pipeline, expert, sequence and tensor keep their sizes; data and fsdp are at most as
    large as in the config (-1: any). The global batch is kept, and microbatches are raised so that
    a device has no more sequences per microbatch than before. Raises ConfigError if no such mesh
    passes `mesh_lm.training.check.check`.
    """
    sizes = config.mesh.sizes()
    open_axes = [axis for axis, size in sizes.items() if size == -1 and axis not in _SHRINK]
    if open_axes:
        raise ConfigError(
            f"mesh.{open_axes[0]}=-1 would change with the number of devices, which only data and "
            "fsdp may do; give it a size"
        )
    reason = f"train.global_batch={config.train.global_batch} does not divide"
    for mesh in _meshes(config.mesh, n_devices):
        size = math.prod(mesh.sizes().values())
        for microbatches in _microbatches(config, mesh):
            train = dataclasses.replace(config.train, microbatches=microbatches)
            candidate = dataclasses.replace(config, mesh=mesh, train=train)
            try:
                return check(candidate, size)
            except ConfigError as error:
                reason = str(error)
    least = math.prod(size for axis, size in sizes.items() if axis not in _SHRINK)
    if n_devices < least:
        reason = f"it needs at least {least}"
    raise ConfigError(
        f"{config.mesh} cannot shrink to a mesh that fits on {n_devices} devices: {reason}"
    )


def _meshes(mesh: MeshConfig, n_devices: int) -> Iterator[MeshConfig]:
    """Yields the meshes that are small enough, the largest first, and among equal sizes the one
    with the largest fsdp.
    """
    fixed = math.prod(size for axis, size in mesh.sizes().items() if axis not in _SHRINK)
    most = n_devices // fixed
    most_data = most if mesh.data == -1 else min(mesh.data, most)
    most_fsdp = most if mesh.fsdp == -1 else min(mesh.fsdp, most)
    pairs = []
    for fsdp in range(1, most_fsdp + 1):
        for data in range(1, min(most_data, most // fsdp) + 1):
            pairs.append((data, fsdp))
    pairs.sort(key=lambda pair: (pair[0] * pair[1], pair[1]), reverse=True)
    for data, fsdp in pairs:
        yield dataclasses.replace(mesh, data=data, fsdp=fsdp)


def _microbatches(config: TrainConfig, mesh: MeshConfig) -> Iterator[int]:
    """Yields numbers of microbatches that divide the global batch over this mesh, from the fewest
    that need no more memory than before.
    """
    global_batch = config.train.global_batch
    axes = axes_of(config.rules.activations.get("batch"))
    old_sizes = [config.mesh.sizes().get(axis, 1) for axis in axes]
    new_sizes = [mesh.sizes().get(axis, 1) for axis in axes]
    n_shards = math.prod(max(1, size) for size in new_sizes)
    old_n_shards = math.prod(max(1, size) for size in old_sizes)
    if -1 in old_sizes:
        old_n_shards = n_shards
    for microbatches in range(config.train.microbatches, global_batch // n_shards + 1):
        divides = global_batch % (microbatches * n_shards) == 0
        fits = microbatches * n_shards >= config.train.microbatches * old_n_shards
        if divides and fits:
            yield microbatches
