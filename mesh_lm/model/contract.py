"""What the trainer asks of a model. Write a module with these methods, and a layer for each of its segments, and `train.py` trains it.

A model is embed -> segments -> loss. The trainer runs the layers of each segment (`mesh_lm.model.stack`), on one device or in pipeline
stages, and adds up what they and the loss return: a model has no scan of its own, and no sum of it can be lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from mesh_lm.model.dropout import Dropout
from sharding_rules import Shard

Batch = Mapping[str, jax.Array]
"""tokens, labels int32 [B, S]; weights float32 [B, S], the share of each label in the loss; sample_ids uint32 [B]; indices int32 [1, S],
the number of each token in its sequence; and, when documents are kept separate, segment_ids and positions int32 [B, S], which count from
the start of each document. `positions_of` gives the positions either way."""

Sums = dict[str, jax.Array]
"""float32 sums over the labels of the batch. "objective" is differentiated; "loss" is the cross-entropy in nats and "weight" the sum of
weights. The trainer divides all by the weight of the whole global batch, so that unequal label counts per shard and microbatch are exact.
More scalars are reported as metrics, divided the same way. A layer's sums may be arrays, too, such as loads of experts [E]: they are kept
for each layer, "moe/load" [L, E], in what `mesh_lm.parallel.engine.value_and_grad` returns; the step reports scalars only.

A layer that adds to "objective" has an auxiliary loss. It is the same on every mesh and for any number of microbatches where it is a sum
over tokens or sequences, as the others are; one that is a function of several sequences, such as a product of means, depends on what a
microbatch holds."""


def positions_of(batch: Batch) -> jax.Array:
    """The position of each token, int32 [B, S] or, where all sequences have the same, [1, S]."""
    return batch["positions"] if "positions" in batch else batch["indices"]


def token_batch(tokens_BS: jax.Array) -> Batch:
    """What a model needs to read texts that begin in slot 0: int32 [B, S] tokens, and their indices."""
    return {"tokens": tokens_BS, "indices": jnp.arange(tokens_BS.shape[1], dtype=jnp.int32)[None]}


@dataclasses.dataclass(frozen=True)
class Context:
    """What a layer knows beside its input."""

    batch: Batch
    dropout: Dropout | None = None
    """None in evaluation, and for models without it."""
    shared: Any = None
    """What the model's `prepare` returned, the same for all layers."""
    number: int | jax.Array = 0
    """Of the layer in the whole model: what its dropout keys are folded with."""
    place: int = 0
    """Of the layer in the period of its segment."""
    cache: Any = None
    """In generation, what the model remembers of the tokens before; the layer returns it with these tokens in it."""
    start: int | jax.Array = 0
    """The slot of the cache that the first of these tokens takes."""


class Layer(Protocol):
    """A module for one layer of a segment; made once, with parameters that have all layers in front."""

    def __call__(self, x: jax.Array, ctx: Context, /) -> tuple[jax.Array, Any, Sums]:
        """(output, cache, sums). x and the output: [B, S, D], sharded like the residual stream, of one dtype. cache: as in `ctx`."""
        ...


class Model(Protocol):
    """A Flax NNX module whose every `nnx.Param` names its dimensions: `nnx.Param(value, out_sharding=("embed", "mlp"))`.

    A matrix that is cast before it is used says so, `nnx.Param(..., compute_dtype="bfloat16")`: with a distributed optimizer the layers
    then find it in that type, and the fp32 one lives in parts on the replicas.

    Its config's `stack` names its segments. For each the module has a `Layer` in the attribute of that name; parameters outside of these
    are on every pipeline stage, and any layer may use them through `prepare`.
    """

    shard: Shard

    def prepare(self, batch: Batch, /) -> Any:
        """What all layers share, computed once a pass, such as rotary angles; a tree of arrays, or None."""
        ...

    def embed(self, batch: Batch, dropout: Dropout | None, /) -> jax.Array:
        """From tokens to the input of the first layer, [B, S, D], sharded like the residual stream."""
        ...

    def loss(self, x: jax.Array, batch: Batch, dropout: Dropout | None, /) -> Sums:
        """From the output of the last layer to the sums. What predicts more than the next token belongs here, too."""
        ...


class Generative(Protocol):
    """What a model may also offer, so that generating a token does not read the whole text again (`mesh_lm.inference`).

    The texts of a batch end in the same slot: `segment_ids` are 0 for the padding before them, which no other token may see, and 1 for
    the text; `positions` count from its first token. A model without these can offer `logits(batch)`, float32 [B, S, V], instead.
    """

    def empty_cache(self, rows: int, length: int) -> Any:
        """What is remembered of `rows` texts of at most `length` tokens, padding included: arrays, in any tree."""
        ...

    def extend(self, batch: Batch, cache: Any, start: int | jax.Array) -> tuple[jax.Array, Any]:
        """Reads tokens, positions and segment_ids, int32 [B, S], into the slots from `start` on; 0 as an int: the cache is empty.

        Returns the logits after the last token, float32 [B, V], and the new cache, of the old one's shapes.
        """
        ...
