"""The data interface of the trainer, `Dataset`; text, Megatron prefixes, token arrays and custom
data implement it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mesh_lm.config import TrainConfig
from mesh_lm.data.epochs import Sources
from mesh_lm.data.indexed import InMemory, TokenStream
from mesh_lm.data.rows import ConcatOrder, SampleOrder
from mesh_lm.data.sequences import Sequences
from mesh_lm.data.tokenizer import Tokenizer
from mesh_lm.errors import ConfigError

_SAMPLED = 2**20
"""Token ids at each end of an array that its name covers."""
_HELD_OUT = 20
"""1 / this fraction of an array is held out, at its end."""


class Dataset(Protocol):
    """Training and held-out sequences by position.

    Derive from it; members with a value here are optional.
    """

    name: str
    """Identifies the data and its order. A checkpoint's data position is only valid for the same
    name."""
    train_tokens: int
    """Tokens of one epoch."""
    heldout_tokens: int
    """0: nothing is held out, and the run does not evaluate."""
    eod: int | None = None
    """Id of the end-of-document token; None: unknown, so that documents cannot be separated."""
    fingerprint: str | None = None
    """Fingerprint of the tokenizer, if known; equal fingerprints mean equal ids."""
    train_bytes: int | None = None
    """UTF-8 bytes of the training text that its tokens spell; None: unknown, so that losses are not
    reported per byte."""
    heldout_bytes: int | None = None
    gzip_bits_per_byte: float | None = None
    """Bits per byte of gzip -9 and xz -9 on the held-out text, as baselines."""
    xz_bits_per_byte: float | None = None
    loss_of_bytes: str = ""
    """A sentence for the log if the tokenizer does not encode all of the text, or if that is not
    known."""
    why_no_heldout: str = ""
    """For the log if `heldout_tokens` is 0: the reason, and what would change it."""

    def tokenizer(self) -> Tokenizer | None:
        """Returns the tokenizer, for the final sample and `mesh_lm.load`, which need one; or
        None.
        """
        return None

    def sources(self) -> Sources:
        """Returns the texts whose epochs `data.max_epochs` limits, each by itself.

        That is one text, unless samples are drawn by weights.
        """
        return {f"corpus {self.name}": (self.train_tokens, 1.0)}

    def training_order(
        self, config: TrainConfig, saved: dict[str, Any] | None, last: int
    ) -> SampleOrder:
        """Returns sequences of config.model.seq_len by global sample position, across epochs.

        Args:
          saved: the `state` in a checkpoint of this run, with its "position"; None: a new run.
          last: the position at which the run ends.
        """
        ...

    def heldout_order(self, config: TrainConfig) -> SampleOrder:
        """Returns the held-out sequences, always in the same order; not called if `heldout_tokens`
        is 0.
        """
        ...

    def state(self, order: SampleOrder, position: int) -> dict[str, Any]:
        """Returns JSON for a checkpoint, in addition to the position, for `training_order`."""
        return {}

    def changed(self, order: SampleOrder) -> list[str]:
        """Returns messages about how the data differs from that of the resumed checkpoint."""
        return []


def stored_order(texts: Sequence[TokenStream], config: TrainConfig, eod: int | None) -> SampleOrder:
    """Returns the tokens of the texts as held-out sequences, in stored order.

    The last, partial sequence of each text is padded, or left out
    (data.megatron=drop_last_partial). Raises ConfigError if there are no others.
    """
    seq_len = config.model.seq_len
    pad = "drop_last_partial" not in config.data.megatron
    shortest = 1 if pad else seq_len
    long_texts = [text for text in texts if text.n_tokens >= shortest]
    if not long_texts:
        longest = max(text.n_tokens for text in texts)
        raise ConfigError(
            "data.megatron=drop_last_partial leaves no held-out sequence: no text has "
            f"model.seq_len={seq_len} tokens, the longest {longest}; leave it out"
        )
    return ConcatOrder([Sequences(t, seq_len, eod=eod, seed=None, pad=pad) for t in long_texts])


class TokenArray(Dataset):
    """Token ids in memory or in a memory map, as one stream; each epoch permutes its sequences."""

    def __init__(
        self,
        tokens: Sequence[int] | np.ndarray,
        heldout: Sequence[int] | np.ndarray | None = None,
        *,
        eod: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Takes token ids.

        Args:
          tokens: ids [n] to train on, integers of any type; arrays are not copied.
          heldout: ids to evaluate on; None: the last twentieth of `tokens`, which is then not
            trained on. Empty: no evaluation.
          eod: the id that ends each document; None: the tokenizer's, or unknown.

        Raises:
          ConfigError: the ids are not a sequence of integers, or there are none.
        """
        ids = _require_ids(tokens)
        if heldout is None:
            n_train = len(ids) - len(ids) // _HELD_OUT
            self._train = ids[:n_train]
            self._heldout = ids[n_train:]
            if not len(self._heldout):
                raise ConfigError(
                    f"data: {len(ids)} token ids are too few to hold out one in {_HELD_OUT}; give "
                    "more, or heldout"
                )
        else:
            self._train = ids
            self._heldout = _require_ids(heldout) if len(heldout) else ids[:0]
        self.train_tokens = len(self._train)
        self.heldout_tokens = len(self._heldout)

        self._tokenizer = tokenizer
        self.eod = eod
        self.fingerprint = None
        if tokenizer is not None:
            self.fingerprint = tokenizer.fingerprint
            if eod is None:
                self.eod = tokenizer.eod
        digest = hashlib.sha256(f"{self.train_tokens} {self.heldout_tokens} {self.eod}".encode())
        for part in (self._train, self._heldout):
            for end in (part[:_SAMPLED], part[-_SAMPLED:]):
                digest.update(end.astype("<i8").tobytes())
        self.name = f"tokens-{digest.hexdigest()[:16]}"

    def tokenizer(self) -> Tokenizer | None:
        """Implements `Dataset.tokenizer`."""
        return self._tokenizer

    def training_order(
        self, config: TrainConfig, saved: dict[str, Any] | None, last: int
    ) -> SampleOrder:
        """Implements `Dataset.training_order`."""
        if config.data.documents == "packed":
            raise ConfigError(
                "data.documents=packed: an array of token ids is one stream; write documents with "
                "`mesh-lm prepare`"
            )
        stream = self._stream(self._train, config)
        return Sequences(stream, config.model.seq_len, eod=self.eod, seed=config.seed)

    def heldout_order(self, config: TrainConfig) -> SampleOrder:
        """Implements `Dataset.heldout_order`."""
        return stored_order([self._stream(self._heldout, config)], config, self.eod)

    def _stream(self, ids: np.ndarray, config: TrainConfig) -> TokenStream:
        return TokenStream(InMemory(ids), vocab=config.model.vocab_size)


def dataset_of(data: Dataset | Sequence[int] | np.ndarray) -> Dataset:
    """Returns a dataset unchanged, and token ids as a `TokenArray`.

    Raises ConfigError for anything else.
    """
    members = ("name", "train_tokens", "heldout_tokens", "training_order", "heldout_order")
    if all(hasattr(data, name) for name in members):
        return data  # pyright: ignore[reportReturnType]
    return TokenArray(data)  # pyright: ignore[reportArgumentType]


def _require_ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    try:
        ids = np.asarray(tokens)
    except ValueError:
        ids = np.empty((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        form = f"{ids.dtype} {list(ids.shape)}" if ids.size else type(tokens).__name__
        raise ConfigError(
            f"data: expected token ids, integers [n], or a mesh_lm.data.Dataset, not {form}"
        )
    return ids
