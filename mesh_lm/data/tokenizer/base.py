"""What every tokenizer offers, and the way back from ids to text, which is one for all: each id spells some bytes."""

from __future__ import annotations

import codecs
import functools
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

EOD = "<|endoftext|>"
"""The spelling of the end-of-document token where it is ours to choose."""
MIN_VOCAB = 257
"""256 bytes and the end-of-document token: with these, every text has an encoding."""
_UNKNOWN = "\ufffd".encode()


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
      vocab_size: ids are 0 to vocab_size - 1; not every id in that range needs to be in use.
      eod: id of the end-of-document token. No text encodes to it, not even its own spelling.
      fingerprint: SHA-256 (hex) of what the ids mean: the vocabulary, its rules and the EOD. Equal fingerprints give equal ids, wherever
        and under whatever name the files are.
      joins: whether decode(a + b) == decode(a) + decode(b) for encodings a and b of two texts, so that a long text can be encoded in
        pieces. True of byte-level vocabularies; others may put a space at the start of each piece.
      library: the package that does the work, whose version the ids may depend on; "" for none.
    """

    vocab_size: int
    eod: int
    fingerprint: str
    joins: bool = True
    library: str = ""

    @staticmethod
    def train(texts: Iterable[str], vocab: int) -> Tokenizer:
        """A byte-level BPE (Radford et al. 2019, GPT-2) of at most `vocab` entries, learnt from the texts; see `hugging_face.train`.

        Raises:
          ConfigError: vocab < 257.
        """
        from mesh_lm.data.tokenizer import hugging_face

        return hugging_face.train(texts, vocab)

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32 [its tokens]; all cores work on the batch.

        No special token is added, and none comes out: a text that spells one is text.
        """

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids, special tokens spelled out.

        Bytes that are not UTF-8 become U+FFFD, and so does an id that the vocabulary lacks: a model may be padded beyond it.
        """
        stream = self.stream()
        return stream.push(*ids) + stream.flush()

    def stream(self) -> DecodeStream:
        """For text that is shown while it is made. To continue a text, push its ids first."""
        return DecodeStream(self._spellings, self._leading_space)

    @abstractmethod
    def special(self, name: str) -> int | None:
        """The id of the special token spelled `name`, such as <|fim_prefix|>, or None where there is no such special token."""

    @abstractmethod
    def save(self, directory: Path) -> Path:
        """Writes, atomically, what `load_tokenizer` needs to make an equal one from the directory; returns the file that it can also be
        given. The directory must exist."""

    @abstractmethod
    def _spell(self) -> list[bytes]:
        """The bytes of each id, [vocab_size]."""

    _leading_space: bool = False
    """Whether encoding puts a space before the text, for decoding to take away."""

    @functools.cached_property
    def _spellings(self) -> list[bytes]:
        return self._spell()


class DecodeStream:
    """Decodes ids as they come: what `push` and `flush` return, joined, is `decode` of all ids, and no call returns half a character."""

    def __init__(self, spellings: list[bytes], leading_space: bool) -> None:
        self._spellings, self._drop_space = spellings, leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *ids: int) -> str:
        """The text that these ids complete; "" while a character is under way."""
        n = len(self._spellings)
        return self._text(b"".join(self._spellings[i] if 0 <= i < n else _UNKNOWN for i in map(int, ids)))

    def flush(self) -> str:
        """The end: an unfinished character as U+FFFD. The stream can then be used anew."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if text and self._drop_space:
            text, self._drop_space = text.removeprefix(" "), False
        return text


def fingerprint(kind: str, meaning: bytes, eod: int) -> str:
    return hashlib.sha256(f"{kind}\0{eod}\0".encode() + meaning).hexdigest()
