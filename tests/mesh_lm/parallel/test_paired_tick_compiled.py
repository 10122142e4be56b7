"""Slots side by side, compiled for 16 H100s without devices: what is in one loop, what hides what,
and that nothing is copied."""

import dataclasses
import functools
import math

import pytest

from mesh_lm.config import DataConfig, LaunchConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.engine import training_table
from mesh_lm.parallel.layout import segment_of
from mesh_lm.planning.program import Program, flags_of
from sharding_rules import MeshConfig, preset
from sharding_rules.lab import Report
from sharding_rules.lab.flags import options
from sharding_rules.lab.hlo import Module
from sharding_rules.lab.report import Collective
from sharding_rules.lab.structure import adds_to_gradients, slices_of_layers

COMPILE_BUDGET = 10
pytestmark = pytest.mark.deviceless

STAGES, WIDTH, TENSOR, MICROBATCHES, SEQ, D = 4, 2, 2, 16, 1024, 4096
MODEL = DecoderConfig(
    n_layers=STAGES * WIDTH,
    d_model=D,
    n_heads=32,
    seq_len=SEQ,
    vocab_size=3072,
    attention="xla",
    remat="save_names",
    loss_chunk=768,
)
SENT = SEQ // TENSOR * D * 2
"""Bytes that a stage sends to the next: a sequence sharded over tensor, in bf16."""


def program(reports: str, pair_layers: bool = True, **model: object) -> Program:
    config = TrainConfig(
        model=dataclasses.replace(MODEL, **model),
        output="runs/pipeline",
        mesh=MeshConfig(pipeline=STAGES, data=2, tensor=TENSOR),
        rules=preset("distributed+megatron_sp"),
        train=TrainLoop(global_batch=2 * MICROBATCHES, microbatches=MICROBATCHES, steps=200),
        pipeline=PipelineConfig(stash="residuals", pair_layers=pair_layers),
        data=DataConfig(tokenizer_vocab=2048),
        launch=LaunchConfig(compile_cache=reports),
    )
    return Program.of(config, "h100", STAGES * 2 * TENSOR)


@functools.cache
def report_of(reports: str, pair_layers: bool = True, **model: object) -> Report:
    made = program(reports, pair_layers, **model)
    return made.compile(options(flags_of(made.config, "h100")))


@functools.cache
def module_of(reports: str) -> Module:
    return program(reports).module(options("pipeline_pairs"))


def in_layers(report: Report, slots: str, pair_layers: bool = True) -> list[Collective]:
    """The collectives over tensor in the loop over layers of ticks with these slots."""
    made = training_table(program("", pair_layers).layout, MICROBATCHES)
    trips = {name: ticks.stop - ticks.start for name, ticks in made.loops()}
    found = [
        one
        for one in report.collectives
        if one.axes == ("tensor",) and one.loops == (trips[slots], WIDTH)
    ]
    return [one for one in found if one.where.part.startswith("layers")]


def test_a_layer_of_one_pass_hides_the_collectives_of_the_other(reports: str) -> None:
    paired, before = report_of(reports), report_of(reports, pair_layers=False)
    found = in_layers(paired, "FB")
    assert {one.where.phase for one in found} >= {"forward", "backward"}
    assert sum(one.kind == "reduce-scatter" for one in found) == 4, (
        "two of each layer, none of them combined with that of the other pass"
    )
    assert all(one.asynchronous for one in found)
    assert paired.timeline and before.timeline
    assert paired.timeline.step < before.timeline.step
    assert (
        sum(one.exposed for one in found)
        <= 0.001 * paired.timeline.step
        < sum(one.exposed for one in in_layers(before, "FB", False))
    )


def test_layers_of_both_passes_are_in_one_loop(reports: str) -> None:
    module = module_of(reports)
    bodies: dict[str, set[str]] = {}
    for one in module.by_name.values():
        if one.opcode.startswith(("all-gather", "reduce-scatter")) and "layers" in one.op_name:
            bodies.setdefault(module.home[one.name], set()).update(
                s for s in ("forward_slot", "backward_slot") if s in one.op_name
            )
    assert sum(slots == {"forward_slot", "backward_slot"} for slots in bodies.values()) == 1, bodies


def test_gradients_are_added_in_place_once_for_each_weight_and_layer(reports: str) -> None:
    made = program(reports)
    whole = {
        name: made.layout.shardings("params")[name].shard_shape(s.shape)[1:]
        for name, s in made.layout.memory_shapes.items()
    }
    matrices = {
        name: dims
        for name, dims in whole.items()
        if segment_of(name) == "blocks" and math.prod(dims) > 4 * D
    }
    assert len(matrices) == 4
    assert adds_to_gradients(module_of(reports), matrices) == []
    assert slices_of_layers(module_of(reports), matrices) == []


@pytest.mark.parametrize(
    "remat",
    [
        "save_names",
        *(pytest.param(other, marks=pytest.mark.exhaustive) for other in ("full", "none")),
    ],
)
def test_no_stash_is_copied(reports: str, remat: str) -> None:
    report = report_of(reports, remat=remat)
    assert not [one for one in report.copies if one.bytes > SENT and one.times > 1]
    assert not report.warnings


def test_the_two_sends_of_a_tick_leave_together(reports: str) -> None:
    """At its end, in opposite directions, so that a tick waits for one of them, and with jax 0.12 a
    little for the other."""
    report, table = report_of(reports), training_table(program(reports).layout, MICROBATCHES)
    trips = {slots: ticks.stop - ticks.start for slots, ticks in table.loops()}
    hops = [
        one
        for one in report.collectives
        if one.kind == "collective-permute" and one.axes == ("pipeline",)
    ]
    assert [hop.loops for hop in hops] == [(trips[slots],) for slots in ("F", "FB", "FB", "B")]
    assert all(hop.payload == SENT and hop.asynchronous for hop in hops)
    both = [hop for hop in hops if hop.loops == (trips["FB"],)]
    assert sum(hop.exposed for hop in both) <= 1.4 * max(hop.duration * hop.times for hop in both)
