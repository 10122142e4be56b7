"""Layers that compute two halves of a microbatch apart: loss and gradients equal those of one device that computes them at once."""

import dataclasses

import pytest
from support import GPT, LLAMA, assert_same_gradients, gradients, reference, shard_on

from mesh_lm.config import PipelineConfig
from mesh_lm.model import DecoderConfig

COMPILE_BUDGET = 60


@pytest.mark.parametrize(
    ("model", "rules", "mesh", "microbatches", "pipeline"),
    [
        (GPT, "ddp", {"data": 1}, 2, PipelineConfig()),
        pytest.param(LLAMA, "fsdp+megatron_sp", {"fsdp": 4, "tensor": 2}, 2, PipelineConfig(), marks=pytest.mark.slow),
        pytest.param(GPT, "hsdp+megatron", {"data": 2, "fsdp": 2, "tensor": 2}, 1, PipelineConfig(), marks=pytest.mark.slow),
        pytest.param(GPT, "megatron_sp", {"pipeline": 2, "data": 2, "tensor": 2}, 4, PipelineConfig(), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_equals_one_device(model: DecoderConfig, rules: str, mesh: dict[str, int], microbatches: int, pipeline: PipelineConfig) -> None:
    shard = shard_on(rules, **mesh)
    halved = dataclasses.replace(model, batch_halves=True)
    _, sums, found = gradients(halved, shard, microbatches, separate=True, pipeline=pipeline)
    _, wanted_sums, wanted = reference(model, separate=True)
    assert sums == pytest.approx(wanted_sums, rel=1e-6)
    assert_same_gradients(found, wanted)
