"""Context parallelism compiled for H100s: Llama 3 8B's attention at 131,072 tokens, 8 shards, two
layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mesh_lm.config import TrainConfig, load
from mesh_lm.planning.program import compile_config, flags_of
from sharding_rules import MeshConfig, preset
from sharding_rules.lab import Report
from sharding_rules.lab.flags import options

COMPILE_BUDGET = 8
pytestmark = pytest.mark.deviceless
TOKENS, WAYS = 131_072, 8


def config(rules: str, reports: str, **model: object) -> TrainConfig:
    base = load("configs/llama3_8b.py")
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, seq_len=TOKENS, n_layers=2, unroll=False, **model),
        mesh=MeshConfig(sequence=WAYS),
        rules=preset(f"{rules}+zero3"),
        train=dataclasses.replace(base.train, global_batch=1, microbatches=1),
        launch=dataclasses.replace(base.launch, compile_cache=str(Path(reports).parent)),
    )


def compiled(config: TrainConfig) -> Report:
    return compile_config(config, "h100", WAYS, options(flags_of(config, "h100")))


def of_attention(report: Report, field: str) -> float:
    return sum(
        one.times * one.wire if field == "wire" else one.exposed
        for one in report.collectives
        if "attention" in one.where.part
    )


@pytest.mark.parametrize(
    "remat",
    [
        pytest.param("save_names", marks=pytest.mark.slow),
        pytest.param("full", marks=pytest.mark.exhaustive),
    ],
)
def test_a_ring_holds_the_keys_of_two_shards_and_hardly_waits(reports: str, remat: str) -> None:
    """Forward and backward: no array has the keys of all tokens, and every permute is beside
    attention.

    What is exposed, half a per cent of the step, is the last hop of the gradients, which are summed
    in fp32 and have no matmul beside them.
    """
    report = compiled(config("ring", reports, remat=remat))
    shapes = [one.shape for one in report.memory.buffers]
    assert shapes and not [shape for shape in shapes if str(TOKENS) in shape]
    assert report.count("collective-permute", "sequence") >= 2 * 2 * (WAYS - 1)
    assert of_attention(report, "exposed") <= 0.006 * report.timeline.step


@pytest.mark.exhaustive
def test_a_window_ends_the_ring_early(reports: str) -> None:
    """Keys of 4,096 tokens back are in the next chunk, of the next shard in one direction or in the
    other."""
    report = compiled(config("ring", reports, remat="save_names", window=(4096,)))
    whole = compiled(config("ring", reports, remat="save_names"))
    assert of_attention(report, "wire") == pytest.approx(
        of_attention(whole, "wire") * 2 / (WAYS - 1), rel=0.01
    )


@pytest.mark.exhaustive
def test_what_each_form_sends(reports: str) -> None:
    """A ring a third more than the gather, for gradients of keys in fp32; Ulysses a part: per token
    2 (q + k + v) and twice the output, of which it keeps 1 / 8.
    """
    model = config("ring", reports).model
    per_token = 2 * TOKENS // WAYS * 128 * 2  # layers, tokens of a shard, head dim, bf16
    kv, heads = 2 * model.kv_heads * per_token, model.n_heads * per_token
    wanted = {
        "context_gather": 3 * (WAYS - 1) * kv,
        "ring": 4 * (WAYS - 1) * kv,
        "ulysses": (2 * (heads + kv) + 2 * heads) * (WAYS - 1) / WAYS,
    }
    for rules, size in wanted.items():
        report = compiled(config(rules, reports, remat="save_names"))
        assert of_attention(report, "wire") == pytest.approx(size, rel=0.001), rules
