"""The sparse config beside the dense one from which it is derived."""

import dataclasses

import pytest

from mesh_lm.config import load
from mesh_lm.model import DecoderConfig
from mesh_lm.training.check import check


def model_of(name: str) -> DecoderConfig:
    model = load(name).model
    assert isinstance(model, DecoderConfig)
    return model


def test_gpt_tiny_moe_uses_the_weights_of_gpt_tiny() -> None:
    dense = model_of("gpt_tiny")
    sparse = model_of("gpt_tiny_moe")
    assert sparse.experts.active * sparse.d_expert == dense.d_mlp
    router = 6 * sparse.n_layers * sparse.d_model * sparse.experts.number
    assert sparse.flops_per_token() == dense.flops_per_token() + router
    assert sparse.n_params() / dense.n_params() == pytest.approx(1.88, abs=0.005)


def test_gpt_tiny_moe_differs_in_its_experts_alone() -> None:
    dense = load("gpt_tiny")
    sparse = load("gpt_tiny_moe")
    model = model_of("gpt_tiny")
    model = dataclasses.replace(model, block="moe", experts=model_of("gpt_tiny_moe").experts)
    assert sparse == dataclasses.replace(dense, model=model, output="runs/gpt_tiny_moe")
    for n_devices in (1, 8):
        check(sparse, n_devices)
