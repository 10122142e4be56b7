"""How a blueprint divides its layers and moves what is theirs; tests/mesh_lm/pipeline has the bits of whole runs."""

import dataclasses

import jax
import numpy as np
import pytest
from support import GPT, shard_on

from mesh_lm.blueprint import Blueprint, divided
from mesh_lm.config import PipelineConfig
from mesh_lm.model import DecoderConfig
from sharding_rules.rules import Kind

COMPILE_BUDGET = 6


@pytest.mark.parametrize(("stash", "counts"), [("residuals", (5, 3)), ("input", (4, 4))])
def test_stages_are_balanced_for_what_they_compute(stash, counts: tuple[int, int]) -> None:
    """A head of two layers: 5 and 3 + 2. Where a backward repeats the forward, a layer is 4/3, and of the head 4/3 are free: 16/3 and
    18/3 are less than 20/3 and 14/3."""
    config = DecoderConfig(n_layers=8, d_model=64, n_heads=4, seq_len=16)
    layer = (config.flops_per_token() - 6 * config.vocab_size * config.d_model) / config.n_layers
    config = DecoderConfig(n_layers=8, d_model=64, n_heads=4, seq_len=16, vocab_size=round(2 * layer / (6 * config.d_model)))
    assert divided(config, PipelineConfig(stash=stash, balance="flops"), 2)["blocks"].counts == counts


@pytest.mark.parametrize("kind", ["params", "optimizer"])
def test_what_moves_into_stages_lies_there_as_the_rules_say(kind: Kind) -> None:
    """Under ZeRO moments are cut over data, and weights are not."""
    model = dataclasses.replace(GPT, n_layers=3)
    blueprint, name = Blueprint.of(model, shard_on("zero1", pipeline=2, data=2), PipelineConfig(layers=(1, 2))), "blocks.mlp.up.weight"
    shape, stages = blueprint.shapes[name].shape, blueprint.stack_of(name)
    values = np.random.default_rng(0).random(shape, np.float32)
    memory = blueprint.by_stage({name: jax.device_put(values, blueprint.canonical_shardings(kind)[name])}, kind)[name]
    assert memory.sharding.is_equivalent_to(blueprint.shardings(kind)[name], memory.ndim)
    assert memory.sharding.shard_shape(memory.shape)[1] == model.d_model // (2 if kind == "optimizer" else 1)
    np.testing.assert_array_equal(np.asarray(memory)[stages.row_of_layer()], values)
    disk = blueprint.in_model_order({name: memory}, kind)[name]
    assert disk.sharding.is_equivalent_to(blueprint.canonical_shardings(kind)[name], disk.ndim)
    np.testing.assert_array_equal(np.asarray(disk), values)
