"""Encodes documents in pieces, which keeps all cores busy and memory bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from mesh_lm.data.tokenizer import Tokenizer

BATCH = 2**22
"""Characters in one batch: the tokenizer needs about 100 bytes of memory per token."""
_PIECE = 2**16
"""Characters in one encoding task: small enough to keep all cores busy to the end."""
_LONG_PIECE = 2**20
"""Characters in one task for vocabularies that put a space at the start of each text, where every
split changes the ids."""


def encode(
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    batch: int = BATCH,
    piece: int = 0,
    report: Callable[[int], None] = lambda n: None,
    lost: Callable[[int], None] = lambda n: None,
) -> Iterator[np.ndarray]:
    """Yields each text's tokens followed by EOD, int32 [length + 1].

    Long texts are split at line ends (or anywhere in very long lines), and the pieces are encoded
    separately.

    Args:
      batch: characters encoded at once, by all cores.
      piece: texts longer than this are split into pieces of up to twice this length. 0: 65,536, or
        2^20 if not `tokenizer.joins`.
      report: called with the number of characters of each finished batch.
      lost: called with the bytes of each piece that its tokens do not spell
        (`Tokenizer.lost_bytes`), if there are any.
    """
    if not piece:
        piece = _PIECE if tokenizer.joins else _LONG_PIECE
    document: list[np.ndarray] = []
    for batch_pieces in _batches(texts, batch, piece):
        encoded = tokenizer.encode_batch([text_piece.text for text_piece in batch_pieces])
        for text_piece, ids in zip(batch_pieces, encoded, strict=True):
            document.append(ids)
            n_lost = tokenizer.lost_bytes(text_piece.text, ids)
            if n_lost:
                lost(n_lost)
            if text_piece.is_last:
                yield np.concatenate([*document, np.array([tokenizer.eod], np.int32)])
                document = []
        report(sum(len(text_piece.text) for text_piece in batch_pieces))


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """Splits a text at line ends (or anywhere in very long lines) into pieces of `size` to 2 x
    `size` characters.
    """
    start = 0
    while start < len(text):
        end = text.find("\n", start + size, start + 2 * size) + 1 or start + 2 * size
        yield text[start:end]
        start = end


class _Piece(NamedTuple):
    text: str
    is_last: bool
    """Whether its document ends with it."""


def _batches(texts: Iterable[str], batch: int, piece: int) -> Iterator[list[_Piece]]:
    """Yields the pieces of all texts in lists of about `batch` characters."""
    batch_pieces: list[_Piece] = []
    size = 0
    for text in texts:
        text_pieces = list(pieces(text, piece))
        for number, part in enumerate(text_pieces, 1):
            batch_pieces.append(_Piece(part, number == len(text_pieces)))
            size += len(part)
            if size >= batch:
                yield batch_pieces
                batch_pieces = []
                size = 0
    if batch_pieces:
        yield batch_pieces
