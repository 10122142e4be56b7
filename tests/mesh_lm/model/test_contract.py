"""A model that breaks the contract is told which part of it, in one sentence and by its own name,
before a step is compiled."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from pipeline_toy import ToyConfig

from mesh_lm.config import DataConfig, ModelConfig, TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.model.contract import layer_output, require_model, require_sums
from mesh_lm.training.check import check

COMPILE_BUDGET = 2


class Half(nnx.Module):
    def prepare(self, batch: Any) -> None: ...

    def embed(self, batch: Any, dropout: Any) -> None: ...


def test_a_model_without_a_loss() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^Half has no shard, loss; a model needs the members shard, prepare, embed, loss",
    ):
        require_model(Half())


@pytest.mark.parametrize(
    ("sums", "said"),
    [
        (jnp.zeros(()), r"returns float32\[\], but must return a dict of sums"),
        (
            {"objective": jnp.zeros(()), "loss": jnp.zeros(())},
            "returns no weight; its sums are objective, loss, weight, and metrics",
        ),
        (
            dict.fromkeys(("objective", "loss", "weight"), jnp.zeros(())) | {"each": jnp.zeros(3)},
            r"returns 'each' \(3,\); each sum of a loss is a scalar",
        ),
    ],
)
def test_a_loss_with_other_sums(sums: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^Half\.loss {said}"):
        require_sums(Half(), sums)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lambda x: x, r"Half returns float32\[2, 4, 8\]; a layer returns \(x, cache, sums\)"),
        (lambda x: (x, {}), r"Half returns a tuple of 2; a layer"),
        (
            lambda x: (x[..., :4], None, {}),
            r"Half returns x as float32\[2, 4, 4\], and got it as float32\[2, 4, 8\]: a layer keeps",
        ),
        (
            lambda x: (x.astype(jnp.bfloat16), None, {}),
            r"Half returns x as bfloat16\[2, 4, 8\], and got it as float32",
        ),
    ],
)
def test_a_layer_with_another_output(found: Any, said: str) -> None:
    def traced(x: jax.Array) -> jax.Array:
        layer_output(Half(), x, found(x))
        return x

    with pytest.raises(ConfigError, match=said):
        jax.eval_shape(traced, jnp.zeros((2, 4, 8)))


def test_a_config_that_makes_nothing() -> None:
    with pytest.raises(
        ConfigError, match=r"^ModelConfig has no make\(shard, rngs\), which builds its module"
    ):
        ModelConfig().make(None, None)  # pyright: ignore[reportArgumentType]


class Undecorated(ToyConfig):
    width: int = 3


@dataclasses.dataclass(frozen=True)
class Decorated(ToyConfig):
    width: int = 3


class Inherits(ToyConfig): ...


def test_fields_that_are_no_fields() -> None:
    """Without the decorator of dataclasses they would be in neither the options nor config.json."""
    said = "Undecorated has fields, but no @dataclasses.dataclass"
    for model, refused in ((Undecorated(), True), (Decorated(), False), (Inherits(), False)):
        try:
            check(TrainConfig(model, "x", data=DataConfig(tokenizer_vocab=64)), 1)
        except ConfigError as error:
            assert refused and said in str(error), error
        else:
            assert not refused
