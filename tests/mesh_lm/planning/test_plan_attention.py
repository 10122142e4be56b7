"""The attention of a plan: its implementation by target, and the Hopper kernel in full training
steps, compiled without a GPU."""

import dataclasses
import functools
from typing import Literal

import lab_report
import pytest

from mesh_lm.config import DataConfig, LaunchConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from mesh_lm.planning.attention import (
    attention_implementations,
    report_facts,
    with_compilable_attention,
)
from mesh_lm.planning.program import Program
from sharding_rules import MeshConfig, preset
from sharding_rules.lab import Report
from sharding_rules.lab.flags import options
from sharding_rules.lab.lint import lint
from sharding_rules.lab.report import Location

COMPILE_BUDGET = 4

MODEL = DecoderConfig(
    n_layers=4, d_model=512, n_heads=8, n_kv_heads=4, seq_len=1024, vocab_size=4096,
    positions="rotary", biases=False, loss_chunk=1024,
    remat="full",
)  # fmt: skip


def with_model(documents: str = "joined", **changes) -> TrainConfig:
    return TrainConfig(
        model=dataclasses.replace(MODEL, **changes),
        output="runs/attention",
        data=DataConfig(documents=documents),
    )


@pytest.mark.parametrize(
    ("target", "fields", "names"),
    [
        ("h100", {}, {"mosaic"}),
        ("h200", {"window": (128, 0), "softcap": 30.0, "sinks": True}, {"mosaic"}),
        ("h100", {"documents": "packed"}, {"mosaic"}),
        ("h100", {"dtype": "float32"}, {"xla"}),
        ("h100", {"head_dim": 80}, {"cudnn"}),
        *[
            ("h100", {"head_dim": width, "documents": "packed"}, {"mosaic"})
            for width in (80, 160, 192)
        ],
        ("a100", {}, {"cudnn"}),
        ("a100", {"documents": "packed"}, {"xla"}),
        ("b200", {"softcap": 30.0}, {"xla"}),
        ("b200", {"attention": "mosaic"}, {"mosaic"}),
    ],
)
def test_what_serves_it_on_the_target(target: str, fields: dict, names: set[str]) -> None:
    assert attention_implementations(with_model(**fields), target) == names


def test_what_cannot_be_compiled_here_is_compiled_as_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_lm.planning.attention._installed", lambda *_: False)
    config = with_model()
    assert with_compilable_attention(config, "h100") is config
    assert with_compilable_attention(config, "a100").model.attention == "xla"
    report = lab_report.report()
    assert report_facts(config, report, "a100") == (
        ("attention", "xla, no kernel: cuDNN is not installed here; the run will use cudnn"),
    )
    assert report_facts(config, report, "h100") == (
        ("attention", "xla, no kernel; own kernel, self-tested at first use"),
    )
    monkeypatch.setattr("mesh_lm.planning.attention._installed", lambda *_: True)
    assert with_compilable_attention(config, "a100") is config


def test_a_line_says_the_kernel_and_what_it_sees() -> None:
    q, k = "bf16[1,2048,12,128]", "bf16[1,2048,4,128]"
    where = Location("layers/attention", "forward")
    kernels = (
        ("mosaic_gpu_v2: attention forward", (q, k, k, "s32[1]"), where),
        (
            "mosaic_gpu_v2: attention forward",
            (q, k, k, "s32[1]"),
            dataclasses.replace(where, phase="recompute"),
        ),
        (
            "mosaic_gpu_v2: attention backward",
            (k, q, q, q),
            dataclasses.replace(where, phase="backward"),
        ),
        ("mosaic_gpu_v2: norm", ("bf16[8,8]",), where),
    )
    said = report_facts(with_model(attention="mosaic"), lab_report.report(kernels=kernels), "h100")
    shapes = "mosaic kernel, q [1, 2048, 12, 128] k [1, 2048, 4, 128] on each device"
    assert said == (("attention", f"{shapes}; own kernel, self-tested at first use"),)


