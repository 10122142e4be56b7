"""SentencePiece models (Kudo and Richardson 2018, arXiv 1808.06226), as in Llama 2, Mistral and T5.
Imports sentencepiece.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mesh_lm.data.atomic import write_files
from mesh_lm.data.tokenizer.base import Tokenizer, fingerprint
from mesh_lm.data.tokenizer.companions import Companions
from mesh_lm.errors import ConfigError

FILE = "tokenizer.model"
_SPACE = "\u2581"  # how pieces spell a space


class SentencePiece(Tokenizer):
    """A SentencePiece tokenizer. The EOD is its end-of-sentence piece.

    A model may normalise text (NFKC, spaces) and lack characters, so decode(encode(text)) can
    differ from the text.

    Raises:
      ConfigError: the model is damaged or has no end-of-sentence piece, or sentencepiece is not
        installed.
    """

    joins = False
    library = "sentencepiece"
    is_in_transformers = True
    kind = "a SentencePiece model"

    def __init__(self, data: bytes, path: Path, companions: Companions = Companions()) -> None:
        """data: contents of the model file. path: the file, for messages."""
        self.companions = companions
        self._data = data
        self._model = _load(data, path)
        self.vocab_size = self._model.get_piece_size()
        self.eod = self._model.eos_id()
        if self.eod < 0:
            raise ConfigError(
                f"{path} has no end-of-sentence piece to end documents with; train it with one "
                "(eos_id >= 0)"
            )
        self.fingerprint = fingerprint("sentencepiece", data, self.eod)
        self.unknown = self._model.unk_id()
        self.special_ids = frozenset(i for i in range(self.vocab_size) if self._model.is_control(i))
        self._leading_space = self._model.encode("a", out_type=str)[0].startswith(_SPACE)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Implements `Tokenizer.encode_batch`."""
        n_threads = 1 if len(texts) == 1 else -1  # -1: one per core
        encodings = self._model.encode(list(texts), out_type=int, num_threads=n_threads)
        return [np.array(ids, np.int32) for ids in encodings]

    def special(self, name: str) -> int | None:
        """Implements `Tokenizer.special`."""
        token_id = self._model.piece_to_id(name)
        # user-defined pieces are text; an unknown name gives the id of <unk>
        return token_id if self._model.is_control(token_id) else None

    def save(self, directory: Path) -> Path:
        """Implements `Tokenizer.save`."""
        eos_token = self._model.id_to_piece(self.eod)
        write_files(directory, {**self.companions.files(eos_token), FILE: self._data})
        return directory / FILE

    def _spell(self) -> list[bytes]:
        return [self._spelling(i) for i in range(self.vocab_size)]

    def _spelling(self, token_id: int) -> bytes:
        piece = self._model.id_to_piece(token_id)
        if self._model.is_byte(token_id):  # <0x0A>
            return bytes([int(piece[3:5], 16)])
        if self._model.is_unknown(token_id):
            return self._model.decode([token_id]).encode()
        if self._model.is_control(token_id):
            return piece.encode()
        return piece.replace(_SPACE, " ").encode()


def _load(data: bytes, path: Path) -> Any:
    try:
        import sentencepiece
    except ImportError as error:
        raise ConfigError(f"{path} needs sentencepiece: pip install -e '.[data]'") from error
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=data)
    except RuntimeError as error:
        raise ConfigError(
            f"{path} is neither a SentencePiece model nor a tiktoken rank file: "
            f"{str(error).strip()}; fetch it again"
        ) from error
