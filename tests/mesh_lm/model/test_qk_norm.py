"""Normalised queries and keys: the same in parallel and under remat, and counted among the
parameters."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from support import LLAMA, assert_same_gradients, gradients, reference, shard_on

from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.parallel.stack import forward

COMPILE_BUDGET = 15
CONFIG = dataclasses.replace(
    LLAMA, qk_norm=True, sinks=False, softcap=0.0, window=(), head_softcap=0.0, z_loss=0.0
)


@pytest.mark.slow
def test_parallel_equals_one_device() -> None:
    shard = shard_on("hsdp+megatron_sp", data=2, fsdp=2, tensor=2)
    assert_same_gradients(gradients(CONFIG, shard)[2], reference(CONFIG)[2])


@pytest.mark.slow
def test_remat_changes_no_gradient() -> None:
    config = dataclasses.replace(CONFIG, remat="save_names")
    assert_same_gradients(
        gradients(config, shard_on("ddp"))[2], reference(CONFIG)[2], tolerance=1e-6
    )


def test_save_names_computes_no_projection_again() -> None:
    """The backward of a norm needs its input: if only its output were saved, q and k would be
    projected twice."""

    def matmuls(**changes: object) -> int:
        layout = ModelLayout.of(dataclasses.replace(CONFIG, **changes), shard_on("ddp"))
        batch = {
            name: np.zeros((1, 16), kind)
            for name, kind in (
                ("tokens", np.int32),
                ("labels", np.int32),
                ("weights", np.float32),
                ("indices", np.int32),
            )
        }
        program = jax.make_jaxpr(
            jax.grad(lambda p: forward(layout.bind, layout.segments, p, batch)[0])
        )(layout.shapes)
        return str(program).count("dot_general")

    assert (
        matmuls(remat="save_names") - matmuls(remat="save_names", qk_norm=False)
        == 0
        < matmuls(remat="full") - matmuls(remat="save_names")
    )


def test_the_count_is_that_of_the_arrays() -> None:
    for norm, biases in (("rmsnorm", False), ("layernorm", True), ("layernorm", False)):
        config = dataclasses.replace(CONFIG, norm=norm, biases=biases, vocab_multiple=1)
        assert (
            sum(math.prod(s.shape) for s in ModelLayout.of(config, shard_on("ddp")).shapes.values())
            == config.n_params()
        )