@functools.cache
def compiled(
    reports: str, attention: Literal["mosaic", "xla"] = "mosaic", **mesh: int
) -> tuple[Report, TrainConfig]:
    pipeline = mesh.get("pipeline", 1) > 1
    config = TrainConfig(
        model=dataclasses.replace(MODEL, attention=attention),
        output="runs/attention",
        mesh=MeshConfig(**mesh),
        rules=preset("zero1+megatron_sp" if pipeline else "hsdp+megatron_sp"),
        train=TrainLoop(global_batch=16, microbatches=4 if pipeline else 2),
        data=DataConfig(tokenizer_vocab=4096),
        launch=LaunchConfig(compile_cache=reports),
    )
    return Program.of(config, "h100", 8).compile(options("pipeline") if pipeline else None), config


MESHES = ({"data": 2, "fsdp": 2, "tensor": 2}, {"pipeline": 2, "data": 2, "tensor": 2})


@pytest.mark.deviceless
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(MESHES[0], id="hsdp"),
        pytest.param(MESHES[1], marks=pytest.mark.slow, id="pipeline"),
    ],
)
def test_the_kernel_sees_local_shards_forward_and_backward(reports: str, mesh: dict) -> None:
    """The partitioner silently replicates a kernel that it sees: it adds all-gathers, and every
    device does all the work."""
    report, config = compiled(reports, **mesh)
    local = (
        config.train.global_batch
        // config.train.microbatches
        // (mesh["data"] * mesh.get("fsdp", 1))
    )
    ours = [
        (name, shapes, where) for name, shapes, where in report.kernels if name.startswith("mosaic")
    ]
    # sequences are folded into heads
    q, k = (f"bf16[1,1024,{local * heads // 2},64]" for heads in (8, 4))
    assert {"forward", "recompute", "backward"} <= {where.phase for *_, where in ours}
    assert all(where.part.endswith("attention") for *_, where in ours), ours
    assert all(q in shapes and k in shapes for _, shapes, _ in ours), ours
    gathered = [
        shape
        for one in report.select("all-gather")
        for shape in one.shapes
        if shape.endswith(",64]") and "1024," in shape
    ]
    assert not gathered
    assert not [finding for finding in lint(report, config.rules) if finding.severity == "error"]
    seen = (
        f"mosaic kernel, q [1, 1024, {4 * local}, 64] k [1, 1024, {2 * local}, 64] on each device"
    )
    assert (
        report_facts(config, report, "h100")[0][1]
        == f"{seen}; own kernel, self-tested at first use"
    )


@pytest.mark.slow
@pytest.mark.deviceless
def test_the_kernel_is_counted(reports: str) -> None:
    """FLOPs by hand: 2 matmuls forward, 5 in the backward."""
    report, config = compiled(reports, **MESHES[0])
    model, train = config.model, config.train
    assert isinstance(model, DecoderConfig)
    pairs = model.seq_len * (model.seq_len + 1) // 2
    one = (
        2 * model.d_head * pairs * (model.n_heads // 2) * (train.global_batch // 4) * model.n_layers
    )
    matmuls = compiled(reports, **MESHES[0], attention="xla")[0].flops
    # With blocks of 512, XLA computes 3 of the 4 quarters of the square, and the diagonal's
    # quarters completely.
    square = (
        2
        * model.d_head
        * model.seq_len**2
        * 3
        // 4
        * (model.n_heads // 2)
        * (train.global_batch // 4)
        * model.n_layers
    )
    for phase, ours, theirs in (("forward", 2, 2), ("recompute", 2, 2), ("backward", 5, 5)):
        assert report.flops[phase] - ours * one == matmuls[phase] - theirs * square, phase
    assert report.timeline is not None
    kinds = {(span.kind, span.where.phase) for span in report.timeline.spans}
    assert {
        ("attention", "forward"),
        ("attention", "recompute"),
        ("attention", "backward"),
    } <= kinds
