"""The microbatch engine: gradients of a global batch, by any schedule, on any mesh.

It is manual over {pipeline, data, sequence, expert} and the axes that the rules declare as manual,
and leaves {fsdp, tensor} to XLA. A gradient is reduced over each manual axis that does not shard it
exactly once per step, in fp32, after the last microbatch. XLA by itself would all-reduce
data-parallel gradients in bf16 at every layer of every microbatch.

A schedule is a table of integers (`mesh_lm.schedules.table`). The program, the same on every stage,
is a scan over its ticks. With one stage, a tick is one microbatch through the whole model, which is
gradient accumulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from mesh_lm.config import PipelineConfig
from mesh_lm.errors import ConfigError
from mesh_lm.model import Batch, Sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.optim.contract import is_matrix
from mesh_lm.parallel import feedback, gathered, layer_pairs, ring, stage_transfers
from mesh_lm.parallel.flat import FlatLayout
from mesh_lm.parallel.layer_collectives import local_spec
from mesh_lm.parallel.layer_pairs import PairedProgram
from mesh_lm.parallel.layout import ModelLayout, Params, segment_of
from mesh_lm.parallel.reductions import two_level_sum
from mesh_lm.parallel.ring import Columns
from mesh_lm.parallel.stack import RETURNED, forward, used_outside
from mesh_lm.parallel.stage import StageProgram
from mesh_lm.parallel.stage_transfers import StageTransfers
from mesh_lm.schedules import custom
from mesh_lm.schedules.schedule import Schedule
from mesh_lm.schedules.table import Table, compile_table
from sharding_rules import ISLAND, axes_of


def manual_axes(layout: ModelLayout) -> frozenset[str]:
    """The mesh axes that the engine is manual over when it trains: of islands it sees one
    (`mesh_lm.training.islands`).
    """
    return layout.shard.rules.manual_axes() & set(layout.shard.mesh.axis_names) - {ISLAND}


def batch_sharding(layout: ModelLayout) -> jax.NamedSharding:
    """The sharding of the leaves [M, B, S] of a global batch: M microbatches of B sequences. Leaves
    with fewer dimensions use its leading part, and a dimension of size 1, which broadcasts, is not
    sharded (`leaf_spec`).
    """
    return layout.shard.sharding("activations", (None, "batch", "seq"))


def value_and_grad(
    layout: ModelLayout,
) -> Callable[[Params, Batch, jax.Array], tuple[Sums, Params]]:
    """A function (params, batch of [M, B, S] leaves, the step's key) -> (sums over the global
    batch, gradients of objective / weight).

    params include the model's buffers. Gradients are float32. Arrays among the sums have a
    segment's layers as leading dimension, in the order that its parameters have in memory.
    """

    def run(params: Params, batch: Batch, key: jax.Array) -> tuple[Sums, Params]:
        (sums, arrays), grads = region(layout, batch)(params, dict(batch), key)
        return {**sums, **arrays}, grads

    return run


def region(
    layout: ModelLayout, batch: Batch, flat: FlatLayout = FlatLayout()
) -> Callable[[Params, Batch, jax.Array], tuple[tuple[Sums, Sums], Params]]:
    """`region_with_feedback` with nothing left out so far, as in a first step."""
    run = region_with_feedback(layout, batch, flat)
    return lambda params, batch, key: run(params, batch, key, feedback.zeros(layout))[:2]


def region_with_feedback(
    layout: ModelLayout, batch: Batch, flat: FlatLayout = FlatLayout()
) -> Callable[[Params, Batch, jax.Array, Params], tuple[tuple[Sums, Sums], Params, Params]]:
    """`value_and_grad` for batches shaped like this one, with the sums as a pair (scalars, arrays),
    and with the error feedback in and out.

    flat: parameters whose gradients each replica gets one shard of, as flat vectors. Those that
    layers gather are read as vectors, too. The error feedback is what sums in int8 have left out
    (`mesh_lm.parallel.feedback`); empty without such sums.
    """
    specs, by_hand = _specs(layout, flat), manual_axes(layout)
    kept = feedback.feedback_of(layout)
    table = training_table(layout, len(batch["tokens"])) if layout.n_stages > 1 else None

    def gradients(
        columns: Columns,
        stage: Columns,
        params: Params,
        batch: Batch,
        key: jax.Array,
        before: Params,
    ) -> tuple[tuple[Sums, Sums], Params, Params]:
        vectors, params = gathered.divided(layout, flat, params)
        _require_layers_apart(layout, params, _first(batch))
        # every stage has the same batch
        weight = _psum(batch["weights"].sum(), by_hand - {"pipeline"}, layout)

        def microbatch(total: Any, one: Batch) -> tuple[Any, None]:
            dropout = Dropout.of(key, one["sample_ids"], one["indices"])
            sinks, shared = differentiated(layout, params, flat)

            run = partial(gathered.run_segment, layout) if vectors else None
            objective = partial(
                forward, layout.bind, layout.segments, params, one, dropout, 1 / weight, run=run
            )
            value, pull, sums = jax.vjp(objective, sinks, shared, vectors, has_aux=True)
            wanted = of_layers, dict.fromkeys(shared, RETURNED), dict.fromkeys(vectors, RETURNED)
            _, others, shards = pull.with_refs(*wanted)(jnp.ones_like(value))
            return _added(total, (sums, layout.constrain(others, "params") | shards)), None

        if table is not None:
            transfers, kind = (
                StageTransfers(layout, vectors, table, _own(stage)),
                PairedProgram if layout.pipeline.pair_layers else StageProgram,
            )
            program = kind(
                layout,
                params | transfers.first_weights(),
                batch,
                _own(stage),
                key=key,
                weight=weight,
            )
            if isinstance(program, PairedProgram):
                sums, grads = layer_pairs.gradients(program, table, _own(columns), transfers)
            else:
                sums, grads = ring.gradients(program, table, _own(columns), transfers)
        else:
            zeros = layout.constrain(differentiated(layout, params, flat)[0], "params")
            of_layers = {name: jax.new_ref(zero) for name, zero in zeros.items()}
            if len(batch["tokens"]) == 1:
                sums, grads = microbatch(None, _first(batch))[0]
            else:
                zeros = _zeros(jax.eval_shape(partial(microbatch, None), _first(batch))[0])
                sums, grads = lax.scan(microbatch, zeros, dict(batch))[0]
            grads |= layout.constrain(
                {name: jax.freeze(ref) for name, ref in of_layers.items()}, "params"
            )
        reduced = _reduced(sums, layout)
        return reduced, *_reduced_gradients(grads, specs, layout, flat, reduced, before)

    of_grads = {
        name: spec for name, spec in specs.items() if name not in flat.names | layout.buffers
    }
    of_grads |= {
        vector.name: layout.shard.restrict(vector.spec, by_hand) for vector in flat.vectors
    }
    of_feedback = {
        name: layout.shard.restrict(each.sharding.spec, by_hand) for name, each in kept.items()
    }
    out_specs = ((PartitionSpec(), PartitionSpec("pipeline")), of_grads, of_feedback)
    run = _manual(
        gradients, layout, table, batch, (specs, PartitionSpec(), of_feedback), out_specs, by_hand
    )
    return _cast_to_float32(run) if layout.shard.rules.reduction == "bfloat16" else run


def evaluate(
    layout: ModelLayout, flat: FlatLayout = FlatLayout()
) -> Callable[[Params, Batch], Sums]:
    """A function (params, batch of [M, B, S] leaves) -> scalar sums over the batch, without dropout
    and gradients.

    flat: those of its parameters that layers gather are read as flat vectors.
    """
    by_hand = manual_axes(layout) | {ISLAND} & set(layout.shard.mesh.axis_names)

    def run(params: Params, batch: Batch) -> Sums:
        table = evaluation_table(layout, len(batch["tokens"])) if layout.n_stages > 1 else None

        def on_device(columns: Columns, stage: Columns, params: Params, batch: Batch) -> Sums:
            vectors, params = gathered.divided(layout, flat, params)

            def microbatch(total: Any, one: Batch) -> tuple[Any, None]:
                sums = forward(
                    layout.bind,
                    layout.segments,
                    params,
                    one,
                    own=vectors,
                    run=partial(gathered.run_segment, layout),
                )[1]
                return _added(total, {name: x for name, x in sums.items() if not x.ndim}), None

            if table is not None:
                weights = params | StageTransfers(layout, vectors, table, _own(stage)).all_weights()
                return _psum(
                    ring.sums(
                        StageProgram(layout, weights, batch, _own(stage)), table, _own(columns)
                    ),
                    by_hand,
                    layout,
                )
            zeros = _zeros(jax.eval_shape(partial(microbatch, None), _first(batch))[0])
            return _psum(lax.scan(microbatch, zeros, dict(batch))[0], by_hand, layout)

        return _manual(
            on_device, layout, table, batch, (_specs(layout, flat),), PartitionSpec(), by_hand
        )(params, dict(batch))

    return run


@functools.cache
def training_schedule(pipeline: PipelineConfig, stages: int, microbatches: int) -> Schedule:
    """The schedule of a step. Raises ConfigError for a number of microbatches that it does not
    support, and for ops other than F and B.
    """
    schedule = custom.find_schedule(pipeline.schedule, stages, microbatches, pipeline.chunks)
    if schedule.kinds != "FB":
        fix = (
            "separate weight gradients (W) are for study"
            if "W" in schedule.kinds
            else "gradients need B"
        )
        raise ConfigError(
            f"pipeline.schedule={pipeline.schedule} has {schedule.kinds}, and the engine runs F "
            f"and B: {fix}; use 1f1b"
        )
    return schedule


@functools.cache
def _tables(pipeline: PipelineConfig, stages: int, microbatches: int) -> tuple[Table, Table]:
    training = training_schedule(pipeline, stages, microbatches)
    evaluation = custom.find_schedule("forward", stages, microbatches, pipeline.chunks)
    return compile_table(training, pipeline.stash == "input", pipeline.pair_layers), compile_table(
        evaluation
    )


def training_table(layout: ModelLayout, microbatches: int) -> Table:
    """The table of a step's schedule, as the engine reads it. Raises as `training_schedule`
    does.
    """
    return _tables(layout.pipeline, layout.n_stages, microbatches)[0]


def evaluation_table(layout: ModelLayout, microbatches: int) -> Table:
    """The table of an evaluation: forward passes only."""
    return _tables(layout.pipeline, layout.n_stages, microbatches)[1]


def _first(batch: Batch) -> Batch:
    return {name: x[0] for name, x in batch.items()}


def _zeros(like: Any) -> Any:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)


def _added(total: Any, more: Any) -> Any:
    return more if total is None else jax.tree.map(jnp.add, total, more)


def _reduced(sums: Sums, layout: ModelLayout) -> tuple[Sums, Sums]:
    """(scalars summed over all devices, arrays summed over all devices of a stage, since each stage
    has its own layers).
    """
    scalars, arrays = (
        {name: x for name, x in sums.items() if bool(x.ndim) is wanted} for wanted in (False, True)
    )
    return _psum(scalars, manual_axes(layout), layout), _psum(
        arrays, manual_axes(layout) - {"pipeline"}, layout
    )


def _require_layers_apart(layout: ModelLayout, params: Params, one: Batch) -> None:
    """Raises ConfigError if the model uses a parameter of its layers elsewhere: the gradient would
    miss that contribution.
    """
    if used := used_outside(layout.bind, params, layout.stacked - layout.buffers, one):
        fix = "make it a parameter of the model itself"
        raise ConfigError(
            f"{type(layout.config).__name__}: prepare, embed or loss uses {used[0]}, a parameter "
            f"of the layers; {fix}"
        )


def differentiated(
    layout: ModelLayout, params: Params, flat: FlatLayout = FlatLayout()
) -> tuple[Params, Params]:
    """The float32 inputs that are differentiated: zeros for stacked parameters (see
    `model.stack.run_segment`), the others themselves.

    Those of segments whose layers gather matrices count as others.
    """
    trained = {
        name: x for name, x in params.items() if name not in layout.buffers | flat.gathered_names
    }
    stacked = {name for name in layout.stacked if not flat.gathered_by(segment_of(name))}
    sinks = {
        name: jnp.zeros(x.shape, jnp.float32) for name, x in trained.items() if name in stacked
    }
    return sinks, {name: x.astype(jnp.float32) for name, x in trained.items() if name not in sinks}


def _reduced_gradients(
    grads: Params,
    specs: dict[str, PartitionSpec],
    layout: ModelLayout,
    flat: FlatLayout,
    before: Any,
    so_far: Params,
) -> tuple[Params, Params]:
    """(the gradients summed once over the manual axes that do not shard them; of flat ones, this
    replica's shard; what is left out).

    before: arrays whose collectives come before those of flat vectors. so_far: what sums in int8
    have left out in earlier steps.
    """
    sharded_over = {
        name: {a for entry in spec for a in axes_of(entry)} for name, spec in specs.items()
    }
    plain = {name: g for name, g in grads.items() if name not in flat.names | flat.leaves.keys()}
    out, left_out, kept = {}, {}, feedback.feedback_of(layout)
    for name, g in plain.items():
        if name in kept:
            out[name], left_out[name] = feedback.summed(layout, name, kept[name], g, so_far[name])
        else:
            out[name] = _summed(name, g, manual_axes(layout) - sharded_over[name], layout)
    dtype = jnp.bfloat16 if layout.shard.rules.reduction == "bfloat16" else jnp.float32
    auto = frozenset(layout.shard.mesh.axis_names) - manual_axes(layout)
    if not flat.vectors:
        return out, left_out
    matrix_specs = {
        name: layout.shard.restrict(where.spec, auto)
        for name, where in layout.shardings("params").items()
        if name in grads
    }
    vector_specs = {v.name: local_spec(layout, v) for v in flat.vectors if not v.gathered_by_layer}
    local = {name: grads[name] if name in flat.names else out[name] for name in matrix_specs}
    of_flat = {
        name: feedback.local_spec(layout, each) for name, each in kept.items() if name in flat.names
    }
    in_specs, out_specs = (matrix_specs, PartitionSpec(), of_flat), (vector_specs, of_flat)
    run = layout.shard.shard_map(partial(flat.reduce_scatter, dtype=dtype), in_specs, out_specs)
    shards, of_vectors = run(local, before, {name: so_far[name] for name in of_flat})
    left_out |= of_vectors
    for vector in flat.vectors:
        axes = manual_axes(layout) - {a for entry in vector.spec for a in axes_of(entry)}
        out[vector.name] = _psum(
            grads[vector.name] if vector.gathered_by_layer else shards[vector.name], axes, layout
        )
    return out, left_out


def _summed(
    name: str, grad: jax.Array, axes: frozenset[str] | set[str], layout: ModelLayout
) -> jax.Array:
    """A gradient summed over manual axes, in the type and in the levels that the rules choose."""
    logical, rules, mesh = layout.axes[name], layout.shard.rules, layout.shard.mesh
    by_node = rules.node_axis in axes and mesh.shape[rules.node_axis] > 1
    if not is_matrix(name, logical) or not (by_node or rules.reduction == "bfloat16"):
        return _psum(grad, axes, layout)
    across = [
        a for a in mesh.axis_names if a in axes and a != rules.node_axis and mesh.shape[a] > 1
    ]
    dtype = jnp.bfloat16 if rules.reduction == "bfloat16" else jnp.float32

    def on_device(g: jax.Array) -> jax.Array:
        g = g.astype(dtype)
        return two_level_sum(g, rules.node_axis, across) if by_node else _psum(g, axes, layout)

    # On local shards, because XLA:CPU aborts at a bf16 all-reduce of an array that it partitions
    # itself.
    spec = layout.shard.spec("params", logical)
    return layout.shard.shard_map(on_device, spec, spec)(grad)


def _cast_to_float32(run: Callable) -> Callable:
    """`run` with gradients cast to float32. A cast inside the region would turn ZeRO-2's
    reduce-scatters into all-reduces.
    """

    def cast(*arguments: Any) -> tuple[tuple[Sums, Sums], Params, Params]:
        sums, grads, left_out = run(*arguments)
        return sums, {name: g.astype(jnp.float32) for name, g in grads.items()}, left_out

    return cast


def _psum(tree: Any, axes: frozenset[str] | set[str], layout: ModelLayout) -> Any:
    over = tuple(
        a for a in layout.shard.mesh.axis_names if a in axes and layout.shard.mesh.shape[a] > 1
    )
    return lax.psum(tree, over) if over else tree


def _specs(layout: ModelLayout, flat: FlatLayout) -> dict[str, PartitionSpec]:
    """Specs of the parameters, with the vectors that layers gather their matrices from in place of
    those.
    """
    where = {
        name: sharding
        for name, sharding in layout.shardings("params").items()
        if name not in flat.gathered_names
    }
    where |= {vector.name: vector.sharding for vector in flat.vectors if vector.gathered_by_layer}
    return {name: layout.shard.restrict(s.spec, manual_axes(layout)) for name, s in where.items()}


def leaf_spec(spec: PartitionSpec, shape: Sequence[int]) -> PartitionSpec:
    """The spec of one leaf of a batch, from the spec of [M, B, S] leaves: that of its dimensions,
    without those of size 1 (broadcast).
    """
    return PartitionSpec(
        *(entry if size > 1 else None for entry, size in zip(spec, shape, strict=False))
    )


def _manual(
    f: Callable,
    layout: ModelLayout,
    table: Table | None,
    batch: Batch,
    specs: tuple[Any, ...],
    out_specs: Any,
    by_hand: frozenset[str],
) -> Any:
    """A function (params, batch, ...) that calls f(table columns, stage numbers, params, batch,
    ...) inside a shard_map over `by_hand`.

    specs: of the parameters, and of the arguments after the batch. Columns and numbers are [1,
    ...], this stage's (`_own`); without a table they are empty.
    """
    shard, columns, numbers = layout.shard, {}, {}
    if table is not None:
        columns = {name: column.T for name, column in table.columns.items()}
        numbers = {"number": np.arange(table.stages, dtype=np.int32)}
        for name, stack in layout.stacks.items():
            first = stack.chunk_first_layers() + layout.config.stack().start(name)
            numbers |= {
                f"{name}/first": first.astype(np.int32),
                f"{name}/start": stack.chunk_start_rows(),
            }
            numbers |= {
                f"{name}/skip": stack.chunk_skipped_rows(),
                f"{name}/count": stack.chunk_layers(),
            }
        for name, transfers in stage_transfers.plan(layout, table).items():
            numbers |= {f"{name}/gathers": transfers.gathers, f"{name}/sums": transfers.sums}
    by_stage, leaf = PartitionSpec("pipeline"), shard.restrict(batch_sharding(layout).spec, by_hand)
    of_params, *others = specs
    in_specs = (
        by_stage,
        by_stage,
        of_params,
        {name: leaf_spec(leaf, x.shape) for name, x in batch.items()},
        *others,
    )
    # inside of islands it is known
    outside = {"mesh": shard.mesh} if not jax.sharding.get_abstract_mesh().manual_axes else {}
    region = jax.shard_map(
        f, in_specs=in_specs, out_specs=out_specs, axis_names=by_hand, check_vma=False, **outside
    )
    return partial(region, columns, numbers)


def _own(by_stage: Columns) -> Columns:
    """This stage's entry of leaves with a leading stage dimension of size 1."""
    return {name: x[0] for name, x in by_stage.items()}
