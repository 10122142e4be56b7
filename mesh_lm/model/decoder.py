"""The decoder: embed -> segments of layers -> norm -> head. Sizes: B batch, S sequence, D embed, V
vocabulary.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh_lm.model.attention import rope_table
from mesh_lm.model.cache import Cache, empty
from mesh_lm.model.config import DecoderConfig
from mesh_lm.model.contract import Batch, Sums, positions_of
from mesh_lm.model.dropout import Dropout
from mesh_lm.model.embedding import add_positions, lookup
from mesh_lm.model.kinds import kind
from mesh_lm.model.layers import Norm, Weights
from mesh_lm.model.loss import cross_entropy, label_scores
from mesh_lm.parallel.stack import hidden_states
from sharding_rules import TABLES, Shard


class Decoder(nnx.Module):
    """A GPT or Llama, or a model with segments of different layers, by its config. Implements
    `mesh_lm.model.Model` and `Generative`.
    """

    def __init__(self, config: DecoderConfig, shard: Shard, rngs: nnx.Rngs) -> None:
        self.config = config
        self.shard = shard
        weights = Weights(config, rngs)
        table = (config.padded_vocab, config.d_model)
        self.embedding = weights(table, ("vocab", "embed"), cast=True)
        if config.positions == "learned":
            self.positions = weights(
                (config.seq_len, config.d_model), ("position", "embed"), cast=True
            )
        for segment in config.segment_configs():
            segment_config = config.within(segment)
            segment_weights = Weights(segment_config, rngs, layers=segment.n_layers)
            Layer = kind(segment.kind).Layer
            layer = Layer(segment_config, segment_weights, shard.within(segment.name))
            setattr(self, segment.name, layer)
        self.norm = Norm(config, weights)
        if not config.tied:
            self.head = weights(table, ("vocab", "embed"), cast=True)

    def prepare(self, batch: Batch) -> jax.Array | None:
        """Returns rotary angles, float32 [B, S, H/2] or [1, S, H/2]; None for learned positions."""
        if self.config.positions != "rotary":
            return None
        return rope_table(self.config, positions_of(batch))

    def loss(self, x_BSD: jax.Array, batch: Batch, dropout: Dropout | None) -> Sums:
        """Returns the sums of the loss, from the output of the last layer."""
        x_BSD = self._normed(x_BSD)
        with jax.named_scope("loss"):
            return cross_entropy(
                x_BSD,
                self._head(),
                batch["labels"],
                batch["weights"],
                self.shard,
                vocab_size=self.config.vocab_size,
                chunk=self.config.loss_chunk,
                softcap=self.config.head_softcap,
                z_loss=self.config.z_loss,
            )

    def logits(self, batch: Batch) -> jax.Array:
        """Returns logits, float32 [B, S, V], without the padding of the vocabulary. All of them are
        in memory at once: for short texts.
        """
        return self._logits(self.hidden(batch))

    def scores(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Returns each label's log-probability, float32 [B, S], and whether it is the most likely
        token, bool [B, S].
        """
        return label_scores(
            self.hidden(batch),
            self._head(),
            batch["labels"],
            self.shard,
            vocab_size=self.config.vocab_size,
            chunk=self.config.loss_chunk,
            softcap=self.config.head_softcap,
        )

    def empty_cache(self, rows: int, length: int) -> Cache:
        """Returns a cache for `rows` texts of at most `length` tokens, padding included."""
        return empty(self.config, self.shard, rows, length)

    def extend(self, batch: Batch, cache: Cache, start: int | jax.Array) -> tuple[jax.Array, Cache]:
        """Returns the logits after the last token, float32 [B, V], and the cache with these tokens
        in the slots from `start` on.
        """
        segment_ids = lax.dynamic_update_slice_in_dim(
            cache["segment_ids"], batch["segment_ids"], start, axis=1
        )
        x_BSD, cache = self._hidden(batch, cache | {"segment_ids": segment_ids}, start)
        return self._logits(x_BSD[:, -1:])[:, 0], cache

    def hidden(self, batch: Batch) -> jax.Array:
        """Returns activations [B, S, D] after the last norm, sharded like the residual stream."""
        return self._hidden(batch)[0]

    def _hidden(
        self, batch: Batch, cache: Any = None, start: int | jax.Array = 0
    ) -> tuple[jax.Array, Any]:
        """Returns (`hidden`, the cache, if there is one, with these tokens in the slots from
        `start` on).
        """
        x_BSD, cache = hidden_states(self, self.config.stack().segments, batch, cache, start)
        return self._normed(x_BSD), cache

    @jax.named_scope("norm")
    def _normed(self, x_BSD: jax.Array) -> jax.Array:
        return self.shard(self.norm(x_BSD), "batch", "seq_resid", "embed")

    def _logits(self, x_BSD: jax.Array) -> jax.Array:
        head_VD = self._head().astype(self.config.dtype)
        head_VD = self.shard.within(TABLES).weight(head_VD, "vocab", "embed")
        z = jnp.einsum("bsd,vd->bsv", x_BSD, head_VD, preferred_element_type=jnp.float32)
        softcap = self.config.head_softcap
        if softcap:
            z = softcap * jnp.tanh(z / softcap)
        return self.shard(z, "batch", "seq", "vocab")[..., : self.config.vocab_size]

    @jax.named_scope("embed")
    def embed(self, batch: Batch, dropout: Dropout | None) -> jax.Array:
        """Returns token embeddings plus, if positions are learned, position embeddings,
        [B, S, D].
        """
        shard = self.shard
        dtype = self.config.dtype
        x_BSD = lookup(self.embedding[...], batch["tokens"], shard, ("vocab", "embed"), dtype)
        if self.config.positions == "learned":
            axes = ("position", "embed")
            positions = positions_of(batch)
            if len(positions) == len(batch["tokens"]):
                x_BSD = x_BSD + lookup(self.positions[...], positions, shard, axes, dtype)
            else:
                x_BSD = add_positions(x_BSD, self.positions[...], positions, shard, axes)
        x_BSD = shard(x_BSD, "batch", "seq_resid", "embed")
        if dropout and self.config.dropout:
            # The number after the last layer's, which no layer folds in.
            x_BSD = dropout.fold(self.config.n_layers)(x_BSD, self.config.dropout)
        return x_BSD

    def _head(self) -> jax.Array:
        return self.embedding[...] if self.config.tied else self.head[...]
