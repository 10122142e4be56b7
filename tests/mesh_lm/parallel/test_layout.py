"""What a model's state must be: parameters in float32, and those of layers used in layers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from pipeline_toy import Toy, ToyConfig
from support import host_batch, shard_on

from mesh_lm.errors import ConfigError
from mesh_lm.parallel.engine import value_and_grad
from mesh_lm.parallel.layout import ModelLayout
from sharding_rules import Shard

COMPILE_BUDGET = 4


def weight(value: Callable[[jax.Array], jax.Array] = lambda x: x, **metadata: Any) -> type[Toy]:
    """A model whose layers' weight is another parameter."""

    class Changed(Toy):
        def __init__(self, config: ToyConfig, shard: Shard, rngs: nnx.Rngs) -> None:
            super().__init__(config, shard, rngs)
            was = self.layers.weight
            self.layers.weight = nnx.Param(value(was.get_value()), out_sharding=was.get_metadata()["out_sharding"], **metadata)

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
            "model.layers.weight is bfloat16; store it in float32, and set compute_dtype='bfloat16' of its nnx.Param",
        ),
        (weight(compute_dtype="bf16"), "model.layers.weight: compute_dtype='bf16' is not a type; write it as in compute_dtype='bfloat16'"),
    ],
    ids=["stored in bf16", "no such type"],
)
def test_the_types_of_parameters(model: type[Toy], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout(model)
    assert str(caught.value) == said


def test_the_type_in_which_layers_use_a_parameter() -> None:
    assert layout(weight(compute_dtype="bfloat16")).compute_dtypes == {"layers.weight": jnp.bfloat16, "table": jnp.float32}


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
    """It would have no gradient from there."""
    made = layout(model, **mesh)
    with pytest.raises(ConfigError) as caught:
        jax.eval_shape(value_and_grad(made), made.memory_shapes, host_batch(2), jax.random.key(0))
    said = "Config: prepare, embed or loss uses layers.weight, a parameter of the layers; make it a parameter of the model itself"
    assert str(caught.value).startswith(said)
