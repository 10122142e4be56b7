"""The pipeline of a plan: the ticks of its slots, and the cost of its schedule and stages."""

from __future__ import annotations

import math

import numpy as np

from mesh_lm.config import TrainConfig
from mesh_lm.parallel.engine import training_schedule, training_table
from mesh_lm.parallel.layout import ModelLayout, segment_of
from mesh_lm.schedules.cost import Durations, in_flight, timeline
from sharding_rules.lab import Report
from sharding_rules.lab.report import Slot

GIB = 2**30
Fact = tuple[str, str]
"""A line of the report: its label and its text."""
_LISTED_VALUES = 8
"""The most values that are listed; of more, the smallest and the largest."""


def pipeline_slots(layout: ModelLayout, microbatches: int) -> tuple[Slot, ...]:
    """Returns the ticks in which the conditionals of the engine's tick run, by named scope.

    The scopes are those of `mesh_lm.parallel.tick`. Empty without a pipeline.
    """
    if layout.n_stages == 1:
        return ()
    table = training_table(layout, microbatches)
    stage = np.arange(table.stages)
    forward_chunk = table.columns["forward_chunk"]
    backward_chunk = table.columns["backward_chunk"]
    is_first = stage == 0
    is_last = stage == table.stages - 1
    active = {
        "forward_slot/embed": is_first & (forward_chunk == 0),
        "backward_slot/embed": is_first & (backward_chunk == 0),
        "backward_slot/loss": is_last & (backward_chunk == table.chunks - 1),
    }
    return tuple(Slot.of(scope, ticks) for scope, ticks in active.items())


def report_facts(config: TrainConfig, layout: ModelLayout, report: Report) -> tuple[Fact, ...]:
    """Returns lines for the report: the schedule's bubble and passes in flight, FLOPs by stage,
    bytes of padding and of FSDP's gathers.
    """
    if layout.n_stages == 1:
        return ()
    flops = np.array(report.stage_flops, np.float64)
    shares = _format_values(flops / flops.mean(), ".3f")
    stage_text = f"matmuls {shares} x the mean; {_layers(layout)} layers"
    return (
        *_schedule_facts(config, layout.n_stages),
        ("by stage", stage_text),
        *_padding_facts(layout),
        *_fsdp_facts(config, report),
    )


def _schedule_facts(config: TrainConfig, stages: int) -> list[Fact]:
    pipeline = config.pipeline
    microbatches = config.train.microbatches
    schedule = training_schedule(pipeline, stages, microbatches)

    # In units of a stage's forward pass. The head's duration follows from its share of the model's
    # FLOPs (forward and backward).
    stack = config.model.stack()
    layers_cost = sum(segment.n_layers * segment.cost for segment in stack.segments)
    repeated_cost = sum(
        segment.n_layers * segment.cost for segment in stack.segments if segment.remat == "full"
    )
    recomputes = pipeline.stash == "input"
    durations = Durations(
        forward=1.0,
        backward=2.0 + recomputes + repeated_cost / layers_cost,
        head=stages * stack.head / layers_cost,
    )
    times = timeline(schedule, durations, drop_last_forward=recomputes)
    idle = 1 - sum(times.busy) / (times.span * stages)
    chunks = f" x {pipeline.chunks} chunks" if pipeline.chunks > 1 else ""
    return [
        (
            "pipeline",
            f"{pipeline.schedule}, {stages} stages{chunks}, {microbatches} microbatches: bubble "
            f"{times.bubble:.1%}, stages idle {idle:.1%} of the time",
        ),
        ("in flight", f"at most {max(in_flight(schedule))} passes on a stage, by the schedule"),
    ]


def _padding_facts(layout: ModelLayout) -> list[Fact]:
    n_rows = 0
    n_layers = 0
    wasted_bytes = 0.0
    for segment, stack in layout.stacks.items():
        layer_bytes = 0
        for name, array in layout.shapes.items():
            if name in layout.stacked and segment_of(name) == segment:
                layer_bytes += math.prod(array.shape[1:]) * array.dtype.itemsize
        wasted_bytes += stack.wasted_bytes(layer_bytes)
        n_rows += stack.padded_rows
        n_layers += stack.n_layers
    if n_rows == n_layers:
        return []
    gib = wasted_bytes / GIB
    text = f"{n_rows - n_layers} of {n_rows} rows of the stacked weights: {gib:.2f} GiB in all"
    return [("padding", text)]


def _fsdp_facts(config: TrainConfig, report: Report) -> list[Fact]:
    sent_bytes = 0.0
    for collective in report.collectives:
        if "fsdp" in collective.axes and collective.times >= config.train.microbatches:
            sent_bytes += collective.times * collective.wire
    if not sent_bytes:
        return []
    text = (
        f"gathers and scatters weights in every slot: {sent_bytes / GIB:.1f} GiB sent a step; "
        "zero1 or zero2 would send none of it, where the replicas divide a dimension"
    )
    return [("FSDP in stages", text)]


def _layers(layout: ModelLayout) -> str:
    """Returns the number of layers on each stage, by segment if there are several."""
    texts = {
        segment: _format_values(stack.chunk_layers().sum(1), "d")
        for segment, stack in layout.stacks.items()
    }
    if len(texts) == 1:
        return next(iter(texts.values()))
    return "; ".join(f"{segment} {text}" for segment, text in texts.items())


def _format_values(values: np.ndarray, form: str) -> str:
    """Returns one value if all are equal, all if they are few, else the smallest and largest."""
    texts = [format(value, form) for value in values]
    if len(set(texts)) == 1:
        return texts[0]
    if len(texts) <= _LISTED_VALUES:
        return ", ".join(texts)
    return f"{format(values.min(), form)} to {format(values.max(), form)}"
