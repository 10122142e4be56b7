"""The decoder: embed -> n_layers blocks, scanned -> norm -> head. Sizes: B batch, S sequence, D embed, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mesh_lm.loss import cross_entropy, label_scores
from mesh_lm.model.cache import Cache, Past, empty
from mesh_lm.model.config import DecoderConfig
from mesh_lm.model.contract import Batch, Sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.model.embedding import add_positions, lookup
from mesh_lm.model.layers import Attention, Mlp, Norm, Weights, rope_table
from sharding_rules import Shard

SAVED_NAMES = ("q", "k", "v", "attention_out", "attention_lse", "mid_residual", "mlp_up")
"""What remat=save_names keeps of a block, and remat=offload moves to the host: results of matmuls and of the attention kernel, all that is
dear to compute again; norms and the nonlinearity are not kept."""


class Block(nnx.Module):
    """Pre-norm attention and MLP. Its parameters carry a leading "layers" dimension; the scan hands it one slice."""

    def __init__(self, config: DecoderConfig, weights: Weights, shard: Shard) -> None:
        self.shard, self.rate = shard, config.dropout
        self.attention_norm, self.attention = Norm(config, weights), Attention(config, weights, shard)
        self.mlp_norm, self.mlp = Norm(config, weights), Mlp(config, weights, shard)

    def __call__(
        self, x_BSD: jax.Array, rope: jax.Array | None, segment_ids: jax.Array | None, window: int | None,
        dropout: Dropout | None, past: Past | None = None,
    ) -> tuple[jax.Array, Past | None]:  # fmt: skip
        with jax.named_scope("attention"):
            y_BSD, past = self.attention(self._enter(self.attention_norm(x_BSD)), rope, segment_ids, window, past)
            x_BSD = checkpoint_name(self._add(x_BSD, y_BSD, dropout, 0), "mid_residual")
        with jax.named_scope("mlp"):
            return self._add(x_BSD, self.mlp(self._enter(self.mlp_norm(x_BSD))), dropout, 1), past

    def _enter(self, x_BSD: jax.Array) -> jax.Array:
        return self.shard(x_BSD, "batch", "seq", "embed")

    def _add(self, x_BSD: jax.Array, y_BSD: jax.Array, dropout: Dropout | None, site: int) -> jax.Array:
        y_BSD = self.shard(y_BSD, "batch", "seq_resid", "embed")
        return x_BSD + (dropout.fold(site)(y_BSD, self.rate) if dropout and self.rate else y_BSD)


class Decoder(nnx.Module):
    """GPT or Llama by its config; fulfils `mesh_lm.model.Model`, `Staged` and `Generative`."""

    def __init__(self, config: DecoderConfig, shard: Shard, rngs: nnx.Rngs) -> None:
        self.config, self.shard = config, shard
        weights = Weights(config, rngs)
        self.embedding = weights((config.padded_vocab, config.d_model), ("vocab", "embed"))
        if config.positions == "learned":
            self.positions = weights((config.seq_len, config.d_model), ("position", "embed"))
        self.blocks = Block(config, Weights(config, rngs, layers=config.n_layers), shard)
        self.norm = Norm(config, weights)
        if not config.tied:
            self.head = weights((config.padded_vocab, config.d_model), ("vocab", "embed"))

    def __call__(self, batch: Batch, dropout: Dropout | None) -> Sums:
        return self.loss(self.stage(self.embed(batch, dropout), batch, dropout)[0], batch, dropout)

    def loss(self, x_BSD: jax.Array, batch: Batch, dropout: Dropout | None) -> Sums:
        """From the output of the last block to the loss."""
        c, x_BSD = self.config, self._normed(x_BSD)
        with jax.named_scope("loss"):
            return cross_entropy(
                x_BSD, self._head(), batch["labels"], batch["weights"], self.shard,
                vocab_size=c.vocab_size, chunk=c.loss_chunk, softcap=c.head_softcap, z_loss=c.z_loss,
            )  # fmt: skip

    def logits(self, batch: Batch) -> jax.Array:
        """float32 [B, S, V] without the padding, whole in memory: for short texts."""
        return self._logits(self.hidden(batch, None))

    def scores(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Of each label: its log-probability, float32 [B, S], and whether it is the likeliest token, bool [B, S]."""
        c = self.config
        x_BSD, head_VD = self.hidden(batch, None), self._head()
        return label_scores(
            x_BSD, head_VD, batch["labels"], self.shard, vocab_size=c.vocab_size, chunk=c.loss_chunk, softcap=c.head_softcap
        )

    def empty_cache(self, rows: int, length: int) -> Cache:
        """For `rows` texts of at most `length` tokens, padding included."""
        return empty(self.config, self.shard, rows, length)

    def extend(self, batch: Batch, cache: Cache, start: int | jax.Array) -> tuple[jax.Array, Cache]:
        """Reads tokens into the slots from `start` on; returns the logits after the last of them, float32 [B, V], and the cache."""
        seen = lax.dynamic_update_slice_in_dim(cache["segment_ids"], batch["segment_ids"], start, axis=1)
        x_BSD, cache = self._hidden(batch, None, cache | {"segment_ids": seen}, start)
        return self._logits(x_BSD[:, -1:])[:, 0], cache

    def hidden(self, batch: Batch, dropout: Dropout | None) -> jax.Array:
        """Activations [B, S, D] after the last norm, cut like the residual stream."""
        return self._hidden(batch, dropout, None, 0)[0]

    def _hidden(self, batch: Batch, dropout: Dropout | None, cache: Any, start: int | jax.Array) -> tuple[jax.Array, Any]:
        x_BSD, cache = self._layers(self.embed(batch, dropout), batch, dropout, cache=cache, start=start)
        return self._normed(x_BSD), cache

    @jax.named_scope("norm")
    def _normed(self, x_BSD: jax.Array) -> jax.Array:
        return self.shard(self.norm(x_BSD), "batch", "seq_resid", "embed")

    def _logits(self, x_BSD: jax.Array) -> jax.Array:
        head = self.shard.weight(self._head().astype(self.config.dtype), "vocab", "embed")
        z = jnp.einsum("bsd,vd->bsv", x_BSD, head, preferred_element_type=jnp.float32)
        z = self.config.head_softcap * jnp.tanh(z / self.config.head_softcap) if self.config.head_softcap else z
        return self.shard(z, "batch", "seq", "vocab")[..., : self.config.vocab_size]

    @jax.named_scope("embed")
    def embed(self, batch: Batch, dropout: Dropout | None) -> jax.Array:
        """Token and, where learned, position vectors [B, S, D]."""
        c, shard = self.config, self.shard
        x_BSD = lookup(self.embedding[...], batch["tokens"], shard, ("vocab", "embed"), c.dtype)
        if c.positions == "learned":
            axes = ("position", "embed")
            if "positions" in batch:
                x_BSD = x_BSD + lookup(self.positions[...], batch["positions"], shard, axes, c.dtype)
            else:
                x_BSD = add_positions(x_BSD, self.positions[...], shard, axes)
        x_BSD = shard(x_BSD, "batch", "seq_resid", "embed")
        return dropout.fold(c.n_layers)(x_BSD, c.dropout) if dropout and c.dropout else x_BSD

    def stage(
        self, x_BSD: jax.Array, batch: Batch, dropout: Dropout | None, first: int | jax.Array = 0, count: jax.Array | None = None
    ) -> tuple[jax.Array, Sums]:
        """A run of consecutive blocks, the first of which is number `first` of the model; those from number `count` on are padding."""
        return self._layers(x_BSD, batch, dropout, first, count)[0], {}

    @jax.named_scope("layers")
    def _layers(
        self, x_BSD: jax.Array, batch: Batch, dropout: Dropout | None, first: int | jax.Array = 0, count: jax.Array | None = None,
        cache: Cache | None = None, start: int | jax.Array = 0,
    ) -> tuple[jax.Array, Cache | None]:  # fmt: skip
        """As `stage`; one step of the scan is one period of windows.

        Where there is a cache of the whole model, the tokens are read into its slots from `start` on.
        """
        c, windows = self.config, self.config.windows()
        S = batch["tokens"].shape[1]
        rope = rope_table(c, batch.get("positions", jnp.arange(S))) if c.positions == "rotary" else None
        graph, stacked = nnx.split(self.blocks)
        n = jax.tree.leaves(stacked)[0].shape[0]
        single = len(windows) == 1
        periods = stacked if single else jax.tree.map(lambda w: w.reshape(n // len(windows), len(windows), *w.shape[1:]), stacked)

        # The block takes what the scan hands out: were its weights picked from that outside, they would be saved, a copy of the model.
        # So would they be as residuals of a conditional around what remat repeats: the conditional lies inside.
        def block(x: jax.Array, cache: Cache | None, period: Any, place: jax.Array, i: int) -> tuple[jax.Array, Any]:
            weights, window = period if single else jax.tree.map(lambda w: w[i], period), windows[i]
            number = first + place + i
            past, keys = Past(cache, number, start) if cache else None, dropout.fold(number) if dropout else None

            def run(x: jax.Array) -> tuple[jax.Array, Any]:
                y, after = nnx.merge(graph, weights)(x, rope, batch.get("segment_ids"), window, keys, past)
                return y, after and after.cache

            if count is None:
                return run(x)
            return lax.cond(place < count, lambda x: pinned(*run(x)), lambda x: pinned(x, cache), x)

        def period(carry: tuple[jax.Array, Any], scanned: tuple[Any, jax.Array]) -> tuple[tuple[jax.Array, Any], None]:
            (x, cache), (weights, place) = carry, scanned
            for i in range(len(windows)):
                x, cache = remat(c.remat)(partial(block, i=i))(x, cache, weights, place)
            return (x, cache), None

        def pinned(x: jax.Array, cache: Any) -> tuple[jax.Array, Any]:  # branches must agree on it
            return self.shard(x, "batch", "seq_resid", "embed"), cache

        return lax.scan(period, (x_BSD, cache), (periods, jnp.arange(0, n, len(windows))))[0]

    def _head(self) -> jax.Array:
        return self.embedding[...] if self.config.tied else self.head[...]


def remat(policy: str) -> Callable[[Callable], Callable]:
    """What the backward of a block keeps and what it computes again, by name (see DecoderConfig.remat)."""
    policies = jax.checkpoint_policies
    if policy == "none":
        return lambda f: f
    if policy == "full":
        return partial(jax.checkpoint, prevent_cse=False)
    if policy == "save_names":
        named = policies.save_only_these_names(*SAVED_NAMES)

        def keep(primitive: Any, *args: Any, **params: Any) -> bool:
            # cuDNN's residuals have no names of ours.
            return primitive.name.startswith("dot_product_attention_fwd") or named(primitive, *args, **params)

        return partial(jax.checkpoint, prevent_cse=False, policy=keep)
    offload = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=list(SAVED_NAMES), offload_src="device", offload_dst="pinned_host"
    )
    return partial(jax.checkpoint, prevent_cse=False, policy=offload)
