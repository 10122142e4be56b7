"""Layers that gather their own weights (the preset zero3): gradients equal those of one device."""

import dataclasses
from typing import Any

import experts_toy
import jax
import numpy as np
import pytest
from flat_layout import engine_weights, unflattened
from random_rules import verdict
from support import (
    GPT,
    LLAMA,
    assert_same_gradients,
    gradients,
    host_batch,
    on_devices,
    reference,
    shard_on,
)

from configs.gpt_tiny import get_config
from mesh_lm.config import ModelConfig
from mesh_lm.errors import ConfigError
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.training.check import check
from sharding_rules import Rules, preset

COMPILE_BUDGET = 200
TINY = get_config()
SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive

FULL = dataclasses.replace(GPT, remat="full")
SAVED = dataclasses.replace(GPT, n_layers=3, remat="save_names")
NONE = dataclasses.replace(GPT, n_layers=1, remat="none")
GROUPED = dataclasses.replace(LLAMA, n_layers=4)
"""Two periods of two layers with different windows."""
PARTLY = dataclasses.replace(GPT, n_layers=4, remat="full", remat_layers=1, kept_layers=2)
KEPT = dataclasses.replace(GPT, n_layers=3, remat="save_names", kept_layers=3, unroll=True)
MIXED = dataclasses.replace(LLAMA, n_layers=4, remat_layers=2, kept_layers=4)
GROUPED_SAVED = dataclasses.replace(LLAMA, n_kv_heads=4, remat="save_names")
HALVES = dataclasses.replace(GROUPED_SAVED, batch_halves=True)


@pytest.mark.parametrize(
    ("model", "rules", "mesh", "microbatches", "separate"),
    [
        (FULL, "zero3", {"data": 8}, 1, False),
        pytest.param(SAVED, "zero3+megatron_sp", {"data": 4, "tensor": 2}, 2, True, marks=SLOW),
        pytest.param(NONE, "zero3+megatron", {"data": 2, "tensor": 4}, 4, False, marks=EXHAUSTIVE),
        pytest.param(GROUPED, "zero3", {"data": 4}, 2, True, marks=EXHAUSTIVE),
        pytest.param(
            GROUPED_SAVED, "zero3+megatron_sp", {"data": 2, "tensor": 4}, 1, False, marks=EXHAUSTIVE
        ),
        pytest.param(
            NONE,
            "zero3+megatron_sp+reduce_float32",
            {"data": 4, "tensor": 2},
            1,
            True,
            marks=EXHAUSTIVE,
        ),
        pytest.param(
            GROUPED, "zero3+fsdp+reduce_float32", {"data": 2, "fsdp": 2}, 2, False, marks=SLOW
        ),
        pytest.param(FULL, "zero3", {"data": 1}, 2, True, marks=EXHAUSTIVE),
        pytest.param(PARTLY, "zero3+megatron_sp", {"data": 4, "tensor": 2}, 2, True, marks=SLOW),
        pytest.param(KEPT, "zero3", {"data": 4}, 1, False, marks=SLOW),
        pytest.param(MIXED, "zero3", {"data": 4}, 2, True, marks=EXHAUSTIVE),
        pytest.param(HALVES, "zero3+megatron_sp", {"data": 4, "tensor": 2}, 2, True, marks=SLOW),
    ],
    ids=str,
)
def test_gradients_equal_one_device(
    model: ModelConfig, rules: str, mesh: dict[str, int], microbatches: int, separate: bool
) -> None:
    sums, grads = gathered_gradients(model, rules, mesh, microbatches, separate)
    _, wanted_sums, wanted = reference(model, separate)
    assert sums == pytest.approx(wanted_sums, rel=1e-6)
    assert_same_gradients(grads, wanted)


@pytest.mark.slow
def test_segments_with_sums_equal_one_device() -> None:
    """An auxiliary loss, loads for each layer, and a matrix that the layers of both segments
    use."""
    layout = ModelLayout.of(experts_toy.MODEL, shard_on(experts_toy.rules("zero3"), data=4))
    batch = on_devices(host_batch(2), layout)
    (scalars, arrays), grads = jax.jit(engine.region(layout, batch, layout.flat))(
        engine_weights(layout, experts_toy.rules("ddp")), batch, jax.random.key(3)
    )
    _, wanted_sums, wanted = gradients(experts_toy.MODEL, shard_on(experts_toy.rules("ddp")))
    assert (
        {v.name for v in layout.flat.vectors if v.gathered_by_layer}
        and "router_z" in scalars
        and "moe/load" in arrays
    )
    for name, value in wanted_sums.items():
        np.testing.assert_allclose({**scalars, **arrays}[name], value, rtol=1e-6, err_msg=name)
    assert_same_gradients(unflattened(layout, jax.tree.map(np.asarray, grads)), wanted)


def gathered_gradients(
    model: ModelConfig,
    rules: Rules | str,
    mesh: dict[str, int],
    microbatches: int,
    separate: bool = False,
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The sums and gradients of a step, from the weights of seed 0."""
    layout = ModelLayout.of(model, shard_on(rules, **mesh))
    assert layout.flat.gathered_names == layout.flat.names & layout.stacked
    batch = on_devices(host_batch(microbatches, separate=separate), layout)
    run = jax.jit(engine.region(layout, batch, layout.flat))
    (sums, _), grads = run(engine_weights(layout), batch, jax.random.key(3))
    return {name: float(x) for name, x in sums.items()}, unflattened(
        layout, jax.tree.map(np.asarray, grads)
    )


@pytest.mark.slow
def test_a_step_equals_one_device() -> None:
    """The new weights and moments, through `check` and the state, in two microbatches."""
    example = {"model": "gpt", "mesh": {"data": 4, "tensor": 2}, "microbatches": 2}
    flat = {
        "params": {"flat": ["data"], "embed": []},
        "optimizer": {"flat": ["pipeline", "data"], "embed": []},
    }
    assert verdict({**example, "rules": {**flat, "activations": {"batch": ["data"]}}}) == (
        "same",
        "",
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"rules": {"params": {"flat": ["data"]}, "optimizer": {"flat": []}}},
            "rules.optimizer['flat']=None; set rules.optimizer['flat'] to ('pipeline', 'data')",
        ),
    ],
)
def test_what_cannot_run_is_refused(changes: dict[str, Any], said: str) -> None:
    flat = {"params": {"flat": ["data"]}, "optimizer": {"flat": ["pipeline", "data"]}}
    found, message = verdict({"model": "gpt", "mesh": {"data": 4}, "rules": flat, **changes})
    assert found == "refused" and said in message


def test_offload_is_refused() -> None:
    config = dataclasses.replace(
        TINY, model=dataclasses.replace(TINY.model, remat="offload"), rules=preset("zero3")
    )
    with pytest.raises(ConfigError, match="layers that gather their matrices cannot offload"):
        check(config, 8)
