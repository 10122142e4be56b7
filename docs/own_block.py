"""A layer of your own in a decoder that is otherwise mesh_lm's: attention and MLP read the same
input, as in GPT-J and PaLM.

mesh-lm train docs/own_block.py --train.steps=100

Whatever sharding rules, mesh, remat and checkpoints do for the built-in layer, they do for this
one. Its two outputs are added before they are constrained, so that with tensor parallelism one
all-reduce serves both, where the built-in layer needs two (without biases). A checkpoint names the
class, and `mesh-lm generate` finds it again by that name. Sizes: B batch, S sequence, D embed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
from flax import nnx

from mesh_lm.config import TrainConfig
from mesh_lm.configs import gpt_tiny
from mesh_lm.model import Context, DecoderConfig, Sums, dense
from mesh_lm.model.attention import Attention
from mesh_lm.model.cache import Past
from mesh_lm.model.layers import Norm, Weights
from mesh_lm.model.mlp import Mlp
from sharding_rules import Shard


class ParallelLayer(nnx.Module):
    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        self.shard, self.windows, self.norm = shard, config.windows(), Norm(config, weights)
        self.attention, self.mlp = Attention(config, weights, shard), Mlp(config, weights, shard)

    def __call__(self, x_BSD: jax.Array, ctx: Context) -> tuple[jax.Array, Any, Sums]:
        h_BSD, past = self.shard(self.norm(x_BSD), "batch", "seq", "embed"), Past.of(ctx)
        y_BSD, past = self.attention(
            h_BSD, ctx.shared, ctx.batch.get("segment_ids"), self.windows[ctx.place], past
        )
        y_BSD = (y_BSD + self.mlp(h_BSD)).astype(x_BSD.dtype)
        return x_BSD + self.shard(y_BSD, "batch", "seq_resid", "embed"), past and past.cache, {}

    @staticmethod
    def n_params(config: DecoderConfig) -> int:
        return dense.n_params(config) - config.d_model  # one norm, not two


def get_config() -> TrainConfig:
    config = gpt_tiny.get_config()
    model = dataclasses.replace(
        cast(DecoderConfig, config.model), block=f"{__name__}:ParallelLayer"
    )
    return dataclasses.replace(config, model=model, output="runs/own_block")
