"""The microbatch engine: gradients of a global batch, by any schedule, on any mesh.

It is manual over {pipeline, data, sequence, expert} and what the rules declare as manual, and leaves {fsdp, tensor} to XLA: what is not
sharded over a manual axis is reduced over it exactly once per step, in fp32, after the last microbatch. Left to XLA, data-parallel
gradients are all-reduced in bf16 at every layer of every microbatch.

A schedule is a table of integers (`mesh_lm.pipeline.table`); the program is a scan over its ticks, the same on every stage. With one stage
a tick is one microbatch through the whole model, which is gradient accumulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from mesh_lm.blueprint import Blueprint, Params
from mesh_lm.config import ConfigError, PipelineConfig
from mesh_lm.model import Batch, Sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.pipeline import custom, ring
from mesh_lm.pipeline.part import Part
from mesh_lm.pipeline.ring import Columns
from mesh_lm.pipeline.schedules import Schedule
from mesh_lm.pipeline.table import Table, table
from sharding_rules import axes_of


def manual(blueprint: Blueprint) -> frozenset[str]:
    """The mesh axes that the engine is manual over."""
    return blueprint.shard.rules.manual_axes() & set(blueprint.shard.mesh.axis_names)


def batch_sharding(blueprint: Blueprint) -> jax.NamedSharding:
    """Of the leaves [M, B, S] of a global batch: M microbatches of B sequences. Leaves with fewer dimensions use its leading part."""
    return blueprint.shard.sharding("activations", (None, "batch", "seq"))


def value_and_grad(blueprint: Blueprint) -> Callable[[Params, Batch, jax.Array], tuple[Sums, Params]]:
    """(params, batch of [M, B, S] leaves, the step's key) -> (sums over the global batch, gradients of objective / weight)."""

    def local(params: Params, batch: Batch, key: jax.Array, columns: Columns, stage: Columns) -> tuple[Sums, Params]:
        weight = _psum(batch["weights"].sum(), by_hand - {"pipeline"}, blueprint)  # every stage has the whole batch

        def objective(params: Params, one: Batch) -> tuple[jax.Array, Sums]:
            sums = blueprint.bind(params)(one, Dropout.of(key, one["sample_ids"]))
            return sums["objective"] / weight, sums

        def microbatch(one: Batch) -> tuple[Sums, Params]:
            (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(params, one)
            return sums, blueprint.constrain(grads, "params")

        if blueprint.stages.stages == 1:
            sums, grads = _summed(microbatch, batch)
        else:
            part = Part(blueprint, params, batch, stage, key=key, weight=weight)
            sums, grads = ring.gradients(part, training_table(blueprint, len(batch["tokens"])), columns)
        return _psum(sums, by_hand, blueprint), {name: _psum(g, by_hand - held[name], blueprint) for name, g in grads.items()}

    specs, by_hand = _specs(blueprint), manual(blueprint)
    held = {name: {a for entry in spec for a in axes_of(entry)} for name, spec in specs.items()}
    return _manual(local, blueprint, training_table, (PartitionSpec(), specs))


def evaluate(blueprint: Blueprint) -> Callable[[Params, Batch], Sums]:
    """(params, batch of [M, B, S] leaves) -> sums over the batch, without dropout and without gradients."""

    def local(params: Params, batch: Batch, key: jax.Array, columns: Columns, stage: Columns) -> Sums:
        if blueprint.stages.stages == 1:
            sums = _summed(lambda one: blueprint.bind(params)(one, None), batch)
        else:
            sums = ring.sums(Part(blueprint, params, batch, stage), evaluation_table(blueprint, len(batch["tokens"])), columns)
        return _psum(sums, manual(blueprint), blueprint)

    run = _manual(local, blueprint, evaluation_table, PartitionSpec())
    return lambda params, batch: run(params, batch, jax.random.key(0))


@functools.cache
def training_schedule(pipeline: PipelineConfig, stages: int, microbatches: int) -> Schedule:
    """The schedule of a step. Raises ConfigError where there is none with so many microbatches, or it is not one of F and B."""
    schedule = custom.find(pipeline.schedule, stages, microbatches, pipeline.chunks)
    if schedule.kinds != "FB":
        fix = "weight gradients apart (W) are for study" if "W" in schedule.kinds else "gradients come from the B's"
        raise ConfigError(f"pipeline.schedule={pipeline.schedule} has {schedule.kinds}, and the engine runs F and B: {fix}; take 1f1b")
    return schedule


@functools.cache
def _tables(pipeline: PipelineConfig, stages: int, microbatches: int) -> tuple[Table, Table]:
    schedule = training_schedule(pipeline, stages, microbatches)
    return table(schedule, pipeline.stash == "input"), table(custom.find("forward", stages, microbatches, pipeline.chunks))


def training_table(blueprint: Blueprint, microbatches: int) -> Table:
    """As the engine reads the schedule of a step. Raises as `training_schedule`."""
    return _tables(blueprint.pipeline, blueprint.stages.stages, microbatches)[0]


def evaluation_table(blueprint: Blueprint, microbatches: int) -> Table:
    """The same of an evaluation: forward passes alone."""
    return _tables(blueprint.pipeline, blueprint.stages.stages, microbatches)[1]


def _summed(f: Callable[[Batch], Any], batch: Batch) -> Any:
    """Sum of f over the leading dimension of the batch's leaves, in the results' own types."""
    one = {name: x[0] for name, x in batch.items()}
    if len(batch["tokens"]) == 1:
        return f(one)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, one))
    return lax.scan(lambda total, one: (jax.tree.map(jnp.add, total, f(one)), None), zeros, dict(batch))[0]


def _psum(tree: Any, axes: frozenset[str] | set[str], blueprint: Blueprint) -> Any:
    over = tuple(a for a in blueprint.shard.mesh.axis_names if a in axes and blueprint.shard.mesh.shape[a] > 1)
    return lax.psum(tree, over) if over else tree


def _specs(blueprint: Blueprint) -> dict[str, PartitionSpec]:
    return {name: blueprint.shard.only(s.spec, manual(blueprint)) for name, s in blueprint.shardings("params").items()}


def _manual(f: Callable, blueprint: Blueprint, table_of: Callable[[Blueprint, int], Table], out_specs: Any) -> Callable:
    """f(params, batch, key, this stage's columns of the table, its number and layers) with its arrays local along the manual axes."""
    shard, specs, stages = blueprint.shard, _specs(blueprint), blueprint.stages
    leaf = shard.only(batch_sharding(blueprint).spec, manual(blueprint))
    by_stage = PartitionSpec("pipeline" if stages.stages > 1 else None)

    def run(params: Params, batch: Batch, key: jax.Array) -> Any:
        batch_specs = {name: PartitionSpec(*leaf[: x.ndim]) for name, x in batch.items()}
        columns, stage = {}, {}
        if stages.stages > 1:
            columns = {name: column.T for name, column in table_of(blueprint, len(batch["tokens"])).columns.items()}
            stage = {"number": np.arange(stages.stages, dtype=np.int32), "first": stages.first(), "count": stages.count()}

        def local(params: Params, batch: Batch, key: jax.Array, columns: Columns, stage: Columns) -> Any:
            columns, stage = ({name: x[0] for name, x in rows.items()} for rows in (columns, stage))
            return f(params, batch, key, columns, stage)

        in_specs = (specs, batch_specs, PartitionSpec(), by_stage, by_stage)
        region = jax.shard_map(
            local, mesh=shard.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual(blueprint), check_vma=False
        )
        return region(params, dict(batch), key, columns, stage)

    return run
