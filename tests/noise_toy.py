"""A model whose gradient noise is known: the loss of a token is a weight of its own.

The gradient of a batch is the frequency of each token in it, whatever the weights are. For tokens
drawn uniformly from V, and S of them in a sequence, G = 1 / V for each token, |G|^2 = 1 / V, and
the covariance of one sequence's gradient has the trace (1 - 1 / V) / S. So the noise scale is
(V - 1) / S sequences.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mesh_lm.config import ModelConfig
from mesh_lm.model import Batch, Sums
from mesh_lm.model.dropout import Dropout
from sharding_rules import Shard


@dataclasses.dataclass(frozen=True)
class FrequencyConfig(ModelConfig):
    def make(self, shard: Shard, rngs: nnx.Rngs) -> nnx.Module:
        return Frequencies(self, shard)

    @property
    def noise_scale(self) -> float:
        return (self.vocab_size - 1) / self.seq_len


class Frequencies(nnx.Module):
    def __init__(self, config: FrequencyConfig, shard: Shard) -> None:
        self.shard = shard
        self.table = nnx.Param(jnp.zeros(config.vocab_size), out_sharding=("vocab",))

    def prepare(self, batch: Batch) -> None:
        return None

    def embed(self, batch: Batch, dropout: Dropout | None) -> jax.Array:
        return self.table[...][batch["tokens"]][..., None]

    def loss(self, x_BSD: jax.Array, batch: Batch, dropout: Dropout | None) -> Sums:
        total = jnp.sum(x_BSD[..., 0] * batch["weights"])
        return {"objective": total, "loss": total, "weight": batch["weights"].sum()}
