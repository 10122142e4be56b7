"""Slots side by side (pipeline.pair_layers) equal one device, and the engine that runs one slot
after the other, in loss and gradients."""

import dataclasses
from typing import Any

import experts_toy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pipeline_toy import SEQUENCE, ToyConfig
from support import GPT, LLAMA, Outcome, assert_same_gradients, gradients, reference, shard_on

from mesh_lm.config import ModelConfig, PipelineConfig
from mesh_lm.parallel import tick as ring
from mesh_lm.parallel.paired_tick import Stretch, stretches
from sharding_rules import Rules

COMPILE_BUDGET = 110

_SMALL = {"n_layers": 8, "d_model": 16, "n_heads": 2}
TIED = dataclasses.replace(GPT, **_SMALL, remat="save_names")
"""Dropout, biases, embedding and head in one table."""
UNTIED = dataclasses.replace(LLAMA, **_SMALL, n_kv_heads=2, window=(), remat="none")
WINDOWS = dataclasses.replace(UNTIED, n_layers=10, window=(4, 0), remat="full")
"""Patterns of two layers."""
EXPERTS = experts_toy.MODEL
"""Two segments with dropout, arrays of sums, an auxiliary loss, and a matrix that layers of both
share."""
BOTH = {"pipeline": 2, "data": 2, "tensor": 2}

Case = tuple[ModelConfig, Rules | str, dict[str, int], int, PipelineConfig, bool]


def paired(**fields: Any) -> PipelineConfig:
    return PipelineConfig(stash="residuals", pair_layers=True, **fields)


CASES: dict[str, Case] = {
    "chunks": (TIED, "distributed+megatron_sp", BOTH, 4, paired(chunks=2), False),
    "unequal stages": (
        WINDOWS,
        "megatron",
        {"pipeline": 2, "tensor": 2},
        4,
        paired(chunks=2, layers=(2, 4, 2, 2)),
        True,
    ),
    "two segments": (
        EXPERTS,
        experts_toy.rules("megatron_sp"),
        {"pipeline": 2, "tensor": 2},
        4,
        paired(layers=(3, 3)),
        False,
    ),
    "auxiliary loss": (
        ToyConfig(),
        SEQUENCE,
        {"pipeline": 2, "sequence": 2},
        8,
        paired(chunks=2),
        False,
    ),
    "segments in chunks": (
        EXPERTS,
        experts_toy.rules("hsdp"),
        {"pipeline": 2, "fsdp": 2},
        4,
        paired(chunks=2, layers=(1, 2, 2, 1)),
        False,
    ),
    "fp32 gradients": (
        TIED,
        "hsdp+megatron_sp+reduce_float32",
        {"pipeline": 2, "fsdp": 2, "tensor": 2},
        4,
        paired(),
        False,
    ),
    "bf16 gradients": (TIED, "zero2+megatron+reduce_bfloat16", BOTH, 4, paired(), False),
    "gpipe": (
        UNTIED,
        "megatron_sp",
        {"pipeline": 4, "tensor": 2},
        4,
        paired(schedule="gpipe"),
        False,
    ),
    "one slot a tick": (
        UNTIED,
        "fsdp",
        {"pipeline": 2, "fsdp": 2},
        4,
        paired(schedule="classic_1f1b"),
        False,
    ),
    "unrolled": (
        dataclasses.replace(TIED, unroll=True),
        "zero1+megatron_sp",
        BOTH,
        4,
        paired(chunks=2),
        False,
    ),
    "unequal stages with dropout": (
        TIED,
        "fsdp+megatron_sp",
        {"pipeline": 2, "fsdp": 2, "tensor": 2},
        4,
        paired(layers=(5, 3)),
        False,
    ),
    "layers that permute": (
        ToyConfig(permutes=True),
        SEQUENCE,
        {"pipeline": 4, "sequence": 2},
        4,
        paired(),
        False,
    ),
    "a stage for each layer": (
        UNTIED,
        "ddp",
        {"pipeline": 4, "data": 2},
        4,
        paired(chunks=2),
        False,
    ),
}
"""Model, rules, mesh, microbatches, pipeline, whether documents are separate."""
FAST = ("auxiliary loss",)
SLOW = ("chunks", "layers that permute")


def marks(name: str) -> Any:
    return () if name in FAST else pytest.mark.slow if name in SLOW else pytest.mark.exhaustive


def outcome(case: Case, **changes: Any) -> Outcome:
    model, rules, mesh, microbatches, pipeline, separate = case
    return gradients(
        model,
        shard_on(rules, **mesh),
        microbatches,
        separate,
        dataclasses.replace(pipeline, **changes),
    )


def one_device(model: ModelConfig, separate: bool) -> Outcome:
    return (
        gradients(model, shard_on(experts_toy.rules("ddp")))
        if model is EXPERTS
        else reference(model, separate)
    )


def assert_same_sums(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in CASES])
def test_equals_one_device_and_slots_one_after_the_other(name: str) -> None:
    """Within 1e-6 of each gradient's maximum, where all is fp32."""
    case = CASES[name]
    _, sums, grads = outcome(case)
    _, before, wanted = outcome(case, pair_layers=False)
    for other in (before, one_device(case[0], case[-1])[1]):
        assert_same_sums(sums, other)
    for leaf, value in wanted.items():
        assert np.abs(grads[leaf] - value).max() <= 1e-6 * max(np.abs(value).max(), 1e-3), leaf
    if "bfloat16" not in str(case[1]):
        assert_same_gradients(grads, one_device(case[0], case[-1])[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chunks", "two segments"])
def test_idle_slots_cannot_poison_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They read the stashes' scratch slots; here these are infinite from the start, and so is what
    is computed from them."""
    stash = ring.stash
    monkeypatch.setattr(
        ring, "stash", lambda slots, like: jax.tree.map(_infinite, stash(slots, like))
    )
    _, sums, grads = outcome(CASES[name])
    _, wanted_sums, wanted = one_device(CASES[name][0], False)
    assert_same_sums(sums, wanted_sums)
    assert_same_gradients(grads, wanted)


def _infinite(x: jax.Array) -> jax.Array:
    return x + jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else x


@pytest.mark.exhaustive
def test_a_bf16_model_is_as_near_to_an_fp32_model_as_before() -> None:
    model, rules, mesh, *rest = CASES["chunks"]
    exact = reference(model)[2]
    case = (dataclasses.replace(model, dtype="bfloat16"), rules, mesh, *rest)
    after, before = (
        {name: _error(g, exact[name]) for name, g in outcome(case, pair_layers=on)[2].items()}
        for on in (True, False)
    )
    assert max(before.values()) > 1e-3, "no bf16 in this model"
    assert all(after[name] <= 1.1 * before[name] + 1e-4 for name in exact), (after, before)


def _error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(1, 5), min_size=1))
def test_the_passes_go_through_all_periods_in_opposite_order(periods: dict[str, int]) -> None:
    order = [(name, period) for name, n in periods.items() for period in range(n)]
    found = list(stretches(periods))
    assert [(one.forward, one.first + i) for one in found for i in range(one.length)] == order
    assert [(one.backward, one.last - i) for one in found for i in range(one.length)] == order[::-1]


def test_one_segment_is_one_loop() -> None:
    assert list(stretches({"blocks": 6})) == [Stretch("blocks", 0, "blocks", 5, 6)]
    assert list(stretches({"dense": 1, "moe": 3})) == [
        Stretch("dense", 0, "moe", 2, 1),
        Stretch("moe", 0, "moe", 1, 2),
        Stretch("moe", 2, "dense", 0, 1),
    ]
