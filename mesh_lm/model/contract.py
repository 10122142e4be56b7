"""What the trainer asks of a model. Write a module with these two methods and `train.py` trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax

from mesh_lm.model.dropout import Dropout

Batch = Mapping[str, jax.Array]
"""tokens, labels int32 [B, S]; weights float32 [B, S], the share of each label in the loss; sample_ids uint32 [B]; and, when documents
are kept separate, segment_ids and positions int32 [B, S]."""

Sums = dict[str, jax.Array]
"""float32 scalars, each a sum over the labels of the batch. "objective" is differentiated; "loss" is the cross-entropy in nats and
"weight" the sum of weights. The trainer divides all by the weight of the whole global batch, so that unequal label counts per shard and
microbatch are exact. More entries are reported as metrics, divided the same way."""


class Model(Protocol):
    """A Flax NNX module whose every `nnx.Param` names its dimensions: `nnx.Param(value, out_sharding=("embed", "mlp"))`."""

    def __call__(self, batch: Batch, dropout: Dropout | None) -> Sums:
        """Sums over one microbatch. `dropout` is None in evaluation and for models without it."""
        ...

    def logits(self, batch: Batch) -> jax.Array:
        """float32 [B, S, V]. Only for generating and scoring text; a model without it trains all the same."""
        ...


class Staged(Protocol):
    """What a model offers beside, so that a pipeline can cut it into stages (mesh.pipeline > 1).

    Its layers are stacked: parameters whose first logical axis is "layers" belong to them, all others to embedding and head, which every
    stage has. `__call__` is loss(stage(embed)). Layers of another kind in front of the stack are part of `embed`, and what predicts more
    than the next token is part of `loss`. x is [B, S, D], cut like the residual stream.
    """

    def embed(self, batch: Batch, dropout: Dropout | None) -> jax.Array:
        """From tokens to the input of the first stacked layer."""
        ...

    def stage(
        self, x: jax.Array, batch: Batch, dropout: Dropout | None, first: int | jax.Array = 0, count: jax.Array | None = None
    ) -> tuple[jax.Array, Sums]:
        """Through the layers whose weights the module holds. first: the number of the first of them in the model; count: how many of them
        are layers, int32, where the rest is padding; None: all. The sums are those of auxiliary losses, or empty."""
        ...

    def loss(self, x: jax.Array, batch: Batch, dropout: Dropout | None) -> Sums:
        """From the output of the last stacked layer to the sums."""
        ...


class Generative(Protocol):
    """What a model may offer beside, so that generating a token does not read the whole text again (`mesh_lm.generation`).

    The texts of a batch end in the same slot: `segment_ids` are 0 for the padding before them, which no other token may see, and 1 for
    the text; `positions` count from its first token.
    """

    def empty_cache(self, rows: int, length: int) -> Any:
        """What is remembered of `rows` texts of at most `length` tokens, padding included: arrays, in any tree."""
        ...

    def extend(self, batch: Batch, cache: Any, start: int | jax.Array) -> tuple[jax.Array, Any]:
        """Reads tokens, positions and segment_ids, int32 [B, S], into the slots from `start` on; 0 as an int: the cache is empty.

        Returns the logits after the last token, float32 [B, V], and the new cache, of the old one's shapes.
        """
        ...
