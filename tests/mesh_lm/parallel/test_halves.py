"""Layers that compute two halves of a microbatch apart: loss and gradients equal those of one
device that computes them at once."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from support import GPT, LLAMA, assert_same_gradients, gradients, reference, shard_on

from mesh_lm.config import PipelineConfig
from mesh_lm.model import Context, DecoderConfig
from mesh_lm.parallel.halves import in_halves

COMPILE_BUDGET = 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "rules", "mesh", "microbatches", "pipeline"),
    [
        (GPT, "ddp", {"data": 1}, 2, PipelineConfig()),
        pytest.param(
            LLAMA,
            "fsdp+megatron_sp",
            {"fsdp": 4, "tensor": 2},
            2,
            PipelineConfig(),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            GPT,
            "hsdp+megatron",
            {"data": 2, "fsdp": 2, "tensor": 2},
            1,
            PipelineConfig(),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            GPT,
            "megatron_sp",
            {"pipeline": 2, "data": 2, "tensor": 2},
            4,
            PipelineConfig(),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_equals_one_device(
    model: DecoderConfig,
    rules: str,
    mesh: dict[str, int],
    microbatches: int,
    pipeline: PipelineConfig,
) -> None:
    shard = shard_on(rules, **mesh)
    halved = dataclasses.replace(model, batch_halves=True)
    _, sums, found = gradients(halved, shard, microbatches, separate=True, pipeline=pipeline)
    _, wanted_sums, wanted = reference(model, separate=True)
    assert sums == pytest.approx(wanted_sums, rel=1e-6)
    assert_same_gradients(found, wanted)


@pytest.mark.parametrize(
    ("rows", "calls"), [(8, [[0, 1, 4, 5], [2, 3, 6, 7]]), (6, [[0, 1, 2, 3, 4, 5]])]
)
def test_a_half_has_half_of_every_devices_sequences(rows: int, calls: list[list[int]]) -> None:
    """On two devices; with an odd number of sequences on each the layer is called once."""
    seen = []

    def layer(x: jax.Array, ctx: Context, /) -> tuple[jax.Array, Any, dict[str, jax.Array]]:
        seen.append(np.asarray(ctx.batch["sample_ids"]).tolist())
        assert ctx.batch["indices"].shape == (1, 3)
        return 2 * x, None, {"total": x.sum()}

    x = jax.numpy.arange(rows * 3 * 2.0).reshape(rows, 3, 2)
    batch = {"sample_ids": jax.numpy.arange(rows), "indices": jax.numpy.arange(3)[None]}
    y, cache, sums = in_halves(layer, shard_on("fsdp", fsdp=2), x, Context(batch))
    assert seen == calls and cache is None and sums["total"] == x.sum()
    np.testing.assert_array_equal(y, 2 * x)
