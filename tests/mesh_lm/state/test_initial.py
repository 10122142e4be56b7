"""Tests of the standard deviations of initial weights."""

import dataclasses

import numpy as np
import pytest
from support import GPT, LLAMA, initial, shard_on

from mesh_lm.parallel.layout import ModelLayout

COMPILE_BUDGET = 4


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_the_spread_of_initial_weights(config) -> None:
    """init_std, but init_std / sqrt(2 n_layers) for the two projections of a block into the
    residual stream (GPT-2)."""
    config = dataclasses.replace(config, n_layers=8, d_model=64, init_std=0.3)
    params = initial(ModelLayout.of(config, shard_on("ddp")))
    cut = 0.98658  # standard deviation of a normal distribution truncated at three of them
    for name, x in params.items():
        if name.endswith((".bias", "sinks")):
            assert not x.any(), name
        elif name.endswith(".scale"):
            assert (x == 1).all(), name
        else:
            wanted = 0.3 / 4 if name.endswith(("out.weight", "down.weight")) else 0.3
            assert np.abs(x).max() <= 3 * wanted and x.std() == pytest.approx(
                cut * wanted, rel=0.05
            ), name
            assert abs(x.mean()) < 0.05 * wanted, name
