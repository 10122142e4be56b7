"""What the trainer asks of data: `Dataset`. Text, Megatron prefixes and arrays of token ids are behind it, and so is data of one's own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mesh_lm.config import TrainConfig
from mesh_lm.data.indexed import InMemory, TokenStream
from mesh_lm.data.rows import ConcatOrder, SampleOrder
from mesh_lm.data.sequences import Sequences
from mesh_lm.data.tokenizer import Tokenizer
from mesh_lm.errors import ConfigError

_SAMPLED = 2**20
_HELD_OUT = 20
"""One token in so many is held out of an array, at its end."""


class Dataset(Protocol):
    """Training and held-out sequences, each by its position. Derive from it: what has a value here may be left out."""

    name: str
    """Identifies the data and its order. Checkpoints hold a position in it, which is only valid under the same name."""
    train_tokens: int
    """Tokens of one epoch."""
    heldout_tokens: int
    eod: int | None = None
    """Id of the end-of-document token; None: unknown, and then documents cannot be separated."""
    fingerprint: str | None = None
    """Of the tokenizer that made the ids, where it is known: equal fingerprints mean equal ids."""
    train_bytes: int | None = None
    """UTF-8 bytes of the training text; None: unknown, and then losses are not given per byte."""
    heldout_bytes: int | None = None
    gzip_bits_per_byte: float | None = None
    """What gzip -9 and xz -9 make of the held-out text, to compare the model with."""
    xz_bits_per_byte: float | None = None

    def tokenizer(self) -> Tokenizer | None:
        """What turns the ids into text, for the sample at the end and for `mesh_lm.load`; None: neither is possible without one."""
        return None

    def training_order(self, config: TrainConfig, saved: dict[str, Any] | None, last: int) -> SampleOrder:
        """Sequences of config.model.seq_len by global sample position, epoch after epoch.

        saved: what `state` gave a checkpoint of this run, with its "position"; None: a new run. last: the position at which it will end.
        """
        ...

    def heldout_order(self, config: TrainConfig) -> SampleOrder:
        """The held-out sequences, always in the same order."""
        ...

    def state(self, order: SampleOrder, position: int) -> dict[str, Any]:
        """JSON that a checkpoint is to hold beside the position, for `training_order`."""
        return {}

    def changed(self, order: SampleOrder) -> list[str]:
        """How the data differs from that of the checkpoint from which training goes on, in words."""
        return []


def padded_order(texts: Sequence[TokenStream], config: TrainConfig, eod: int | None) -> SampleOrder:
    """All tokens of the texts as held-out sequences, in stored order; the last sequence of each text is padded."""
    return ConcatOrder([Sequences(text, config.model.seq_len, eod=eod, seed=None, pad=True) for text in texts if len(text.tokens)])


class TokenArray(Dataset):
    """Token ids that are in memory, or in a memory map: one stream, of which each epoch has its own order of sequences."""

    def __init__(
        self, tokens: Sequence[int] | np.ndarray, heldout: Sequence[int] | np.ndarray | None = None, *, eod: int | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:  # fmt: skip
        """Args:
          tokens: ids [n] to train on, integers of any type; not copied where they are an array.
          heldout: ids to evaluate on; None: the last twentieth of `tokens`, which are then not trained on.
          eod: the id that ends each document; None: the tokenizer's, or unknown.

        Raises:
          ConfigError: not a sequence of integers, or none.
        """
        ids = _ids(tokens)
        cut = len(ids) - len(ids) // _HELD_OUT
        self._train, self._heldout = (ids[:cut], ids[cut:]) if heldout is None else (ids, _ids(heldout))
        if not len(self._heldout):
            raise ConfigError(f"data: {len(ids)} token ids are too few to hold out one in {_HELD_OUT}; give more, or heldout")
        self.train_tokens, self.heldout_tokens = len(self._train), len(self._heldout)
        self._tokenizer = tokenizer
        self.eod, self.fingerprint = (eod, None) if tokenizer is None else (tokenizer.eod if eod is None else eod, tokenizer.fingerprint)
        digest = hashlib.sha256(f"{self.train_tokens} {self.heldout_tokens} {self.eod}".encode())
        for part in (self._train, self._heldout):
            for end in (part[:_SAMPLED], part[-_SAMPLED:]):
                digest.update(end.astype("<i8").tobytes())
        self.name = f"tokens-{digest.hexdigest()[:16]}"

    def tokenizer(self) -> Tokenizer | None:
        return self._tokenizer

    def training_order(self, config: TrainConfig, saved: dict[str, Any] | None, last: int) -> SampleOrder:
        if config.data.documents == "packed":
            raise ConfigError("data.documents=packed: an array of token ids is one stream; write documents with `mesh-lm prepare`")
        return Sequences(self._stream(self._train, config), config.model.seq_len, eod=self.eod, seed=config.seed)

    def heldout_order(self, config: TrainConfig) -> SampleOrder:
        return padded_order([self._stream(self._heldout, config)], config, self.eod)

    def _stream(self, ids: np.ndarray, config: TrainConfig) -> TokenStream:
        return TokenStream(InMemory(ids), vocab=config.model.vocab_size)


def dataset_of(data: Dataset | Sequence[int] | np.ndarray) -> Dataset:
    """A dataset as it is, and token ids as a `TokenArray`. Raises ConfigError for anything else."""
    lacks = [name for name in ("name", "train_tokens", "heldout_tokens", "training_order", "heldout_order") if not hasattr(data, name)]
    return data if not lacks else TokenArray(data)  # pyright: ignore[reportReturnType, reportArgumentType]


def _ids(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    try:
        ids = np.asarray(tokens)
    except ValueError:
        ids = np.empty((0, 0))
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        found = f"{ids.dtype} {list(ids.shape)}" if ids.size else type(tokens).__name__
        raise ConfigError(f"data: expected token ids, integers [n], or a mesh_lm.data.Dataset, not {found}")
    return ids
