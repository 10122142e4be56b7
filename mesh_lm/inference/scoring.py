"""Log-probabilities of given tokens. Sizes: B sequences, S tokens, V vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from mesh_lm.errors import ConfigError
from mesh_lm.inference.engine import rounded, without_sequence_sharding
from mesh_lm.model import Batch, token_batch
from mesh_lm.parallel.layout import ModelLayout, Params


@dataclasses.dataclass(frozen=True)
class Score:
    """Scores of a sequence of n tokens: of each but the first, given the preceding ones."""

    logprobs: np.ndarray
    """Log-probabilities in nats, float32 [n - 1]."""
    greedy: np.ndarray
    """Whether greedy decoding would choose the token, bool [n - 1]."""


class Scorer:
    """Scores token sequences. Programs are compiled per (rounded) length."""

    def __init__(self, layout: ModelLayout, params: Params, batch: int = 8) -> None:
        """batch: sequences at once, rounded up to a multiple of the batch shards. Raises
        ConfigError for a model without logits.
        """
        model = layout.bind(params)
        if not hasattr(model, "scores") and not hasattr(model, "logits"):
            raise ConfigError(
                f"{type(model).__name__} cannot score text: it has neither scores() nor logits(); "
                "see mesh_lm/model/contract.py"
            )
        self.layout = without_sequence_sharding(layout)
        self.params = params
        shard = self.layout.shard
        n_shards = shard.n_shards(shard.axes_for("batch"))
        self.batch = -(-batch // n_shards) * n_shards
        self._scores = jax.jit(self._traced, out_shardings=jax.NamedSharding(shard.mesh, jax.P()))

    def __call__(self, sequences: Sequence[Sequence[int] | np.ndarray]) -> list[Score]:
        """Returns the scores of sequences of 2 to seq_len + 1 token ids, in the same order. Similar
        lengths are batched together.

        Raises ConfigError for a sequence that is too long or too short, or has an id that the model
        lacks.
        """
        seq_len = self.layout.config.seq_len
        vocab_size = self.layout.config.vocab_size
        for i, tokens in enumerate(sequences):
            if not 2 <= len(tokens) <= seq_len + 1:
                raise ConfigError(
                    f"sequence {i} has {len(tokens)} tokens; the model scores 2 to {seq_len + 1} "
                    "at once (model.seq_len + 1)"
                )
            if min(tokens) < 0 or max(tokens) >= vocab_size:
                raise ConfigError(
                    f"sequence {i} has token ids from {min(tokens)} to {max(tokens)}, and the "
                    f"model has 0 to {vocab_size - 1}: the tokenizer is not the model's"
                )

        scores: dict[int, Score] = {}
        order = sorted(range(len(sequences)), key=lambda i: -len(sequences[i]))
        for first in range(0, len(order), self.batch):
            group = order[first : first + self.batch]
            for i, score in zip(group, self._score([sequences[i] for i in group]), strict=True):
                scores[i] = score
        return [scores[i] for i in range(len(sequences))]

    def _score(self, sequences: list[Sequence[int] | np.ndarray]) -> list[Score]:
        """Scores up to `batch` sequences, of which the first is the longest."""
        S = min(rounded(len(sequences[0]) - 1), self.layout.config.seq_len)
        tokens_BS = np.zeros((self.batch, S), np.int32)
        labels_BS = np.zeros((self.batch, S), np.int32)
        for row, ids in enumerate(sequences):
            n = len(ids) - 1
            tokens_BS[row, :n] = ids[:-1]
            labels_BS[row, :n] = ids[1:]
        outputs = self._scores(self.params, {"tokens": tokens_BS, "labels": labels_BS})
        logprobs_BS, greedy_BS = map(np.asarray, outputs)
        scores = []
        for row, ids in enumerate(sequences):
            n = len(ids) - 1
            scores.append(Score(logprobs_BS[row, :n], greedy_BS[row, :n]))
        return scores

    def _traced(self, params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        model = cast(Any, self.layout.bind(params))
        batch = {**batch, **token_batch(batch["tokens"])}
        if hasattr(model, "scores"):
            return model.scores(batch)
        labels_BS = batch["labels"]
        logits_BSV = model.logits(batch)
        logprobs_BSV = jax.nn.log_softmax(logits_BSV)
        logprobs_BS = jnp.take_along_axis(logprobs_BSV, labels_BS[..., None], axis=-1)[..., 0]
        return logprobs_BS, jnp.argmax(logits_BSV, axis=-1) == labels_BS
