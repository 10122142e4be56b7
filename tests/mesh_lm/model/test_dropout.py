"""Dropout: which sites have masks of their own, the fraction kept, and no dropout in evaluation.
test_parallel.py: the same on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import GPT, host_batch, initial, shard_on

from mesh_lm.model.dropout import Dropout
from mesh_lm.parallel import engine
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.parallel.stack import forward

COMPILE_BUDGET = 20


def test_every_site_of_every_layer_has_a_mask_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedding, and attention and MLP of two layers, use five different keys for each
    sample."""
    keys: set[bytes] = set()
    layout = ModelLayout.of(GPT, shard_on("ddp"))
    batch = {name: x[0] for name, x in host_batch(1).items()}

    def noted(self: Dropout, x: jax.Array, rate: float, batch_dim: int = 0) -> jax.Array:
        jax.debug.callback(
            lambda data: keys.update(row.tobytes() for row in np.asarray(data)),
            jax.random.key_data(self.keys),
        )
        return x

    monkeypatch.setattr(Dropout, "__call__", noted)
    dropout = Dropout.of(jax.random.key(3), batch["sample_ids"], batch["indices"])
    run = jax.jit(lambda params: forward(layout.bind, layout.segments, params, batch, dropout))
    jax.block_until_ready(run(initial(layout)))
    jax.effects_barrier()
    assert len(keys) == len(batch["sample_ids"]) * (1 + 2 * GPT.n_layers)


def test_the_mean_stays() -> None:
    x = np.full((64, 16, 32), 3.0, np.float32)
    found = np.asarray(
        jax.jit(
            lambda x: Dropout.of(
                jax.random.key(0), jnp.arange(64, dtype=jnp.uint32), jnp.arange(16)[None]
            )(x, 0.25)
        )(x)
    )
    assert set(np.unique(found)) == {0.0, 4.0} and found.mean() == pytest.approx(3.0, rel=0.01)


@pytest.mark.parametrize("stages", [1, 2])
def test_evaluation_drops_nothing(stages: int) -> None:
    layout = ModelLayout.of(GPT, shard_on("ddp", pipeline=stages))
    batch = host_batch(2)
    training = jax.make_jaxpr(engine.value_and_grad(layout))(
        layout.memory_shapes, batch, jax.random.key(0)
    )
    evaluation = jax.make_jaxpr(engine.evaluate(layout))(layout.memory_shapes, batch)
    assert "random_bits" in str(training) and "random_bits" not in str(evaluation)
