"""The microbatch engine: gradients of a global batch, by any schedule, on any mesh.

It is manual over {pipeline, data, sequence, expert} and the axes that the rules declare as manual,
and leaves {fsdp, tensor} to XLA. A gradient is summed over each manual axis that does not shard it:
once a step, after the last microbatch, in the type of `Rules.reduction`
(`mesh_lm.parallel.gradient_reduction`). XLA by itself would all-reduce data-parallel gradients in
bf16 at every layer of every microbatch. The exception is the layers' matrices under zero3: without
a pipeline each layer sums its own in every microbatch (`mesh_lm.parallel.zero3`), and in a pipeline
once a step, one layer after another (`mesh_lm.parallel.stage_transfers`).

With one stage, the program is a scan over microbatches, which is gradient accumulation. With more,
it is a scan over the ticks of a schedule, a table of integers (`mesh_lm.schedules.table`), and the
same program on every stage.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from mesh_lm.config import PipelineConfig
from mesh_lm.errors import ConfigError
from mesh_lm.model import Batch, Sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.parallel import feedback, noise_scale, paired_tick, stage_transfers, tick, zero3
from mesh_lm.parallel.flat import FlatLayout
from mesh_lm.parallel.gradient_reduction import cast_to_float32, psum, reduce_gradients, reduce_sums
from mesh_lm.parallel.gradient_reduction import manual_axes as manual_axes
from mesh_lm.parallel.layer_collectives import zeros_on_device
from mesh_lm.parallel.layout import ModelLayout, Params, segment_of
from mesh_lm.parallel.paired_tick import PairedProgram
from mesh_lm.parallel.stack import RETURNED, forward, used_outside
from mesh_lm.parallel.stage import StageProgram
from mesh_lm.parallel.stage_transfers import StageTransfers
from mesh_lm.parallel.tick import Columns
from mesh_lm.schedules import custom
from mesh_lm.schedules.schedule import Schedule
from mesh_lm.schedules.table import Table, compile_table
from sharding_rules import ISLAND

Gradients = Callable[[Params, Batch, jax.Array], tuple[tuple[Sums, Sums], Params]]
"""(params, batch, key) -> ((scalars, arrays), gradients)."""
GradientsWithFeedback = Callable[
    [Params, Batch, jax.Array, Params], tuple[tuple[Sums, Sums], Params, Params]
]
"""(params, batch, key, feedback) -> ((scalars, arrays), gradients, new feedback)."""


def batch_sharding(layout: ModelLayout) -> jax.NamedSharding:
    """Returns the sharding of the leaves [M, B, S] of a global batch: M microbatches of B
    sequences.

    Leaves with fewer dimensions use its leading part, and a dimension of size 1, which broadcasts,
    is not sharded (`leaf_spec`).
    """
    return layout.shard.sharding("activations", (None, "batch", "seq"))


def leaf_spec(spec: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
    """Returns the spec of one leaf of a batch, from that of leaves [M, B, S] (`batch_sharding`)."""
    entries = zip(spec, shape, strict=False)
    return PartitionSpec(*(entry if size > 1 else None for entry, size in entries))


def value_and_grad(
    layout: ModelLayout,
) -> Callable[[Params, Batch, jax.Array], tuple[Sums, Params]]:
    """Returns a function (params, batch of [M, B, S] leaves, the step's key) -> (sums, gradients).

    The sums are over the global batch, the gradients those of objective / weight, in float32.
    params include the model's buffers. Arrays among the sums have a segment's layers as leading
    dimension, in the order that its parameters have in memory.
    """

    def run(params: Params, batch: Batch, key: jax.Array) -> tuple[Sums, Params]:
        (scalars, arrays), grads = region(layout, batch)(params, dict(batch), key)
        return {**scalars, **arrays}, grads

    return run


def region(layout: ModelLayout, batch: Batch, flat: FlatLayout = FlatLayout()) -> Gradients:
    """Returns `region_with_feedback` with nothing left out so far, as in a first step."""
    run = region_with_feedback(layout, batch, flat)
    return lambda params, batch, key: run(params, batch, key, feedback.zeros(layout))[:2]


def region_with_feedback(
    layout: ModelLayout,
    batch: Batch,
    flat: FlatLayout = FlatLayout(),
    *,
    replica_square: bool = False,
) -> GradientsWithFeedback:
    """Returns `value_and_grad` for batches shaped like this one, with scalars and arrays apart.

    flat: parameters of whose gradients each replica gets one shard, as flat vectors. Those that
    layers gather are read as vectors, too. The error feedback is what sums in int8 have left out
    (`mesh_lm.parallel.feedback`); empty without such sums. replica_square: whether the sums have
    that of `mesh_lm.parallel.noise_scale`, for configs that its problems do not refuse.
    """
    axes = manual_axes(layout)
    if layout.n_stages == 1:
        on_device = partial(_accumulate, layout, flat, replica_square)
        stage_arrays = ()
    else:
        table = training_table(layout, len(batch["tokens"]))
        on_device = partial(_run_pipeline, layout, flat, table)
        stage_arrays = _stage_arrays(layout, table)
    feedback_specs = {
        name: layout.shard.restrict(row.sharding.spec, axes)
        for name, row in feedback.feedback_of(layout).items()
    }
    sum_specs = (PartitionSpec(), PartitionSpec("pipeline"))
    run = _manual_region(
        on_device,
        layout,
        batch,
        stage_arrays,
        in_specs=(_param_specs(layout, flat), PartitionSpec(), feedback_specs),
        out_specs=(sum_specs, _grad_specs(layout, flat), feedback_specs),
        axes=axes,
    )
    return cast_to_float32(run) if layout.shard.rules.reduction == "bfloat16" else run


# On one device, inside the region: one program for one stage, another for a pipeline.


class _Inputs(NamedTuple):
    """The arrays from which one device computes its gradients."""

    params: Params
    """Local arrays of parameters and buffers; only shapes of matrices that layers gather."""
    vectors: Params
    """Local shards of the vectors that layers gather their matrices from (ZeRO-3)."""
    weight: jax.Array
    """The sum of all weights of the global batch."""


class _Totals(NamedTuple):
    """Sums over microbatches."""

    sums: Sums
    grads: Params
    """Those of parameters that are not stacked."""
    vector_grads: Params
    """Those of the vectors that layers gather their matrices from."""


def _accumulate(
    layout: ModelLayout,
    flat: FlatLayout,
    replica_square: bool,
    params: Params,
    batch: Batch,
    key: jax.Array,
    old_feedback: Params,
) -> tuple[tuple[Sums, Sums], Params, Params]:
    """One stage: adds up the gradients of all microbatches, then reduces them over devices."""
    params, vectors, weight = _inputs(layout, flat, params, batch)

    # Gradients of stacked parameters are summed in place, in Refs (`mesh_lm.parallel.stack.Sinks`).
    # All others are in the carry of the scan.
    stacked_zeros = layout.constrain(differentiated(layout, params, flat)[0], "params")
    stacked_grads = {name: jax.new_ref(zero) for name, zero in stacked_zeros.items()}
    run = partial(zero3.run_segment, layout, vectors) if vectors else None

    def microbatch(total: _Totals | None, one: Batch) -> tuple[_Totals, None]:
        dropout = Dropout.of(key, one["sample_ids"], one["indices"])
        sinks, unstacked = differentiated(layout, params, flat)
        vector_totals = zeros_on_device(vectors) if total is None else total.vector_grads
        objective = partial(
            forward, layout.bind, layout.segments, params, one, dropout, 1 / weight, run=run
        )
        value, pull, sums = jax.vjp(objective, sinks, unstacked, vector_totals, has_aux=True)
        pull = pull.with_refs(
            stacked_grads, dict.fromkeys(unstacked, RETURNED), dict.fromkeys(vectors, RETURNED)
        )
        _, unstacked_grads, vector_totals = pull(jnp.ones_like(value))
        grads = layout.constrain(unstacked_grads, "params")
        if total is not None:
            sums, grads = jax.tree.map(jnp.add, (total.sums, total.grads), (sums, grads))
        return _Totals(sums, grads, vector_totals), None

    if len(batch["tokens"]) == 1:
        total = microbatch(None, _first(batch))[0]
    else:
        zeros = _zeros(jax.eval_shape(partial(microbatch, None), _first(batch))[0])
        total = lax.scan(microbatch, zeros, dict(batch))[0]
    sums = total.sums
    grads = total.grads | total.vector_grads
    stacked = {name: jax.freeze(ref) for name, ref in stacked_grads.items()}
    grads |= layout.constrain(stacked, "params")
    if replica_square:
        sums = noise_scale.with_replica_square(sums, grads)
    return _reduce(layout, flat, sums, grads, old_feedback)


def _run_pipeline(
    layout: ModelLayout,
    flat: FlatLayout,
    table: Table,
    columns: Columns,
    stage: Columns,
    params: Params,
    batch: Batch,
    key: jax.Array,
    old_feedback: Params,
) -> tuple[tuple[Sums, Sums], Params, Params]:
    """A pipeline: runs this stage's part of the schedule, then reduces over devices.

    columns, stage: as `_stage_arrays` makes them, [1, ...].
    """
    params, vectors, weight = _inputs(layout, flat, params, batch)
    transfers = StageTransfers(layout, vectors, table, _unstacked(stage))
    params = params | transfers.first_weights()
    if layout.pipeline.pair_layers:
        paired = PairedProgram(layout, params, batch, _unstacked(stage), key=key, weight=weight)
        sums, grads = paired_tick.gradients(paired, table, _unstacked(columns), transfers)
    else:
        program = StageProgram(layout, params, batch, _unstacked(stage), key=key, weight=weight)
        sums, grads = tick.gradients(program, table, _unstacked(columns), transfers)
    return _reduce(layout, flat, sums, grads, old_feedback)


def _inputs(layout: ModelLayout, flat: FlatLayout, params: Params, batch: Batch) -> _Inputs:
    vectors, params = zero3.split_vectors(layout, flat, params)
    _require_layers_apart(layout, params, _first(batch))
    # Not summed over stages, each of which has the whole batch.
    weight = psum(batch["weights"].sum(), manual_axes(layout) - {"pipeline"}, layout)
    return _Inputs(params, vectors, weight)


def _reduce(
    layout: ModelLayout, flat: FlatLayout, sums: Sums, grads: Params, old_feedback: Params
) -> tuple[tuple[Sums, Sums], Params, Params]:
    """Returns the region's outputs, from this device's sums and gradients."""
    reduced_sums = reduce_sums(sums, layout)
    specs = _param_specs(layout, flat)
    grads, feedback = reduce_gradients(layout, flat, grads, specs, reduced_sums, old_feedback)
    return reduced_sums, grads, feedback


def differentiated(
    layout: ModelLayout, params: Params, flat: FlatLayout = FlatLayout()
) -> tuple[Params, Params]:
    """Returns the float32 inputs that are differentiated: (zeros for stacked parameters, the
    other parameters).

    See `mesh_lm.parallel.stack.Sinks`. Parameters of segments whose layers gather matrices count as
    others.
    """
    stacked = {name for name in layout.stacked if not flat.gathered_by(segment_of(name))}
    sinks: Params = {}
    other_params: Params = {}
    for name, x in params.items():
        if name in layout.buffers or name in flat.gathered_names:
            continue
        if name in stacked:
            sinks[name] = jnp.zeros(x.shape, jnp.float32)
        else:
            other_params[name] = x.astype(jnp.float32)
    return sinks, other_params


# Evaluation.


def evaluate(
    layout: ModelLayout, flat: FlatLayout = FlatLayout()
) -> Callable[[Params, Batch], Sums]:
    """Returns a function (params, batch of [M, B, S] leaves) -> scalar sums over the batch, without
    dropout and gradients.

    flat: those of its parameters that layers gather are read as flat vectors.
    """
    # All islands evaluate one set of weights together.
    axes = manual_axes(layout) | ({ISLAND} & set(layout.shard.mesh.axis_names))

    def run(params: Params, batch: Batch) -> Sums:
        if layout.n_stages == 1:
            on_device = partial(_evaluate_one_stage, layout, flat, axes)
            stage_arrays = ()
        else:
            table = evaluation_table(layout, len(batch["tokens"]))
            on_device = partial(_evaluate_pipeline, layout, flat, axes, table)
            stage_arrays = _stage_arrays(layout, table)
        evaluation = _manual_region(
            on_device,
            layout,
            batch,
            stage_arrays,
            in_specs=(_param_specs(layout, flat),),
            out_specs=PartitionSpec(),
            axes=axes,
        )
        return evaluation(params, dict(batch))

    return run


def _evaluate_one_stage(
    layout: ModelLayout, flat: FlatLayout, axes: frozenset[str], params: Params, batch: Batch
) -> Sums:
    """Returns the scalar sums of all microbatches, reduced over devices."""
    vectors, params = zero3.split_vectors(layout, flat, params)
    run = partial(zero3.run_segment, layout, vectors)

    def microbatch(total: Sums | None, one: Batch) -> tuple[Sums, None]:
        _, sums = forward(layout.bind, layout.segments, params, one, vector_totals={}, run=run)
        scalars = {name: x for name, x in sums.items() if x.ndim == 0}
        if total is None:
            return scalars, None
        return jax.tree.map(jnp.add, total, scalars), None

    zeros = _zeros(jax.eval_shape(partial(microbatch, None), _first(batch))[0])
    sums, _ = lax.scan(microbatch, zeros, dict(batch))
    return psum(sums, axes, layout)


def _evaluate_pipeline(
    layout: ModelLayout,
    flat: FlatLayout,
    axes: frozenset[str],
    table: Table,
    columns: Columns,
    stage: Columns,
    params: Params,
    batch: Batch,
) -> Sums:
    """Returns the scalar sums of this stage's part of the schedule, reduced over devices."""
    vectors, params = zero3.split_vectors(layout, flat, params)
    transfers = StageTransfers(layout, vectors, table, _unstacked(stage))
    weights = params | transfers.all_weights()
    program = StageProgram(layout, weights, batch, _unstacked(stage))
    return psum(tick.sums(program, table, _unstacked(columns)), axes, layout)


# Schedules.


@functools.cache
def training_schedule(pipeline: PipelineConfig, stages: int, microbatches: int) -> Schedule:
    """Returns the schedule of a step.

    Raises ConfigError for a number of microbatches that it does not support, and for ops other than
    F and B.
    """
    schedule = custom.find_schedule(pipeline.schedule, stages, microbatches, pipeline.chunks)
    if schedule.kinds == "FB":
        return schedule
    if "W" in schedule.kinds:
        reason = "separate weight gradients (W) are for study"
    else:
        reason = "gradients need B"
    raise ConfigError(
        f"pipeline.schedule={pipeline.schedule} has {schedule.kinds}, and the engine runs F and B: "
        f"{reason}; use 1f1b"
    )


def training_table(layout: ModelLayout, microbatches: int) -> Table:
    """Returns the table of a step's schedule, as the engine reads it. Raises as
    `training_schedule`.
    """
    return _tables(layout.pipeline, layout.n_stages, microbatches)[0]


def evaluation_table(layout: ModelLayout, microbatches: int) -> Table:
    """Returns the table of an evaluation: forward passes only."""
    return _tables(layout.pipeline, layout.n_stages, microbatches)[1]


@functools.cache
def _tables(pipeline: PipelineConfig, stages: int, microbatches: int) -> tuple[Table, Table]:
    training = training_schedule(pipeline, stages, microbatches)
    evaluation = custom.find_schedule("forward", stages, microbatches, pipeline.chunks)
    table = compile_table(training, pipeline.stash == "input", pipeline.pair_layers)
    return table, compile_table(evaluation)


# The region.


def _manual_region(
    on_device: Callable,
    layout: ModelLayout,
    batch: Batch,
    stage_arrays: tuple[Columns, ...],
    *,
    in_specs: tuple[Any, ...],
    out_specs: Any,
    axes: frozenset[str],
) -> Callable:
    """Returns a function (params, batch, ...) that calls on_device in a shard_map over `axes`.

    stage_arrays: dicts of [stages, ...], which on_device gets before the other arguments, as
    [1, ...]. in_specs: of params, and of what follows the batch.
    """
    leaf = layout.shard.restrict(batch_sharding(layout).spec, axes)
    batch_specs = {name: leaf_spec(leaf, x.shape) for name, x in batch.items()}
    stage_specs = (PartitionSpec("pipeline"),) * len(stage_arrays)
    param_specs, *other_specs = in_specs
    # Inside of an island's region the mesh is in the context, and is not passed again.
    is_nested = bool(jax.sharding.get_abstract_mesh().manual_axes)
    run = jax.shard_map(
        on_device,
        in_specs=(*stage_specs, param_specs, batch_specs, *other_specs),
        out_specs=out_specs,
        axis_names=axes,
        check_vma=False,
        **({} if is_nested else {"mesh": layout.shard.mesh}),
    )
    return partial(run, *stage_arrays)


def _stage_arrays(layout: ModelLayout, table: Table) -> tuple[Columns, Columns]:
    """Returns (the table's columns, int32 [stages, T]; the rows and layers of each stage)."""
    columns = {name: column.T for name, column in table.columns.items()}
    numbers = {"number": np.arange(table.stages, dtype=np.int32)}
    for name, stack in layout.stacks.items():
        first_layers = stack.chunk_first_layers() + layout.config.stack().start(name)
        numbers[f"{name}/first"] = first_layers.astype(np.int32)
        numbers[f"{name}/start"] = stack.chunk_start_rows()
        numbers[f"{name}/skip"] = stack.chunk_skipped_rows()
        numbers[f"{name}/count"] = stack.chunk_layers()
    for name, transfers in stage_transfers.plan(layout, table).items():
        numbers[f"{name}/gathers"] = transfers.gather_order
        numbers[f"{name}/sums"] = transfers.reduce_order
    return columns, numbers


def _unstacked(stage_arrays: Columns) -> Columns:
    """Returns this stage's entry of arrays [1, ...]."""
    return {name: x[0] for name, x in stage_arrays.items()}


def _param_specs(layout: ModelLayout, flat: FlatLayout) -> dict[str, PartitionSpec]:
    """Returns the specs of what the engine reads, over the manual axes: of parameters, with vectors
    in the place of the matrices that layers gather.
    """
    shardings = {
        name: sharding
        for name, sharding in layout.shardings("params").items()
        if name not in flat.gathered_names
    }
    for vector in flat.vectors:
        if vector.gathered_by_layer:
            shardings[vector.name] = vector.sharding
    axes = manual_axes(layout)
    return {name: layout.shard.restrict(s.spec, axes) for name, s in shardings.items()}


def _grad_specs(layout: ModelLayout, flat: FlatLayout) -> dict[str, PartitionSpec]:
    """Returns the specs of the gradients, over the manual axes: of parameters, or of vectors of
    them.
    """
    constant_names = flat.names | layout.buffers
    specs = {n: s for n, s in _param_specs(layout, flat).items() if n not in constant_names}
    axes = manual_axes(layout)
    return specs | {v.name: layout.shard.restrict(v.spec, axes) for v in flat.vectors}


def _require_layers_apart(layout: ModelLayout, params: Params, one: Batch) -> None:
    """Raises ConfigError if the model uses a parameter of its layers elsewhere: the gradient would
    miss that contribution.
    """
    used_names = used_outside(layout.bind, params, layout.stacked - layout.buffers, one)
    if used_names:
        raise ConfigError(
            f"{type(layout.config).__name__}: prepare, embed or loss uses {used_names[0]}, a "
            "parameter of the layers; make it a parameter of the model itself"
        )


def _first(batch: Batch) -> Batch:
    """Returns the first microbatch."""
    return {name: x[0] for name, x in batch.items()}


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)
