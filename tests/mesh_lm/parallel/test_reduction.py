"""`rules.reduction`: gradients summed in another type equal those of one device, up to rounding."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from support import GPT, LLAMA, assert_same_gradients, gradients, reference, shard_on

from mesh_lm.config import PipelineConfig
from mesh_lm.optim.contract import is_matrix
from mesh_lm.parallel.layout import ModelLayout

COMPILE_BUDGET = 26
LAYERS = dataclasses.replace(LLAMA, n_layers=4)
"""Two periods of windows, so that two stages have one each."""


@pytest.mark.parametrize(
    ("config", "remat", "rules", "mesh", "pipeline"),
    [
        pytest.param(
            LLAMA,
            "full",
            "hsdp+megatron_sp",
            {"data": 2, "fsdp": 2, "tensor": 2},
            PipelineConfig(),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            GPT,
            "save_names",
            "hsdp",
            {"pipeline": 2, "fsdp": 4},
            PipelineConfig(stash="residuals"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            GPT,
            "none",
            "fsdp+megatron",
            {"fsdp": 4, "tensor": 2},
            PipelineConfig(),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            LAYERS,
            "full",
            "hsdp",
            {"pipeline": 2, "data": 2, "fsdp": 2},
            PipelineConfig(),
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["llama-full", "gpt-residuals", "gpt-none", "llama-windows-input"],
)
def test_equals_one_device(
    config, remat: str, rules: str, mesh: dict[str, int], pipeline: PipelineConfig
) -> None:
    shard = shard_on(f"{rules}+reduce_float32", **mesh)
    params, wanted_sums, wanted = reference(config)
    _, sums, grads = gradients(
        dataclasses.replace(config, remat=remat), shard, 2, pipeline=pipeline, params=params
    )
    assert sums == pytest.approx(wanted_sums, rel=1e-6)
    assert_same_gradients(grads, wanted)


def errors(
    found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], matrices: bool = True
) -> dict[str, float]:
    """The error of each layer parameter's gradient, relative to its norm, for matrices or
    vectors."""
    axes = ModelLayout.of(GPT, shard_on("ddp")).axes
    names = [
        name
        for name in wanted
        if name.startswith("blocks") and is_matrix(name, axes[name]) is matrices
    ]
    return {
        name: float(np.linalg.norm(found[name] - wanted[name]) / np.linalg.norm(wanted[name]))
        for name in names
    }


@pytest.mark.slow
def test_fp32_sums_of_a_bf16_model_are_nearer_to_an_fp32_model() -> None:
    model, wanted = dataclasses.replace(GPT, dtype="bfloat16"), reference(GPT)[2]
    asked, auto = (
        errors(gradients(model, shard_on(rules, fsdp=8), 2)[2], wanted)
        for rules in ("fsdp+reduce_float32", "fsdp")
    )
    assert len(asked) == 4 and all(asked[name] < auto[name] < 0.02 for name in asked), (asked, auto)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("hsdp+megatron", {"data": 2, "fsdp": 2, "tensor": 2}),
        pytest.param("zero2", {"data": 8}, marks=pytest.mark.exhaustive),
    ],
)
def test_bf16_sums_over_data_round_matrices_alone(rules: str, mesh: dict[str, int]) -> None:
    """An fp32 model, whose sums over fsdp stay in fp32, so that only the rounding to eight bits is
    lost."""
    found, wanted = (
        gradients(GPT, shard_on(f"{rules}+reduce_bfloat16", **mesh), 2)[2],
        reference(GPT)[2],
    )
    rounded = errors(found, wanted)
    assert all(g.dtype == jnp.float32 for g in found.values())
    assert len(rounded) == 4 and all(1e-3 < error < 4e-3 for error in rounded.values()), rounded
    assert max(errors(found, wanted, matrices=False).values()) < 1e-5
