"""Byte-level BPE (Radford et al. 2019, GPT-2), trained on the corpus itself. The only file that imports `tokenizers`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mesh_lm.config import ConfigError
from mesh_lm.data.atomic import atomic_write

EOD = "<|endoftext|>"
MIN_VOCAB = 257
"""256 bytes and the end-of-document token: with these, every text has an encoding."""


class Tokenizer:
    """Text to token ids and back; `decode(encode(text)) == text` for every text.

    Attributes:
      vocab_size: ids are 0 to vocab_size - 1. May be below what was asked of `train` when the text has too few repeated pairs.
      eod: id of the end-of-document token. No text encodes to it, not even its own spelling.
    """

    vocab_size: int
    eod: int

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        # A document that spells <|endoftext|> must not end there. The flag is not part of tokenizer.json.
        tokenizer.encode_special_tokens = True
        eod = tokenizer.token_to_id(EOD)
        if eod is None:
            raise ConfigError(f"the tokenizer has no {EOD} token; use one that mesh_lm trained")
        self.vocab_size, self.eod = tokenizer.get_vocab_size(), eod

    @classmethod
    def train(cls, texts: Iterable[str], vocab: int) -> Tokenizer:
        """Learns at most `vocab` entries from the texts. The same texts give the same tokenizer, on any number of cores.

        Raises:
          ConfigError: vocab < 257.
        """
        if vocab < MIN_VOCAB:
            raise ConfigError(
                f"data.tokenizer_vocab={vocab} is too small; a byte-level vocabulary has at least {MIN_VOCAB}: 256 bytes and {EOD}"
            )
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[EOD], initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Reads a tokenizer.json. Raises ConfigError, with the path, where it is missing or damaged."""
        try:
            return cls(tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except Exception as error:  # `tokenizers` raises bare Exception
            raise ConfigError(f"cannot load the tokenizer {path}: {error}") from error

    def save(self, path: Path) -> None:
        """Writes tokenizer.json (readable by Hugging Face's libraries) atomically."""
        with atomic_write(path) as (file,):
            file.write(self._tokenizer.to_str().encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32 [its tokens]; all cores work on the batch."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)  # fast: no character offsets
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, EOD spelled out; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
