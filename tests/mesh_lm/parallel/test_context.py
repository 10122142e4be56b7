"""Context parallelism: attention over sharded sequences equals that of one device, in every form and with every other axis."""

from __future__ import annotations

import dataclasses

import pytest
from support import GPT, LLAMA, assert_same_gradients, gradients, reference, shard_on

from mesh_lm.config import PipelineConfig

COMPILE_BUDGET = 40
FULL = dataclasses.replace(LLAMA, window=(), n_kv_heads=4, remat="save_names")
WINDOW = dataclasses.replace(GPT, positions="rotary", window=(3,), n_layers=2, dropout=0.0, sinks=True)

CASES = [
    # model, rules, mesh, microbatches, separate documents, pipeline
    (GPT, "context_gather", {"sequence": 4}, 1, False, {}),
    (GPT, "ulysses", {"sequence": 4}, 2, True, {}),
    (GPT, "ring", {"sequence": 4}, 1, True, {}),
    (FULL, "ring+megatron_sp", {"data": 2, "sequence": 2, "tensor": 2}, 2, False, {}),
    (LLAMA, "ring", {"sequence": 8}, 1, False, {}),
    (LLAMA, "context_gather+fsdp", {"fsdp": 2, "sequence": 4}, 1, True, {}),
    (LLAMA, "ulysses+megatron", {"sequence": 4, "tensor": 2}, 1, True, {}),
    (FULL, "usp", {"sequence": 2, "extra": ("ulysses=4",)}, 1, True, {}),
    (WINDOW, "ring", {"sequence": 8}, 1, False, {}),
    (GPT, "ring+distributed", {"pipeline": 2, "data": 2, "sequence": 2}, 4, False, {}),
    (FULL, "ulysses+zero3", {"data": 2, "sequence": 4}, 1, False, {}),
]


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{c[1]}-{'x'.join(map(str, c[2]))}" for c in CASES])
def test_equals_one_device(case: int) -> None:
    config, rules, mesh, microbatches, separate, pipeline = CASES[case]
    _, sums, grads = gradients(config, shard_on(rules, **mesh), microbatches, separate, PipelineConfig(**pipeline))
    _, wanted_sums, wanted = reference(config, separate)
    assert_same_gradients(grads, wanted)
    assert sums == pytest.approx(wanted_sums, rel=1e-5)
