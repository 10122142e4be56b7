"""The sparse configs: that of a first run beside the dense one from which it is derived, and those
of published models.
"""

import dataclasses
from typing import NamedTuple

import pytest

from mesh_lm.config import load
from mesh_lm.model import DecoderConfig, SegmentConfig
from mesh_lm.training.check import check


class Released(NamedTuple):
    """A published model: config.json and the weights of its repository on Hugging Face."""

    n_devices: int
    """Of our config; the others are published."""
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    n_experts: int
    n_active: int
    d_expert: int
    vocab_size: int
    n_params: int
    used: float
    """Parameters that a token uses, rounded."""


# mistralai/Mixtral-8x7B-v0.1 and Qwen/Qwen3-30B-A3B.
RELEASED = {
    "mixtral_8x7b": Released(
        128, 32, 4096, 32, 8, 8, 2, 14_336, 32_000, 46_702_792_704, used=12.9e9
    ),
    "qwen3_30b_a3b": Released(
        64, 48, 2048, 32, 4, 128, 8, 768, 151_936, 30_532_122_624, used=3.3e9
    ),
}


def model_of(name: str) -> DecoderConfig:
    model = load(name).model
    assert isinstance(model, DecoderConfig)
    return model


def test_gpt_tiny_moe_uses_the_weights_of_gpt_tiny() -> None:
    dense = model_of("gpt_tiny")
    sparse = model_of("gpt_tiny_moe")
    assert sparse.experts.active * sparse.d_expert == dense.d_mlp
    router = 3 * sparse.d_model * sparse.experts.number
    assert sparse.flops_per_token() == dense.flops_per_token() + 6 * router
    assert sparse.n_params() - sparse.n_idle_params() == dense.n_params() + router
    assert sparse.n_params() / dense.n_params() == pytest.approx(1.66, abs=0.005)


def test_gpt_tiny_moe_differs_in_its_experts_alone() -> None:
    dense = load("gpt_tiny")
    sparse = load("gpt_tiny_moe")
    model = model_of("gpt_tiny")
    segments = (SegmentConfig("first", 1), SegmentConfig("others", 3, "moe"))
    model = dataclasses.replace(model, segments=segments, experts=model_of("gpt_tiny_moe").experts)
    assert sparse == dataclasses.replace(dense, model=model, output="runs/gpt_tiny_moe")
    for n_devices in (1, 8):
        check(sparse, n_devices)


@pytest.mark.parametrize("name", RELEASED)
def test_a_model_is_that_of_its_release(name: str) -> None:
    released = RELEASED[name]
    model = model_of(name)
    experts = model.experts
    assert (model.n_layers, model.d_model) == (released.n_layers, released.d_model)
    assert (model.n_heads, model.n_kv_heads) == (released.n_heads, released.n_kv_heads)
    assert (experts.number, experts.active) == (released.n_experts, released.n_active)
    assert (model.d_expert, model.vocab_size) == (released.d_expert, released.vocab_size)
    # Both have heads of 128, also where d_model / n_heads is 64.
    assert model.d_head == 128
    assert model.n_params() == released.n_params

    idle_experts = experts.number - experts.active
    idle = model.n_layers * idle_experts * 3 * model.d_model * model.d_expert
    assert model.n_idle_params() == idle
    assert model.n_params() - idle == pytest.approx(released.used, rel=0.02)


@pytest.mark.parametrize("name", RELEASED)
def test_the_experts_of_a_layer_are_in_one_node(name: str) -> None:
    config = check(load(name), RELEASED[name].n_devices)
    assert config.mesh.expert == 8
