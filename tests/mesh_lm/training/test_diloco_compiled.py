"""Islands compiled for H100s: a step sends nothing over `island`, and the outer step the weights,
once."""

from __future__ import annotations

import dataclasses
import math

import pytest

from mesh_lm.config import DilocoConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from mesh_lm.planning.diloco import report_facts, wire_bytes
from mesh_lm.planning.program import Program
from sharding_rules import MeshConfig, preset

COMPILE_BUDGET = 12
pytestmark = [pytest.mark.deviceless, pytest.mark.slow]
GPT = DecoderConfig(
    vocab_size=4096,
    seq_len=256,
    n_layers=2,
    d_model=256,
    n_heads=4,
    vocab_multiple=128,
    attention="xla",
)


def config(rules: str, **mesh: int) -> TrainConfig:
    batch = 2 * 2 * math.prod(size for axis, size in mesh.items() if axis != "tensor")
    return TrainConfig(
        model=GPT, output="islands", mesh=dataclasses.replace(MeshConfig(), **mesh),
        rules=preset(rules),
        train=TrainLoop(global_batch=batch, microbatches=2),
        diloco=DilocoConfig(outer_steps=100),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        pytest.param("diloco", {"island": 2, "data": 4}, marks=pytest.mark.exhaustive),
        ("diloco+hsdp+megatron_sp", {"island": 2, "data": 2, "fsdp": 2, "tensor": 4}),
    ],
)
def test_only_the_outer_step_sends_over_islands(rules: str, mesh: dict[str, int]) -> None:
    program = Program.of(config(rules, **mesh), "h100", math.prod(mesh.values()))
    step, outer = program.compile(), program.compile_outer()
    assert outer is not None
    assert step.count(axis="island") == 0 == step.wire_bytes("island")
    assert step.wire_bytes("data") > 0
    weights = program.declared["params"].nbytes
    sums = [one for one in outer.collectives if one.axes]
    assert {one.axes for one in sums} == {("island",)} and {one.kind for one in sums} == {
        "all-reduce"
    }
    scalar = 4  # the number of skipped steps
    assert outer.payload_bytes("island") == weights + scalar
    n = mesh["island"]
    assert outer.wire_bytes("island") == pytest.approx(100 * wire_bytes(weights + scalar, n, 100))
    (line,) = report_facts(program.config, step, outer)
    assert line[0] == "islands" and "a step sends 0" in line[1], line
