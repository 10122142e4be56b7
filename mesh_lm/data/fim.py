"""Fill-in-the-middle (Bavarian et al., arXiv 2207.14255): a document is split in three parts, and
the middle one moves to the end.

The details follow `GPTFIMDataset` of Megatron-LM. Documents are split between characters, not
tokens, so that a model learns to continue from the middle of a word; each part is encoded
separately. A window keeps its length: it is truncated or padded. Two choices are ours: empty
documents are left alone, and the random draws depend only on the seed and the position, so that any
process makes the same rows.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from mesh_lm.errors import ConfigError

_SPELLINGS = ("<|fim_{}|>", "<fim_{}>", "<fim-{}>")
_PARTS = ("prefix", "middle", "suffix")


class Codec(Protocol):
    """The tokenizer interface that fill-in-the-middle needs."""

    eod: int
    joins: bool
    """Whether a text that was encoded in parts decodes to the same text."""

    def decode(self, ids: np.ndarray) -> str:
        """Returns the text of the ids."""
        ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Returns the ids of each text."""
        ...

    def special(self, name: str) -> int | None:
        """Returns the id of a special token, or None."""
        ...


class FillInMiddle:
    """Rearranges a fraction `rate` of a window's documents to prefix-suffix-middle, a fraction
    `spm_rate` of those to suffix-prefix-middle.

    Raises:
      ConfigError: there is no tokenizer, it puts spaces before the parts of a text, or it lacks the
        three special tokens (<|fim_prefix|>, <fim_prefix> or <fim-prefix>, and so on).
    """

    def __init__(self, tokenizer: Codec | None, *, rate: float, spm_rate: float, seed: int) -> None:
        if tokenizer is None:
            raise ConfigError(
                f"data.fim_rate={rate} splits documents between characters, which needs "
                "data.tokenizer; set it, or data.fim_rate=0"
            )
        if not tokenizer.joins:
            raise ConfigError(
                f"data.fim_rate={rate}: the tokenizer puts a space before each part of a split "
                "document, which the model would learn; use a byte-level one, or data.fim_rate=0"
            )
        for spelling in _SPELLINGS:
            ids = [tokenizer.special(spelling.format(part)) for part in _PARTS]
            if None not in ids:
                break
        else:
            names = " or ".join(
                ", ".join(spelling.format(part) for part in _PARTS) for spelling in _SPELLINGS
            )
            raise ConfigError(
                f"data.fim_rate={rate}: the tokenizer lacks the special tokens {names}; use one "
                "that has them, or data.fim_rate=0"
            )
        self._prefix, self._middle, self._suffix = (
            np.array([i], np.int32) for i in ids if i is not None
        )
        self._tokenizer = tokenizer
        self._eod = tokenizer.eod
        self._rate = rate
        self._spm_rate = spm_rate
        self._seed = seed

    def __call__(self, window: np.ndarray, g: int, unmarked: np.ndarray | None = None) -> int:
        """Rearranges the tokens, int32 [S + 1], of position g in place.

        unmarked: bool [S + 1], rearranged as well: where documents begin that no EOD precedes;
        None: nowhere.

        Returns how many tokens are text; the others are EOD.
        """
        if unmarked is None:
            unmarked = np.zeros(len(window), bool)
        is_eod = window == self._eod
        unmarked[0] = False
        # A document ends before its EOD, or before the first token of the next document. Only an
        # EOD is a token between the two.
        ends = np.append(np.flatnonzero(is_eod | unmarked), len(window))
        has_eod = np.append(is_eod, False)[ends]
        starts = np.concatenate(([0], ends[:-1] + has_eod[:-1]))

        # Raw bits, four per document: NumPy guarantees the same bits in every version, but not the
        # same draws from its Generator.
        seeds = np.random.SeedSequence((self._seed % 2**64, g))
        bits = np.random.PCG64(seeds).random_raw((len(ends), 4))
        parts = []
        for start, end, closed, draws in zip(starts, ends, has_eod, bits * 2.0**-64, strict=True):
            parts.append(self._permuted(window[start:end], draws))
            parts.append(window[end : end + closed])  # its EOD, or nothing

        # Documents that begin where another one ends without EOD.
        part_ends = np.cumsum([len(part) for part in parts])
        begins = part_ends[1:-1:2][~has_eod[:-1]]
        text = np.concatenate(parts)[: len(window)]
        window[: len(text)] = text
        window[len(text) :] = self._eod
        unmarked[:] = False
        unmarked[begins[begins < len(window)]] = True
        return len(text)

    def _permuted(self, document: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Returns a document as it is, or rearranged; draws: [4] in [0, 1)."""
        if not len(document) or draws[0] >= self._rate:
            return document
        text = self._tokenizer.decode(document)
        if "\ufffd" in text:  # the window splits a character, whose bytes would be lost
            return document
        low, high = sorted(int(draw * (len(text) + 1)) for draw in draws[1:3])
        texts = [text[:low], text[low:high], text[high:]]
        prefix, middle, suffix = self._tokenizer.encode_batch(texts)
        if draws[3] < self._spm_rate:
            parts = [self._prefix, self._suffix, suffix, self._middle, prefix, middle]
        else:
            parts = [self._prefix, prefix, self._suffix, suffix, self._middle, middle]
        return np.concatenate(parts)
