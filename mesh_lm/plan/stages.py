"""What a plan must know of a pipeline: when its slots run, and what its schedule and its division of the layers cost."""

from __future__ import annotations

import math

import numpy as np

from mesh_lm.blueprint import Blueprint
from mesh_lm.config import TrainConfig
from mesh_lm.pipeline import custom
from mesh_lm.pipeline.cost import Durations, in_flight, timeline
from mesh_lm.pipeline.engine import training_table
from sharding_rules.lab.report import Slot


def slots(blueprint: Blueprint, microbatches: int) -> tuple[Slot, ...]:
    """Of the conditionals in the engine's tick, by its named scopes (`mesh_lm.pipeline.ring`); none without a pipeline."""
    if blueprint.stages.stages == 1:
        return ()
    table = training_table(blueprint, microbatches)
    stage, forward, backward = np.arange(table.stages), table.columns["forward_chunk"], table.columns["backward_chunk"]
    active = {
        "forward_slot": forward >= 0,
        "forward_slot/embed": (stage == 0) & (forward == 0),
        "backward_slot": backward >= 0,
        "backward_slot/embed": (stage == 0) & (backward == 0),
        "backward_slot/loss": (stage == table.stages - 1) & (backward == table.chunks - 1),
    }
    return tuple(Slot.of(scope, runs) for scope, runs in active.items())


def facts(config: TrainConfig, blueprint: Blueprint) -> tuple[tuple[str, str], ...]:
    """Lines for the report: the schedule's bubble and what is in flight, the FLOPs of each stage, the bytes of padding."""
    pipeline, stages, stack = config.pipeline, blueprint.stages, config.model.stack()
    if stages.stages == 1 or stack is None:
        return ()
    microbatches = config.train.microbatches
    schedule = custom.find(pipeline.schedule, stages.stages, microbatches, stages.chunks)
    again = pipeline.stash == "input"
    durations = Durations(forward=1.0, backward=2.0 + again)
    bubble = timeline(schedule, durations, drop_last_forward=again).bubble
    flops = stages.flops(stack.costs)
    what = f"{pipeline.schedule}, {stages.stages} stages" + (f" x {stages.chunks} chunks" if stages.chunks > 1 else "")
    lines = [
        ("pipeline", f"{what}, {microbatches} microbatches: bubble {bubble:.1%}; in flight at most {max(in_flight(schedule))} a stage"),
        ("stages", f"the busiest does {flops.max() / flops.mean():.3f} x the mean of the model's FLOPs ({_counts(blueprint)} layers)"),
    ]
    if stages.rows != stages.n_layers:
        each = sum(math.prod(s.shape[1:]) * s.dtype.itemsize for n, s in blueprint.shapes.items() if n in blueprint.stacked)
        wasted = stages.wasted_bytes(each) / 2**30
        lines.append(
            ("padding", f"{stages.rows - stages.n_layers} of {stages.rows} rows of the stacked weights: {wasted:.2f} GiB over all stages")
        )
    return tuple(lines)


def _counts(blueprint: Blueprint) -> str:
    each = blueprint.stages.count().sum(1)
    return str(each[0]) if (each == each[0]).all() else ", ".join(map(str, each))
