"""What the trainer asks of a model. Write a module with these two methods and `train.py` trains it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

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
        """float32 [B, S, V]. Only for generating text; a model without it trains all the same."""
        ...
