"""The engine compiled for 16 H100s without devices: memory by schedule, the loop over ticks, and
the collectives."""

import dataclasses
import functools
import math

import pytest

from mesh_lm.config import DataConfig, LaunchConfig, PipelineConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.engine import training_table
from mesh_lm.planning.program import Program
from sharding_rules import MeshConfig, preset
from sharding_rules.lab import Report, lint
from sharding_rules.lab.flags import options
from sharding_rules.lab.report import Collective

COMPILE_BUDGET = 10
pytestmark = pytest.mark.deviceless

STAGES, DATA = 4, 2
MODEL = DecoderConfig(
    n_layers=8,
    d_model=512,
    n_heads=4,
    seq_len=768,
    vocab_size=3072,
    positions="rotary",
    attention="xla",
    loss_chunk=768,
)
WIDE = dataclasses.replace(MODEL, d_model=2048, remat="save_names")
"""A model whose gradients take so long to accumulate that XLA would overlap a hop with that
only."""
INPUT = MODEL.seq_len // 2 * MODEL.d_model * 2
"""Bytes of one stage input on one device: a sequence sharded over tensor, in bf16."""
FEW, MANY = 16, 64


@functools.cache
def compiled(
    reports: str,
    schedule: str,
    chunks: int,
    microbatches: int,
    rules: str = "zero1+megatron_sp",
    fsdp: int = 1,
    residuals: bool = False,
) -> Program:
    config = TrainConfig(
        model=WIDE if residuals else MODEL,
        output="runs/pipeline",
        mesh=MeshConfig(pipeline=STAGES, data=DATA // fsdp, fsdp=fsdp, tensor=2),
        rules=preset(rules),
        train=TrainLoop(global_batch=microbatches * DATA, microbatches=microbatches, steps=200),
        pipeline=PipelineConfig(schedule, chunks, stash="residuals" if residuals else "input"),
        data=DataConfig(tokenizer_vocab=2048),
        launch=LaunchConfig(compile_cache=reports),
    )
    return Program.of(config, "h100", STAGES * DATA * 2)


def report_of(reports: str, *args, **kwargs) -> Report:
    return compiled(reports, *args, **kwargs).compile(options("pipeline"))


def travels(report: Report, kind: str, axis: str) -> list[Collective]:
    return [
        one
        for one in report.collectives
        if one.kind == kind and axis in one.axes and one.payload > 1024
    ]


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_memory_of_1f1b_does_not_grow_with_microbatches(reports: str, chunks: int) -> None:
    few, many = (report_of(reports, "1f1b", chunks, M).memory.temporaries for M in (FEW, MANY))
    assert many == pytest.approx(few, rel=0.01)


@pytest.mark.exhaustive
def test_gpipe_keeps_one_input_of_each_microbatch(reports: str) -> None:
    few, many = (report_of(reports, "gpipe", 1, M).memory.temporaries for M in (FEW, MANY))
    assert many - few == pytest.approx((MANY - FEW) * INPUT, rel=0.01)


@pytest.mark.parametrize(
    ("chunks", "rules", "fsdp", "residuals"),
    [
        pytest.param(1, "zero1+megatron_sp", 1, False, marks=pytest.mark.exhaustive),
        (2, "zero1+megatron_sp", 1, False),
        pytest.param(1, "fsdp+megatron_sp", 2, False, marks=pytest.mark.exhaustive),
        (1, "zero2+megatron_sp", 1, True),
    ],
)
def test_the_loop_over_ticks(
    reports: str, chunks: int, rules: str, fsdp: int, residuals: bool
) -> None:
    report = report_of(reports, "1f1b", chunks, FEW, rules, fsdp, residuals)
    program = compiled(reports, "1f1b", chunks, FEW, rules, fsdp, residuals)
    moved = INPUT * WIDE.d_model // MODEL.d_model if residuals else INPUT
    table = training_table(program.layout, FEW)
    assert table.ticks <= FEW * chunks + 2 * (STAGES - 1) + (chunks - 1) * STAGES
    trips = {slots: ticks.stop - ticks.start for slots, ticks in table.loops()}
    hops = travels(report, "collective-permute", "pipeline")
    assert [hop.loops for hop in hops] == [(trips[slots],) for slots in ("F", "FB", "FB", "B")]
    assert all(
        hop.payload == moved and hop.axes == ("pipeline",) and not hop.conditional for hop in hops
    )
    assert all(hop.asynchronous and hop.flops_hidden_behind > 0 for hop in hops[1:3]), (
        "a hop that spans no slot"
    )
    whole = [one for one in report.copies if one.bytes > moved and one.times >= min(trips.values())]
    assert not whole, f"stash or gradients are copied in each tick: {whole}"
    in_branches = [one for one in report.collectives if one.conditional]
    assert in_branches, "the embedding and the loss"
    for one in in_branches:
        assert not {"pipeline", "data"} & {*one.axes} and one.kind != "collective-permute", (
            f"{one.kind} over {one.axes} in a branch"
        )
    assert not [
        finding
        for finding in lint(report, preset(rules), program.layout.axes)
        if finding.severity == "error"
    ]


@pytest.mark.slow
def test_padded_layers_keep_no_second_copy_of_the_weights(reports: str) -> None:
    """Stages of 3, 4, 4 and 5 layers need a row of gradients more, and what leaves the conditional
    around a layer: all its gradients.

    A conditional outside of remat would save the weights; a Ref that passes through it would be
    copied.
    """

    def temporaries(layers: tuple[int, ...]) -> int:
        config = TrainConfig(
            model=dataclasses.replace(MODEL, n_layers=16, d_model=2048, seq_len=2048, remat="full"),
            output="runs/pipeline",
            mesh=MeshConfig(pipeline=STAGES, data=DATA, tensor=2),
            rules=preset("megatron_sp"),
            train=TrainLoop(global_batch=FEW * DATA, microbatches=FEW),
            pipeline=PipelineConfig(layers=layers),
            data=DataConfig(tokenizer_vocab=2048),
            launch=LaunchConfig(compile_cache=reports),
        )
        return (
            Program.of(config, "h100", STAGES * DATA * 2)
            .compile(options("pipeline"))
            .memory.temporaries
        )

    of_layer = 12 * WIDE.d_model**2 * 4 // 2
    assert temporaries((3, 4, 4, 5)) <= 1.1 * (temporaries((4, 4, 4, 4)) + 2 * of_layer)


def test_the_data_reduction_happens_once(reports: str) -> None:
    report = report_of(reports, "1f1b", 2, FEW)
    reduced = [
        one
        for one in report.collectives
        if one.kind in ("all-reduce", "reduce-scatter") and "data" in one.axes
    ]
    assert reduced and all(one.times == 1 for one in reduced)
    program = compiled(reports, "1f1b", 2, FEW)
    each = {
        name: math.prod(s.shape)
        * 4
        / (2 if any(a in ("heads", "mlp", "vocab") for a in program.layout.axes[name]) else 1)
        for name, s in program.layout.shapes.items()
    }
    wanted = sum(
        size / STAGES if name in program.layout.stacked else size for name, size in each.items()
    )
    assert sum(one.payload for one in reduced if one.payload > 1024) == pytest.approx(
        wanted, rel=0.01
    )
