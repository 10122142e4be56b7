"""Rules that no preset has equal one device, too: tables gathered over axes that do not cut the batch, a sequence cut by two axes."""

from typing import Any

import pytest
from support import GPT, LLAMA, assert_same_gradients, gradients, reference, shard_on

from mesh_lm.model import DecoderConfig
from sharding_rules import Rules, Shard, ShardingRuleError, preset

COMPILE_BUDGET = 40

_WHOLE_TABLES: dict[str, Any] = {"gathered": {"vocab": None}, "activations": {"vocab": None}}
CASES: dict[str, tuple[DecoderConfig, Rules, dict[str, int]]] = {
    # Columns of both tables gathered over an axis that cuts the sequence, and not the batch.
    "embed over the sequence's axis, gathered": (
        GPT,
        preset("ddp").replace(params={"embed": "fsdp"}, gathered={"embed": None}, activations={"seq_resid": "fsdp"}),
        {"fsdp": 2},
    ),
    # Rows gathered over an axis along which the activations are whole.
    "vocab over tensor, gathered": (GPT, preset("megatron_sp").replace(**_WHOLE_TABLES), {"tensor": 2}),
    "vocab over tensor and fsdp, gathered": (
        LLAMA,
        preset("hsdp+megatron").replace(params={"vocab": ("tensor", "fsdp"), "embed": None}, **_WHOLE_TABLES),
        {"data": 2, "fsdp": 2, "tensor": 2},
    ),
    # The vocabulary's axis comes second in the sequence's order.
    "seq_resid over fsdp, then tensor": (
        GPT,
        preset("megatron").replace(activations={"seq_resid": ("fsdp", "tensor")}),
        {"fsdp": 2, "tensor": 2},
    ),
    "seq_resid over tensor, then fsdp": (
        LLAMA,
        preset("megatron").replace(activations={"seq_resid": ("tensor", "fsdp")}),
        {"fsdp": 2, "tensor": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(case: str) -> None:
    config, rules, mesh = CASES[case]
    _, sums, grads = gradients(config, shard_on(rules, **mesh), microbatches=2)
    assert sums == pytest.approx(reference(config)[1], rel=1e-6)
    assert_same_gradients(grads, reference(config)[2])


def test_a_table_used_in_parts_along_the_batch_is_refused() -> None:
    rules = preset("fsdp").replace(params={"vocab": "fsdp", "embed": None}, gathered={"vocab": "fsdp"})
    shard: Shard = shard_on(rules, fsdp=2)
    with pytest.raises(ShardingRuleError) as caught:
        shard.stored("vocab", "embed")
    assert str(caught.value) == (
        "rules.gathered['vocab']='fsdp' has 'fsdp', which cuts the batch: a table is gathered over the axes of the batch; leave 'fsdp' out"
    )
