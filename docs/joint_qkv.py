"""A GPT of 1.3 B parameters with a mistake: the numbers are right, the collectives are not.
docs/lab.md finds it.

mesh-lm plan docs/joint_qkv.py
Sizes: B batch, S sequence, D embed, N heads, H head dim.
"""

from __future__ import annotations

import dataclasses

import jax
from flax import nnx

from mesh_lm.config import TrainConfig
from mesh_lm.configs import gpt_1_3b
from mesh_lm.model import DecoderConfig
from mesh_lm.model.attention import Attention
from mesh_lm.model.decoder import Decoder
from mesh_lm.model.dense import Layer
from mesh_lm.model.layers import Linear, Weights
from sharding_rules import MeshConfig, Shard, preset


class Qkv(nnx.Module):
    """q, k and v [B, S, 3, N, H] from one matrix."""

    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        shape = (config.d_model, 3 * config.n_heads, config.d_head)
        self.linear = Linear("bsd,dnh->bsnh", weights, shape, ("embed", "heads", "head_dim"), shard)

    def __call__(self, x_BSD: jax.Array, tokens: tuple[str, str]) -> jax.Array:
        y = self.linear(x_BSD, tokens)
        return y.reshape(*y.shape[:2], 3, -1, y.shape[-1])


class MyAttention(Attention):
    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        super().__init__(config, weights, shard)
        self.qkv = Qkv(config, weights, shard)  # pyright: ignore[reportAttributeAccessIssue]


class MyLayer(Layer):
    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        super().__init__(config, weights, shard)
        self.attention = MyAttention(config, weights, shard)


@dataclasses.dataclass(frozen=True)
class MyConfig(DecoderConfig):
    def make(self, shard: Shard, rngs: nnx.Rngs) -> nnx.Module:
        model = Decoder(self, shard, rngs)
        layer = MyLayer(self, Weights(self, rngs, layers=self.n_layers), shard.within("blocks"))
        model.blocks = layer  # pyright: ignore[reportAttributeAccessIssue]
        return model


def get_config() -> TrainConfig:
    config = gpt_1_3b.get_config()
    fields = {
        field.name: getattr(config.model, field.name) for field in dataclasses.fields(config.model)
    }
    return dataclasses.replace(
        config,
        model=MyConfig(**fields | {"unroll": False}),
        mesh=MeshConfig(fsdp=2, tensor=8, data=1),
        rules=preset("fsdp+megatron_sp"),
        output="runs/joint_qkv",
    )
