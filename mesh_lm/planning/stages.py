"""The pipeline of a plan: when its slots run, and what its schedule and its division of the layers
cost.
"""

from __future__ import annotations

import math

import numpy as np

from mesh_lm.config import TrainConfig
from mesh_lm.parallel.engine import training_schedule, training_table
from mesh_lm.parallel.layout import ModelLayout, segment_of
from mesh_lm.schedules.cost import Durations, in_flight, timeline
from sharding_rules.lab import Report
from sharding_rules.lab.report import Slot


def pipeline_slots(layout: ModelLayout, microbatches: int) -> tuple[Slot, ...]:
    """Returns when the conditionals in the engine's tick run, by named scope
    (`mesh_lm.parallel.tick`); empty without a pipeline.
    """
    if layout.n_stages == 1:
        return ()
    table = training_table(layout, microbatches)
    stage, forward, backward = (
        np.arange(table.stages),
        table.columns["forward_chunk"],
        table.columns["backward_chunk"],
    )
    active = {
        "forward_slot/embed": (stage == 0) & (forward == 0),
        "backward_slot/embed": (stage == 0) & (backward == 0),
        "backward_slot/loss": (stage == table.stages - 1) & (backward == table.chunks - 1),
    }
    return tuple(Slot.of(scope, runs) for scope, runs in active.items())


def report_facts(
    config: TrainConfig, layout: ModelLayout, report: Report
) -> tuple[tuple[str, str], ...]:
    """Returns lines for the report: the schedule's bubble and passes in flight, FLOPs by stage,
    bytes of padding and of FSDP's gathers.
    """
    pipeline, stages, stack = config.pipeline, layout.n_stages, config.model.stack()
    if stages == 1:
        return ()
    schedule = training_schedule(pipeline, stages, config.train.microbatches)
    again = pipeline.stash == "input"
    # In units of a stage's forward pass. The head's duration follows from its share of the model's
    # FLOPs (forward and backward).
    in_layers = sum(segment.n_layers * segment.cost for segment in stack.segments)
    head = stages * stack.head / in_layers
    repeated = (
        sum(
            segment.n_layers * segment.cost for segment in stack.segments if segment.remat == "full"
        )
        / in_layers
    )
    durations = Durations(forward=1.0, backward=2.0 + again + repeated, head=head)
    times = timeline(schedule, durations, drop_last_forward=again)
    idle = 1 - sum(times.busy) / (times.span * stages)
    what = f"{pipeline.schedule}, {stages} stages" + f" x {pipeline.chunks} chunks" * (
        pipeline.chunks > 1
    )
    flops = np.array(report.stage_flops, np.float64)
    lines = [
        (
            "pipeline",
            (
                f"{what}, {config.train.microbatches} microbatches: bubble {times.bubble:.1%}, "
                f"stages idle {idle:.1%} of the time"
            ),
        ),
        ("in flight", f"at most {max(in_flight(schedule))} passes on a stage, by the schedule"),
        (
            "by stage",
            f"matmuls {_numbers(flops / flops.mean(), '.3f')} x the mean; {_layers(layout)} layers",
        ),
    ]
    rows, layers, wasted = 0, 0, 0.0
    for name, stack in layout.stacks.items():
        shapes = [
            s for n, s in layout.shapes.items() if n in layout.stacked and segment_of(n) == name
        ]
        wasted += stack.wasted_bytes(sum(math.prod(s.shape[1:]) * s.dtype.itemsize for s in shapes))
        rows, layers = rows + stack.padded_rows, layers + stack.n_layers
    if rows != layers:
        lines.append(
            (
                "padding",
                (
                    f"{rows - layers} of {rows} rows of the stacked weights: {wasted / 2**30:.2f} "
                    "GiB in all"
                ),
            )
        )
    if gathered := sum(
        one.times * one.wire
        for one in report.collectives
        if "fsdp" in one.axes and one.times >= config.train.microbatches
    ):
        fix = "zero1 or zero2 would send none of it, where the replicas divide a dimension"
        lines.append(
            (
                "FSDP in stages",
                (
                    f"gathers and scatters weights in every slot: {gathered / 2**30:.1f} GiB sent "
                    f"a step; {fix}"
                ),
            )
        )
    return tuple(lines)


def _layers(layout: ModelLayout) -> str:
    """The number of layers on each stage, by segment if there are several."""
    by_segment = {
        name: _numbers(stack.chunk_layers().sum(1), "d") for name, stack in layout.stacks.items()
    }
    return (
        "; ".join(f"{name} {layers}" for name, layers in by_segment.items())
        if len(by_segment) > 1
        else next(iter(by_segment.values()))
    )


def _numbers(values: np.ndarray, form: str) -> str:
    """Formats values: one if all are equal, all if they are few, else the smallest and the
    largest.
    """
    texts = [format(value, form) for value in values]
    if len(set(texts)) == 1:
        return texts[0]
    return (
        ", ".join(texts)
        if len(texts) <= 8
        else f"{format(values.min(), form)} to {format(values.max(), form)}"
    )
