"""Configs whose step does not have the two norms of the gradient noise scale."""

from __future__ import annotations

from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.parallel.noise_scale import replica_axes
from mesh_lm.parallel.problems.rows import name_of
from sharding_rules import ISLAND, axes_of, setting
from sharding_rules.rules import FLAT


def noise_scale_problems(config: TrainConfig) -> Iterator[str]:
    """Yields why train.noise_scale cannot be computed on this mesh, with these rules."""
    if not config.train.noise_scale:
        return
    rules = config.rules
    sizes = config.mesh.sizes()
    replicas = replica_axes(rules)
    for row, entry in rules.params.items():
        if name_of(row) == FLAT and axes_of(entry):
            yield (
                f"train.noise_scale=true: rules {rules.name!r} sum the gradient of a layer over "
                "replicas in every microbatch, and no replica has the norm of its own; use "
                "distributed, or set train.noise_scale=false"
            )
            return
    shards = rules.manual_axes() - replicas - {ISLAND} | {"expert"}
    for axis, size in sizes.items():
        if axis in shards and size > 1:
            yield (
                f"train.noise_scale=true: a device has only a part of its replica's gradient along "
                f"{setting(axis, size)}, and so not its norm; set {setting(axis, 1)}, or "
                "train.noise_scale=false"
            )
            return
    if all(sizes.get(axis, 1) == 1 for axis in replicas):
        yield (
            "train.noise_scale=true compares the gradients of replicas with that of the batch, and "
            f"{config.mesh} has no replicas along mesh.data; set mesh.data to 2 or more, or "
            "train.noise_scale=false"
        )
