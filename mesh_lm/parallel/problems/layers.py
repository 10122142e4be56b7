"""Policies of single layers that cannot, or should not, apply: rematerialisation, weights that are
kept, halves of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from mesh_lm.config import TrainConfig
from mesh_lm.parallel.problems.rows import name_of
from mesh_lm.schedules.segments import LIGHTER
from sharding_rules import axes_of
from sharding_rules.rules import FLAT


def layer_problems(config: TrainConfig) -> Iterator[str]:
    """Yields wrong numbers of layers that recompute less, or that keep the weights they gather."""
    if config.model.problems():
        return
    remat_layers = getattr(config.model, "remat_layers", None)
    kept_layers = getattr(config.model, "kept_layers", None) or None
    if remat_layers is not None:
        yield from _count_problems(config, "remat_layers", remat_layers)
    if kept_layers is not None:
        yield from _count_problems(config, "kept_layers", kept_layers)
    if remat_layers is not None:
        yield from _remat_problems(config, remat_layers)
    if kept_layers is not None:
        yield from _kept_problems(config, kept_layers)


def _count_problems(config: TrainConfig, field: str, number: int) -> Iterator[str]:
    n_layers = getattr(config.model, "n_layers", 0)
    segments = config.model.stack().segments
    if not 0 <= number <= n_layers:
        yield f"model.{field}={number} must be in [0, {n_layers}], the layers of the model"
    elif any(run.begin % segment.period for segment in segments for run in segment.runs()):
        yield (
            f"model.{field}={number} divides a period of {segments[0].period} layers "
            "(model.window); set it to a multiple of that"
        )


def _remat_problems(config: TrainConfig, remat_layers: int) -> Iterator[str]:
    for segment in config.model.stack().segments:
        if segment.remat not in LIGHTER:
            yield (
                f"model.remat_layers={remat_layers}: no policy recomputes less than "
                f"remat={segment.remat} of {segment.name!r}; set model.remat to one of "
                f"{', '.join(LIGHTER)}, or leave model.remat_layers unset"
            )
            break
    if config.mesh.pipeline > 1:
        yield (
            f"model.remat_layers={remat_layers}: stages treat all layers alike, and "
            f"mesh.pipeline={config.mesh.pipeline}; leave model.remat_layers unset"
        )


def _kept_problems(config: TrainConfig, kept_layers: int) -> Iterator[str]:
    gathered = [row for row, entry in config.rules.params.items() if name_of(row) == FLAT and entry]
    if config.mesh.pipeline > 1:
        yield (
            f"model.kept_layers={kept_layers}: a stage keeps what it gathers anyway, and "
            f"mesh.pipeline={config.mesh.pipeline}; set model.kept_layers=0"
        )
    elif not gathered:
        yield (
            f"model.kept_layers={kept_layers}: under rules {config.rules.name!r} no layer gathers "
            "its own weights; use zero3, or set it to 0"
        )


def half_problems(config: TrainConfig) -> Iterator[str]:
    """Yields why no layer can, or why none should, run on two halves of a microbatch."""
    if not getattr(config.model, "batch_halves", False):
        return
    mesh = config.mesh.sizes()
    batch_axes = axes_of(config.rules.activations.get("batch"))
    other_axes = set()
    for row, entry in config.rules.activations.items():
        if name_of(row) == "experts":
            other_axes |= set(axes_of(entry))
        elif name_of(row) != "batch":
            other_axes |= set(axes_of(entry)) - set(batch_axes)
    if not any(mesh.get(axis, 1) > 1 for axis in other_axes):
        yield (
            "model.batch_halves=True: on this mesh layers exchange no activations that a half "
            "could hide; set model.batch_halves=False"
        )
    elif config.pipeline.pair_layers:
        yield (
            "model.batch_halves=True: pipeline.pair_layers=True hides the same collectives; "
            "set model.batch_halves=False, or pipeline.pair_layers=False"
        )
    yield from _odd_batch_problems(config, math.prod(mesh.get(axis, 1) for axis in batch_axes))


def _odd_batch_problems(config: TrainConfig, n_shards: int) -> Iterator[str]:
    train = config.train
    if train.microbatches <= 0 or train.global_batch % (train.microbatches * n_shards):
        return
    n_sequences = train.global_batch // (train.microbatches * n_shards)
    if n_sequences % 2 == 0:
        return
    fix = "set model.batch_halves=False"
    for microbatches in range(train.microbatches, 0, -1):
        if train.global_batch % (2 * microbatches * n_shards) == 0:
            fix = f"set train.microbatches={microbatches}, or model.batch_halves=False"
            break
    yield (
        f"model.batch_halves=True: a device has {n_sequences} sequences of a microbatch, an odd "
        f"number; {fix}"
    )
