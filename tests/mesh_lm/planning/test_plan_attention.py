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
    n_layers=4,
    d_model=512,
    n_heads=8,
    n_kv_heads=4,
    seq_len=1024,
    vocab_size=4096,
    positions="rotary",
    biases=False,
    loss_chunk=1024,
    remat="full",
)


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
    q = "bf16[1,2048,12,128]"
    k = "bf16[1,2048,4,128]"
    forward = Location("layers/attention", "forward")
    recompute = dataclasses.replace(forward, phase="recompute")
    backward = dataclasses.replace(forward, phase="backward")
    kernels = (
        ("mosaic_gpu_v2: attention forward", (q, k, k, "s32[1]"), forward),
        ("mosaic_gpu_v2: attention forward", (q, k, k, "s32[1]"), recompute),
        ("mosaic_gpu_v2: attention backward", (k, q, q, q), backward),
        ("mosaic_gpu_v2: norm", ("bf16[8,8]",), forward),
    )
    config = with_model(attention="mosaic")
    facts = report_facts(config, lab_report.report(kernels=kernels), "h100")
    shapes = "mosaic kernel, q [1, 2048, 12, 128] k [1, 2048, 4, 128] on each device"
    assert facts == (("attention", f"{shapes}; own kernel, self-tested at first use"),)


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
    flags = options("pipeline") if pipeline else None
    return Program.of(config, "h100", 8).compile(flags), config


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
    batch_shards = mesh["data"] * mesh.get("fsdp", 1)
    n_sequences = config.train.global_batch // config.train.microbatches // batch_shards
    # Sequences are folded into heads, of which tensor=2 has half on each device.
    q_heads = n_sequences * 8 // 2
    k_heads = n_sequences * 4 // 2
    phases = set()
    for name, shapes, location in report.kernels:
        if not name.startswith("mosaic"):
            continue
        phases.add(location.phase)
        assert location.part.endswith("attention"), (name, location)
        assert f"bf16[1,1024,{q_heads},64]" in shapes, (name, shapes)
        assert f"bf16[1,1024,{k_heads},64]" in shapes, (name, shapes)
    assert {"forward", "recompute", "backward"} <= phases
    for collective in report.select("all-gather"):
        for shape in collective.shapes:
            assert not (shape.endswith(",64]") and "1024," in shape), shape
    assert not [finding for finding in lint(report, config.rules) if finding.severity == "error"]
    ((_, text),) = report_facts(config, report, "h100")
    assert text == (
        f"mosaic kernel, q [1, 1024, {q_heads}, 64] k [1, 1024, {k_heads}, 64] on each device; own "
        "kernel, self-tested at first use"
    )


@pytest.mark.slow
@pytest.mark.deviceless
def test_the_kernel_is_counted(reports: str) -> None:
    """FLOPs by hand: 2 matmuls forward, 5 in the backward."""
    report, config = compiled(reports, **MESHES[0])
    model = config.model
    assert isinstance(model, DecoderConfig)
    # FLOPs of one matmul for a pair of a query and a key, on one device.
    pair_flops = (
        2 * model.d_head * (model.n_heads // 2) * (config.train.global_batch // 4) * model.n_layers
    )
    kernel_flops = pair_flops * model.seq_len * (model.seq_len + 1) // 2
    # With blocks of 512, XLA computes 3 of the 4 quarters of the square, and the diagonal's
    # quarters completely.
    xla_flops = pair_flops * model.seq_len**2 * 3 // 4
    xla = compiled(reports, **MESHES[0], attention="xla")[0].flops
    for phase, n_matmuls in (("forward", 2), ("recompute", 2), ("backward", 5)):
        others = report.flops[phase] - n_matmuls * kernel_flops
        assert others == xla[phase] - n_matmuls * xla_flops, phase
    assert report.timeline is not None
    kinds = {(span.kind, span.where.phase) for span in report.timeline.spans}
    for phase in ("forward", "recompute", "backward"):
        assert ("attention", phase) in kinds
