"""How layers are divided over stages and moved there; and what is required of parameters: float32,
those of layers used in layers only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pipeline_toy import Toy, ToyConfig
from support import GPT, host_batch, shard_on

from mesh_lm.config import PipelineConfig
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.parallel.engine import value_and_grad
from mesh_lm.parallel.layout import ModelLayout, divided
from sharding_rules import Shard
from sharding_rules.rules import Kind

COMPILE_BUDGET = 16


@pytest.mark.parametrize(("stash", "counts"), [("residuals", (5, 3)), ("input", (4, 4))])
def test_stages_are_balanced_for_what_they_compute(stash: Any, counts: tuple[int, int]) -> None:
    """The head costs as much as two layers, so that 5 and 3 + 2 are equal if nothing is recomputed.

    If the backward pass recomputes the forward pass, a layer costs 4/3. The last stage then has no
    forward slot, which saves 4/3 of its head's 2: 16/3 and 18/3 are better than 20/3 and 14/3.
    """
    config = DecoderConfig(n_layers=8, d_model=64, n_heads=4, seq_len=16)
    head = 6 * config.d_model
    layer = (config.flops_per_token() - config.vocab_size * head) / config.n_layers
    config = dataclasses.replace(config, vocab_size=round(2 * layer / head))
    layers = divided(config, PipelineConfig(stash=stash, balance="flops"), 2)["blocks"]
    assert layers.layer_counts == counts


@pytest.mark.parametrize("kind", ["params", "optimizer"])
def test_what_moves_into_stages_is_sharded_as_the_rules_say(kind: Kind) -> None:
    """Under ZeRO-1 moments are sharded over data, and weights are not."""
    model, name = dataclasses.replace(GPT, n_layers=3), "blocks.mlp.up.weight"
    staged = ModelLayout.of(
        model, shard_on("zero1", pipeline=2, data=2), PipelineConfig(layers=(1, 2))
    )
    values = np.random.default_rng(0).random(staged.shapes[name].shape, np.float32)
    on_disk = jax.device_put(values, staged.canonical_shardings(kind)[name])

    in_memory = staged.to_memory_order({name: on_disk}, kind)[name]
    assert in_memory.sharding.is_equivalent_to(staged.shardings(kind)[name], in_memory.ndim)
    assert in_memory.sharding.shard_shape(in_memory.shape)[1] == model.d_model // (
        2 if kind == "optimizer" else 1
    )

    back = staged.to_model_order({name: in_memory}, kind)[name]
    assert back.sharding.is_equivalent_to(staged.canonical_shardings(kind)[name], back.ndim)
    np.testing.assert_array_equal(np.asarray(back), values)


def weight(value: Callable[[jax.Array], jax.Array] = lambda x: x, **metadata: Any) -> type[Toy]:
    """A model whose layers have a custom parameter."""

    class Changed(Toy):
        def __init__(self, config: ToyConfig, shard: Shard, rngs: nnx.Rngs) -> None:
            super().__init__(config, shard, rngs)
            was = self.layers.weight
            self.layers.weight = nnx.Param(
                value(was.get_value()), out_sharding=was.get_metadata()["out_sharding"], **metadata
            )

    return Changed


def layout(model: type[Toy], **mesh: int) -> ModelLayout:
    @dataclasses.dataclass(frozen=True)
    class Config(ToyConfig):
        def make(self, shard: Shard, rngs: nnx.Rngs) -> nnx.Module:
            return model(self, shard, rngs)

    return ModelLayout.of(Config(n_layers=2), shard_on("ddp", **mesh))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            weight(lambda x: x.astype(jnp.bfloat16)),
            (
                "model.layers.weight is bfloat16; store it in float32, and set "
                "compute_dtype='bfloat16' of its nnx.Param"
            ),
        ),
        (
            weight(compute_dtype="bf16"),
            (
                "model.layers.weight: compute_dtype='bf16' is not a type; write it as in "
                "compute_dtype='bfloat16'"
            ),
        ),
    ],
    ids=["stored in bf16", "no such type"],
)
def test_the_types_of_parameters(model: type[Toy], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout(model)
    assert str(caught.value) == said


def test_the_type_in_which_layers_use_a_parameter() -> None:
    assert layout(weight(compute_dtype="bfloat16")).compute_dtypes == {
        "layers.weight": jnp.bfloat16,
        "table": jnp.float32,
    }


class InLoss(Toy):
    def loss(self, x: jax.Array, batch: Any, dropout: Any) -> dict[str, jax.Array]:
        sums = super().loss(x, batch, dropout)
        return {**sums, "objective": sums["objective"] + jnp.square(self.layers.weight[...]).sum()}


class InEmbed(Toy):
    def embed(self, batch: Any, dropout: Any) -> jax.Array:
        return super().embed(batch, dropout) * self.layers.weight[0, 0]


class InPrepare(Toy):
    def prepare(self, batch: Any) -> Any:
        return self.layers.weight[...].sum()


@pytest.mark.parametrize("mesh", [{}, {"pipeline": 2}], ids=str)
@pytest.mark.parametrize("model", [InLoss, InEmbed, InPrepare])
def test_a_layers_parameter_used_outside_of_layers(model: type[Toy], mesh: dict[str, int]) -> None:
    """The gradient would miss that contribution."""
    made = layout(model, **mesh)
    with pytest.raises(ConfigError) as caught:
        jax.eval_shape(value_and_grad(made), made.memory_shapes, host_batch(2), jax.random.key(0))
    said = (
        "Config: prepare, embed or loss uses layers.weight, a parameter of the layers; make it a "
        "parameter of the model itself"
    )
    assert str(caught.value).startswith(said)
