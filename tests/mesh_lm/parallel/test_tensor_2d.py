"""Two-dimensional tensor parallelism equals one device: alone, and with what shards weights,
moments, layers and sequences besides."""

from typing import Any

import experts_toy
import pytest
from support import GPT, LLAMA, assert_same_gradients, gradients, reference, shard_on

from mesh_lm.config import PipelineConfig
from sharding_rules import preset

COMPILE_BUDGET = 60
SLOW = pytest.mark.slow
RESIDUALS = PipelineConfig(stash="residuals")
CASES: list[Any] = [
    pytest.param("gpt", "megatron_2d", {"tensor": 2}, PipelineConfig(), id="alone"),
    pytest.param(
        "llama",
        "zero2+hsdp+megatron_2d",
        {"fsdp": 2, "tensor": 2},
        PipelineConfig(),
        id="fsdp",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "gpt",
        "zero3+megatron_2d",
        {"data": 2, "tensor": 2},
        PipelineConfig(),
        id="zero3",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "llama",
        "ring+megatron_2d",
        {"sequence": 2, "tensor": 2},
        PipelineConfig(),
        id="ring",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "gpt",
        "fsdp+megatron_2d",
        {"pipeline": 2, "fsdp": 2},
        PipelineConfig(),
        id="stages",
        marks=SLOW,
    ),
    pytest.param(
        "gpt",
        "distributed+megatron_2d",
        {"pipeline": 2, "tensor": 2},
        RESIDUALS,
        id="residuals",
        marks=pytest.mark.exhaustive,
    ),
    pytest.param(
        "llama",
        "zero1+megatron_2d+reduce_bfloat16",
        {"data": 2, "tensor": 2},
        PipelineConfig(),
        id="zero1",
        marks=pytest.mark.exhaustive,
    ),
]
"""GPT has a tied head and learned positions; Llama has an untied head, sinks and two kv heads, of
which a device uses one."""


@pytest.mark.parametrize(("model", "rules", "mesh", "pipeline"), CASES)
def test_equals_one_device(
    model: str, rules: str, mesh: dict[str, Any], pipeline: PipelineConfig
) -> None:
    config, table = {"gpt": GPT, "llama": LLAMA}[model], preset(rules)
    if model == "llama":
        table = table.replace(rules, activations={"kv_heads": "tensor"})
    _, sums, grads = gradients(
        config, shard_on(table, **mesh, extra=("tensor_y=2",)), 2, pipeline=pipeline
    )
    assert sums == pytest.approx(reference(config)[1], rel=1e-6)
    assert_same_gradients(grads, reference(config)[2], 1e-5 if table.reduction == "auto" else 2e-2)


@pytest.mark.exhaustive
def test_a_mixture_of_experts_equals_one_device() -> None:
    """Layers of another kind, whose experts are all on each device, beside dense ones; with fewer
    heads than devices."""
    rules = experts_toy.rules("megatron_2d").replace(
        "mine", activations={"heads": "tensor", "kv_heads": "tensor"}
    )
    _, sums, grads = gradients(
        experts_toy.MODEL, shard_on(rules, tensor=2, extra=("tensor_y=2",)), 2
    )
    _, wanted, wanted_grads = gradients(experts_toy.MODEL, shard_on(experts_toy.rules("ddp")))
    assert sums["loss"] == pytest.approx(wanted["loss"], rel=1e-6)
    assert_same_gradients(grads, wanted_grads)
