"""Every strategy equals one device: loss and all gradients, initial bits, dropout masks, with
unequal label counts and microbatches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    GPT,
    LLAMA,
    assert_same_gradients,
    by_stage,
    gradients,
    host_batch,
    initial,
    on_devices,
    reference,
    shard_on,
)

from mesh_lm.config import PipelineConfig
from mesh_lm.model.dropout import Dropout
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout
from sharding_rules import preset

COMPILE_BUDGET = 130
SLOW, EXHAUSTIVE = pytest.mark.slow, pytest.mark.exhaustive

CASES = [
    ("ddp", {"data": 8}, 1, "gpt", EXHAUSTIVE),
    ("ddp", {"data": 4}, 4, "llama", ()),
    ("zero1", {"data": 8}, 2, "gpt", EXHAUSTIVE),
    ("zero2", {"data": 8}, 1, "llama", ()),
    ("fsdp", {"fsdp": 8}, 2, "gpt", SLOW),
    ("hsdp", {"data": 2, "fsdp": 4}, 1, "llama", SLOW),
    ("megatron", {"data": 2, "tensor": 4}, 2, "gpt", ()),
    ("megatron_sp", {"data": 2, "tensor": 4}, 1, "llama", EXHAUSTIVE),
    ("fsdp+megatron", {"fsdp": 4, "tensor": 2}, 2, "llama", EXHAUSTIVE),
    ("hsdp+megatron_sp", {"data": 2, "fsdp": 2, "tensor": 2}, 2, "llama", SLOW),
    ("zero1+fsdp+megatron", {"data": 2, "fsdp": 2, "tensor": 2}, 1, "gpt", ()),
]
"""Rules, mesh, microbatches, the model of CI's case and its suite; the case with the other model is
exhaustive."""


@pytest.mark.parametrize(
    ("model", "rules", "mesh", "microbatches"),
    [
        pytest.param(model, *case, marks=marks if model == first else pytest.mark.exhaustive)
        for *case, first, marks in CASES
        for model in ("gpt", "llama")
    ],
    ids=lambda value: str(value).replace("'", ""),
)
def test_equals_one_device(model: str, rules: str, mesh: dict[str, int], microbatches: int) -> None:
    config = {"gpt": GPT, "llama": LLAMA}[model]
    shard = shard_on(rules, **mesh)
    # then the kv heads are replicated, and each device takes its own
    if mesh.get("tensor", 1) > config.kv_heads:
        rows = {"kv_heads": None}
        shard = shard_on(shard.rules.replace(params=rows, activations=rows), **mesh)
    params, sums, grads = gradients(config, shard, microbatches)
    wanted_params, wanted_sums, wanted_grads = reference(config)
    for name, value in wanted_params.items():
        np.testing.assert_array_equal(params[name], value, err_msg=f"initial bits of {name}")
    assert sums["weight"] == wanted_sums["weight"]
    assert sums == pytest.approx(wanted_sums, rel=1e-6)
    assert_same_gradients(grads, wanted_grads)


@pytest.mark.slow  # pipeline/test_engine.py has some in stages
def test_separate_documents_equal_one_device() -> None:
    _, sums, grads = gradients(
        GPT, shard_on("hsdp+megatron_sp", data=2, fsdp=2, tensor=2), 2, separate=True
    )
    _, wanted_sums, wanted_grads = reference(GPT, separate=True)
    assert sums == pytest.approx(wanted_sums, rel=1e-6)
    assert_same_gradients(grads, wanted_grads)
    assert abs(sums["loss"] - reference(GPT)[1]["loss"]) > 1e-3, (
        "segment ids and positions changed nothing"
    )


@pytest.mark.slow
def test_positions_cut_by_rows_equal_one_device() -> None:
    rules = preset("hsdp+megatron_sp").replace(params={"position": "fsdp", "embed": None})
    _, sums, grads = gradients(GPT, shard_on(rules, data=2, fsdp=2, tensor=2), 2)
    assert sums == pytest.approx(reference(GPT)[1], rel=1e-6)
    assert_same_gradients(grads, reference(GPT)[2])


@pytest.mark.slow
def test_padded_layers_have_no_gradient() -> None:
    """Weights of 0 give other weights no gradient; a bias added to the residual stream gets one if
    the layer runs."""
    config = dataclasses.replace(GPT, n_layers=3, dropout=0.0)
    layout = ModelLayout.of(config, shard_on("ddp", pipeline=2), PipelineConfig(layers=(1, 2)))
    batch = on_devices(host_batch(2), layout)
    _, grads = jax.jit(engine.value_and_grad(layout))(
        by_stage(layout, initial(layout)), batch, jax.random.key(0)
    )
    padded = layout.stacks["blocks"].layer_of_row() < 0
    for name in layout.stacked:
        rows = np.asarray(grads[name])
        assert not rows[padded].any() and rows[~padded].any(), name


@pytest.mark.parametrize(
    ("rules", "mesh"), [("hsdp", {"data": 2, "fsdp": 4}), ("megatron_sp", {"data": 2, "tensor": 4})]
)
def test_dropout_masks_do_not_depend_on_the_mesh(rules: str, mesh: dict[str, int]) -> None:
    x = np.ones((8, 16, 32), np.float32)
    ids = np.arange(8, dtype=np.uint32)

    def mask(x, ids):
        return Dropout.of(jax.random.key(1), ids, jnp.arange(16)[None]).fold(3).fold(1)(x, 0.25)

    shard = shard_on(rules, **mesh)
    places = (
        shard.sharding("activations", ("batch", "seq_resid", "embed")),
        shard.sharding("activations", ("batch",)),
    )
    alone, sharded = (
        np.asarray(jax.jit(mask)(x, ids)),
        jax.jit(mask, in_shardings=places, out_shardings=places[0])(x, ids),
    )
    np.testing.assert_array_equal(alone, np.asarray(sharded))
    assert 0.2 < (alone == 0).mean() < 0.3
    assert not np.array_equal(alone[0], alone[1]), "two samples share a mask"
