"""A tokenizer without a vocabulary: the 256 bytes of UTF-8 text, and an end-of-document token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mesh_lm.data.atomic import write_files
from mesh_lm.data.tokenizer.base import EOD, MIN_VOCAB, Tokenizer, fingerprint
from mesh_lm.data.tokenizer.companions import Companions

FILE = "tokenizer.bytes"
"""A marker file in a directory, because this tokenizer has nothing to store."""


class Bytes(Tokenizer):
    """Id i < 256 is byte i; 256 is EOD."""

    is_lossless = True
    kind = "plain bytes"

    def __init__(self, companions: Companions = Companions()) -> None:
        self.companions = companions
        self.vocab_size = MIN_VOCAB
        self.eod = 256
        self.special_ids = frozenset([self.eod])
        self.fingerprint = fingerprint("bytes", b"", self.eod)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Implements `Tokenizer.encode_batch`."""
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def special(self, name: str) -> int | None:
        """Implements `Tokenizer.special`."""
        return self.eod if name == EOD else None

    def save(self, directory: Path) -> Path:
        """Implements `Tokenizer.save`."""
        marker = f"ids 0 to 255 are bytes, {self.eod} is {EOD}\n"
        write_files(directory, {**self.companions.generation_file(), FILE: marker.encode()})
        return directory / FILE

    def _spell(self) -> list[bytes]:
        return [*(bytes([i]) for i in range(256)), EOD.encode()]
