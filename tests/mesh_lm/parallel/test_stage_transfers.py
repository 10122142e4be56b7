"""Stages that gather their layers once a step (the preset zero3 in a pipeline): gradients equal
those of one device."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from flat_layout import engine_weights, unflattened
from support import GPT, LLAMA, assert_same_gradients, host_batch, on_devices, reference, shard_on

from mesh_lm.config import ModelConfig, PipelineConfig
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout

COMPILE_BUDGET = 60
DEEP = dataclasses.replace(GPT, n_layers=8, remat="save_names")
UNEVEN = dataclasses.replace(GPT, n_layers=7, remat="full")
GROUPED = dataclasses.replace(LLAMA, n_layers=8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rules", "mesh", "microbatches", "pipeline", "separate"),
    [
        pytest.param(
            DEEP,
            "zero3",
            {"pipeline": 2, "data": 2},
            4,
            {"chunks": 4, "stash": "residuals"},
            False,
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            DEEP,
            "zero3+megatron_sp",
            {"pipeline": 2, "data": 2, "tensor": 2},
            4,
            {"chunks": 2, "stash": "residuals"},
            True,
            marks=pytest.mark.exhaustive,
        ),
        (
            UNEVEN,
            "zero3+megatron",
            {"pipeline": 2, "data": 2, "tensor": 2},
            2,
            {"chunks": 2, "balance": "flops"},
            False,
        ),
        pytest.param(
            GROUPED,
            "zero3+reduce_float32",
            {"pipeline": 2, "data": 2},
            4,
            {"chunks": 2},
            True,
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            DEEP,
            "zero3",
            {"pipeline": 2, "data": 2},
            4,
            {"chunks": 2, "stash": "residuals", "pair_layers": True},
            True,
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            DEEP,
            "zero3+fsdp",
            {"pipeline": 2, "data": 2, "fsdp": 2},
            4,
            {"schedule": "gpipe"},
            False,
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_gradients_equal_one_device(
    model: ModelConfig,
    rules: str,
    mesh: dict[str, int],
    microbatches: int,
    pipeline: dict[str, Any],
    separate: bool,
) -> None:
    layout = ModelLayout.of(model, shard_on(rules, **mesh), PipelineConfig(**pipeline))
    assert layout.flat.gathered_names == layout.flat.names & layout.stacked
    batch = on_devices(host_batch(microbatches, separate=separate), layout)
    (sums, _), grads = jax.jit(engine.region(layout, batch, layout.flat))(
        engine_weights(layout), batch, jax.random.key(3)
    )
    _, wanted_sums, wanted = reference(model, separate)
    assert {name: float(x) for name, x in sums.items()} == pytest.approx(wanted_sums, rel=1e-6)
    assert_same_gradients(unflattened(layout, jax.tree.map(np.asarray, grads)), wanted)
