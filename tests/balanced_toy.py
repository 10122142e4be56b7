"""The mixture of experts of `experts_toy` with buffers: the bias that balances a router
(DeepSeek-V3, arXiv 2412.19437), with a row for each layer; and the number of labels read so far,
outside of layers, which embedding, layers and loss use."""

from __future__ import annotations

import dataclasses
from typing import Any

import experts_toy
import jax
import jax.numpy as jnp
from experts_toy import EXPERTS, ExpertsConfig, ExpertsDecoder
from experts_toy import flops_per_token as flops_per_token
from experts_toy import n_params as n_params
from flax import nnx

from mesh_lm.model import Batch, DecoderConfig, SegmentConfig, Sums
from mesh_lm.model.buffer import Buffer
from mesh_lm.model.dropout import Dropout
from mesh_lm.model.layers import Weights
from sharding_rules import Shard

RATE = 0.01


class Layer(experts_toy.Layer):
    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        super().__init__(config, weights, shard)
        self.bias = Buffer(jnp.zeros((weights.layers, EXPERTS)), out_sharding=("layers", "experts"))

    def ranked(self, p_BSE: jax.Array) -> jax.Array:
        return p_BSE + self.bias[...]


class Counting(ExpertsDecoder):
    """Embedding and loss scale their results by the number of labels read."""

    def __init__(self, config: DecoderConfig, shard: Shard, rngs: nnx.Rngs) -> None:
        super().__init__(config, shard, rngs)  # pyright: ignore[reportArgumentType]
        self.seen = Buffer(jnp.zeros((2,)), out_sharding=("embed",))

    def prepare(self, batch: Batch) -> jax.Array:
        return super().prepare(batch) * self._scale

    def embed(self, batch: Batch, dropout: Dropout | None) -> jax.Array:
        return super().embed(batch, dropout) * self._scale

    def loss(self, x_BSD: jax.Array, batch: Batch, dropout: Dropout | None) -> Sums:
        return super().loss(x_BSD * self._scale, batch, dropout)

    @property
    def _scale(self) -> jax.Array:
        return 1 + 1e-4 * self.seen[...].mean()


@dataclasses.dataclass(frozen=True)
class BalancedConfig(ExpertsConfig):
    def make(self, shard: Shard, rngs: nnx.Rngs) -> nnx.Module:
        return Counting(self, shard, rngs)

    def updated(
        self, buffers: dict[str, jax.Array], sums: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        load_LE = sums["moe/load"]
        more = RATE * jnp.sign(load_LE.mean(-1, keepdims=True) - load_LE)
        return {"moe.bias": buffers["moe.bias"] + more, "seen": buffers["seen"] + sums["weight"]}


_FIELDS: dict[str, Any] = {
    field.name: getattr(experts_toy.MODEL, field.name)
    for field in dataclasses.fields(experts_toy.MODEL)
}
_FIELDS["segments"] = (
    SegmentConfig("dense", 2, "sharing", remat="none"),
    SegmentConfig("moe", 4, "balanced"),
)
MODEL = BalancedConfig(**_FIELDS)
