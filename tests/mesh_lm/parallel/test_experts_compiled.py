"""Exchanges of experts, compiled for H100s: the bytes are those of the closed forms, and no exchange
is repeated."""

from __future__ import annotations

import dataclasses

import pytest

from mesh_lm.config import DataConfig, LaunchConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from mesh_lm.model.experts_config import ExpertsConfig
from mesh_lm.planning.experts import balanced_token_bytes, token_bytes
from mesh_lm.planning.program import compile_config
from mesh_lm.training.expert_kernels import exchange_of
from sharding_rules import MeshConfig, preset
from sharding_rules.lab import Report
from sharding_rules.lab.report import Collective

COMPILE_BUDGET = 12
pytestmark = pytest.mark.deviceless
LAYERS = 2
MODEL = DecoderConfig(
    vocab_size=32_000, seq_len=4096, n_layers=LAYERS, d_model=2048, n_heads=16, n_kv_heads=4,
    head_dim=128, positions="rotary", norm="rmsnorm", activation="swiglu", biases=False, tied=False,
    remat="save_names", block="moe", experts=ExpertsConfig(number=128, active=8, d_ff=768),
)  # fmt: skip
"""Layers of Qwen3-30B-A3B."""


def config_of(rules: str, reports: str, factor: float = 1.25) -> TrainConfig:
    experts = dataclasses.replace(MODEL.experts, factor=factor)
    return TrainConfig(
        model=dataclasses.replace(MODEL, experts=experts),
        output="nowhere",
        mesh=MeshConfig(expert=8),
        rules=preset(rules),
        train=TrainLoop(steps=10, global_batch=8),
        data=DataConfig(tokenizer_vocab=16_384),
        launch=LaunchConfig(compile_cache=reports),
    )


def exchanges(report: Report) -> list[Collective]:
    """The exchanges of first rounds, without scalars; those of further rounds are in
    conditionals."""
    return [
        one
        for one in report.collectives
        if "experts" in one.where.part and not one.conditional and one.payload > 1024
    ]


@pytest.mark.parametrize(
    ("rules", "factor"),
    [
        ("experts_gather", 0.0),
        pytest.param("experts_padded", 1.25, marks=pytest.mark.slow),
        pytest.param("experts_gather", 1.25, marks=pytest.mark.exhaustive),
    ],
)
def test_sends_the_bytes_of_the_closed_form(reports: str, rules: str, factor: float) -> None:
    config = config_of(rules, reports, factor)
    report = compile_config(config, "h100", 8)
    exchange = exchange_of(config, MODEL, "blocks")
    sent = sum(one.times * one.wire for one in exchanges(report)) / LAYERS
    assert sent == pytest.approx(token_bytes(exchange, MODEL.d_model), rel=0.01)
    # Of one row for each token and expert: a token with two experts on a device is sent there once.
    balanced = balanced_token_bytes(exchange, MODEL.d_model)
    if rules == "experts_gather":
        assert sent <= 1.02 * balanced
    else:
        assert sent <= 0.86 * balanced
    # The policy saves what the exchange has delivered, and the router's choice.
    assert not [one for one in exchanges(report) if one.where.phase == "recompute"]
    if factor:
        # No array has a row for each token of the group and expert of a token.
        n_rows = 8 * exchange.n_tokens * MODEL.experts.active
        largest = max(one.bytes for one in report.memory.buffers if one.kind == "activations")
        assert largest < n_rows * MODEL.d_model * 2 / 4


@pytest.mark.slow
def test_halves_hide_half_of_what_is_gathered(reports: str) -> None:
    """The exchange of one half of the sequences runs beside the experts of the other."""
    config = config_of("experts_gather", reports)
    halved = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, batch_halves=True),
        train=dataclasses.replace(config.train, global_batch=16),
    )
    found = exchanges(compile_config(halved, "h100", 8))
    seconds = sum(one.times * one.duration for one in found)
    hidden = 1 - sum(one.exposed for one in found) / seconds
    assert hidden >= 0.45, hidden
