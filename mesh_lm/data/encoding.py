"""Encodes documents in pieces, which keeps all cores busy and memory bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

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
      batch: characters encoded at once, by all cores. piece: texts longer than this are split into
      pieces of up to twice this length. 0: 65,536, or 2^20 if not `tokenizer.joins`. report: called
      with the number of characters of each finished batch. lost: called with the bytes of each
      piece that its tokens do not spell (`Tokenizer.lost_bytes`), if there are any.
    """
    document: list[np.ndarray] = []
    piece = piece or (_PIECE if tokenizer.joins else _LONG_PIECE)
    for parts in _batches(texts, batch, piece):
        for ids, (part, is_last) in zip(
            tokenizer.encode_batch([part for part, _ in parts]), parts, strict=True
        ):
            document.append(ids)
            if n := tokenizer.lost_bytes(part, ids):
                lost(n)
            if is_last:
                yield np.concatenate([*document, np.array([tokenizer.eod], np.int32)])
                document = []
        report(sum(len(part) for part, _ in parts))


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """Splits a text at line ends (or anywhere in very long lines) into pieces of `size` to 2 x
    `size` characters.
    """
    start = 0
    while start < len(text):
        end = text.find("\n", start + size, start + 2 * size) + 1 or start + 2 * size
        yield text[start:end]
        start = end


def _batches(texts: Iterable[str], batch: int, piece: int) -> Iterator[list[tuple[str, bool]]]:
    """Yields lists of about `batch` characters of (piece, whether it is the last of its text)."""
    parts: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        text_pieces = list(pieces(text, piece))
        for number, part in enumerate(text_pieces, 1):
            parts.append((part, number == len(text_pieces)))
            size += len(part)
            if size >= batch:
                yield parts
                parts, size = [], 0
    if parts:
        yield parts
