"""The layer of a dense transformer: pre-norm attention, then an MLP. Sizes: B batch, S sequence, D
embed.

Activations are [B, S, ...] or, where the residual stream's sequence is sharded, [S, B, ...]
(`Context.tokens`); T stands for both.
"""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mesh_lm.model.attention import Attention
from mesh_lm.model.cache import Past
from mesh_lm.model.config import DecoderConfig
from mesh_lm.model.contract import Context, Sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.model.layers import Norm, Weights
from mesh_lm.model.mlp import Mlp
from sharding_rules import Shard


class DenseLayer(nnx.Module):
    """Attention and MLP, each after a norm and added to the residual stream; implements
    `mesh_lm.model.Layer`.
    """

    sequence_first = True

    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        self.shard = shard
        self.rate = config.dropout
        self.windows = config.windows()
        self.attention_norm = Norm(config, weights)
        self.attention = Attention(config, weights, shard)
        self.mlp_norm = Norm(config, weights)
        self.make_mlp(config, weights, shard)

    def make_mlp(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        """Makes the parameters of the second block."""
        self.mlp = Mlp(config, weights, shard)

    def apply_mlp(self, x_TD: jax.Array, ctx: Context) -> tuple[jax.Array, Sums]:
        """Returns the output of the second block, whose input is normalised, and its sums."""
        return self.mlp(self._enter(x_TD, ctx), ctx.tokens), {}

    def __call__(self, x_TD: jax.Array, ctx: Context) -> tuple[jax.Array, Any, Sums]:
        """Returns the residual stream [T, D] after this layer, the layer's cache (None in
        training), and the sums of the second block.
        """
        dropout = ctx.dropout.fold(ctx.number) if ctx.dropout else None
        past = Past.of(ctx)
        with jax.named_scope("attention"):
            h_TD = self._enter(self.attention_norm(x_TD), ctx)
            segment_ids = ctx.batch.get("segment_ids")
            window = self.windows[ctx.place]
            y_TD, past = self.attention(h_TD, ctx.shared, segment_ids, window, past, ctx.tokens)
            # remat=save_names and save_attention save the stream between the blocks.
            x_TD = checkpoint_name(self._add(x_TD, y_TD, dropout, 0, ctx), "mid_residual")
        with jax.named_scope("mlp"):
            y_TD, sums = self.apply_mlp(self.mlp_norm(x_TD), ctx)
            x_TD = self._add(x_TD, y_TD, dropout, 1, ctx)
            return x_TD, past and past.cache, sums

    def _enter(self, x_TD: jax.Array, ctx: Context) -> jax.Array:
        """Returns a block's input, whose sequence is gathered where the rules shard that of the
        residual stream.
        """
        return self.shard(x_TD, *ctx.tokens, "embed")

    def _add(
        self, x_TD: jax.Array, y_TD: jax.Array, dropout: Dropout | None, site: int, ctx: Context
    ) -> jax.Array:
        """Returns the residual stream plus a block's output, after dropout."""
        y_TD = self.shard(y_TD.astype(x_TD.dtype), *ctx.residual)
        if dropout and self.rate:
            y_TD = dropout.fold(site)(y_TD, self.rate, ctx.tokens.index("batch"))
        return x_TD + y_TD


Layer = DenseLayer
"""The name that `mesh_lm.model.kinds.Kind` asks of this module."""


def n_params(config: DecoderConfig) -> int:
    """Returns the number of parameters of one layer."""
    d = config.d_model
    h = config.d_head
    vectors_in_norm = 2 if config.norm == "layernorm" and config.biases else 1
    total = _matmul_weights(config)
    total += vectors_in_norm * (2 * d + 2 * h * config.qk_norm)
    total += config.n_heads * config.sinks
    if config.biases:
        attention = h * (config.n_heads + 2 * config.kv_heads) + d
        mlp = config.d_mlp * (2 if config.activation == "swiglu" else 1) + d
        total += attention + mlp
    return total


def flops_per_token(config: DecoderConfig) -> float:
    """Returns the FLOPs of one token in one layer, as `DecoderConfig.flops_per_token` counts them:
    the mean over a period of windows.
    """
    return 6 * _matmul_weights(config) + attention_flops_per_token(config)


def attention_flops_per_token(config: DecoderConfig) -> float:
    """Returns attention's share of `flops_per_token`: scores and values of the keys that a query
    sees on average.
    """
    S = config.seq_len
    windows = [min(window or S, S) for window in config.windows()]
    visible_keys = sum(w - w * (w - 1) / (2 * S) for w in windows) / len(windows)
    return 12 * config.n_heads * config.d_head * visible_keys


def _matmul_weights(config: DecoderConfig) -> int:
    attention = config.d_model * config.d_head * (2 * config.n_heads + 2 * config.kv_heads)
    mlp_matrices = 3 if config.activation == "swiglu" else 2
    return attention + config.d_model * config.d_mlp * mlp_matrices
