"""Documents to token ids, in pieces that keep all cores busy and memory bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from mesh_lm.data.tokenizer import Tokenizer

BATCH = 2**22
"""Characters encoded at once: the tokenizer needs about 100 bytes of memory per token."""
_PIECE = 2**16
"""Characters in one encoding task: small enough to keep all cores busy to the end."""
_WHOLE = 2**20
"""The same where a cut may show in the ids, because the vocabulary puts a space at the start of each text."""


def encode(
    tokenizer: Tokenizer, texts: Iterable[str], *, batch: int = BATCH, piece: int = 0, report: Callable[[int], None] = lambda n: None
) -> Iterator[np.ndarray]:
    """Each text's tokens followed by EOD, int32 [its length + 1].

    Long texts are cut at line ends, or in lines without end anywhere, and their parts encoded by themselves.

    Args:
      batch: characters encoded at once, by all cores.
      piece: texts longer than this are cut, into parts of up to twice as many characters; 0: 65,536, or a million where `tokenizer` does
        not join.
      report: receives the number of characters in each batch that is done.
    """
    document: list[np.ndarray] = []
    piece = piece or (_PIECE if tokenizer.joins else _WHOLE)
    for parts in _batches(texts, batch, piece):
        for ids, (_, is_last) in zip(tokenizer.encode_batch([part for part, _ in parts]), parts, strict=True):
            document.append(ids)
            if is_last:
                yield np.concatenate([*document, np.array([tokenizer.eod], np.int32)])
                document = []
        report(sum(len(part) for part, _ in parts))


def pieces(text: str, size: int = _PIECE) -> Iterator[str]:
    """Cuts the text at line ends, or in lines without end anywhere, into pieces of `size` to twice as many characters."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + size, start + 2 * size) + 1 or start + 2 * size
        yield text[start:end]
        start = end


def _batches(texts: Iterable[str], batch: int, piece: int) -> Iterator[list[tuple[str, bool]]]:
    """(piece, whether it ends its text), in lists of about `batch` characters."""
    parts: list[tuple[str, bool]] = []
    size = 0
    for text in texts:
        cut = list(pieces(text, piece))
        for number, part in enumerate(cut, 1):
            parts.append((part, number == len(cut)))
            size += len(part)
            if size >= batch:
                yield parts
                parts, size = [], 0
    if parts:
        yield parts
