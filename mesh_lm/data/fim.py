"""Fill-in-the-middle (Bavarian et al., arXiv 2207.14255): a document is split in three, and its
middle moves to the end.

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
      three special tokens
        (<|fim_prefix|>, <fim_prefix> or <fim-prefix>, and so on).
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
        spelled = [
            [tokenizer.special(spelling.format(part)) for part in _PARTS] for spelling in _SPELLINGS
        ]
        known = next((ids for ids in spelled if None not in ids), None)
        if known is None:
            names = " or ".join(
                ", ".join(spelling.format(part) for part in _PARTS) for spelling in _SPELLINGS
            )
            raise ConfigError(
                f"data.fim_rate={rate}: the tokenizer lacks the special tokens {names}; use one "
                "that has them, or data.fim_rate=0"
            )
        self._prefix, self._middle, self._suffix = (
            np.array([i], np.int32) for i in known if i is not None
        )
        self._tokenizer, self._eod, self._rate, self._spm_rate, self._seed = (
            tokenizer,
            tokenizer.eod,
            rate,
            spm_rate,
            seed,
        )

    def __call__(self, window: np.ndarray, g: int, unmarked: np.ndarray | None = None) -> int:
        """Rearranges the tokens, int32 [S + 1], of position g in place. Returns how many are text;
        the rest is EOD.

        unmarked: bool [S + 1], rearranged as well: where documents begin that no EOD precedes;
        None: nowhere.
        """
        unmarked = np.zeros(len(window), bool) if unmarked is None else unmarked
        is_eod = window == self._eod
        unmarked[0] = False
        # A document ends before its EOD, or before the first token of the next document. Only the
        # former is followed by a token between.
        ends = np.append(np.flatnonzero(is_eod | unmarked), len(window))
        closes = np.append(is_eod, False)[ends]
        starts = np.concatenate(([0], ends[:-1] + closes[:-1]))
        # Raw bits, four per document: NumPy guarantees the same bits in every version, but not the
        # same draws from its Generator.
        bits = np.random.PCG64(np.random.SeedSequence((self._seed % 2**64, g))).random_raw(
            (len(ends), 4)
        )
        parts = []
        for start, end, closed, draws in zip(starts, ends, closes, bits * 2.0**-64, strict=True):
            parts += [self._permuted(window[start:end], draws), window[end : end + closed]]
        begins = np.cumsum([0, *map(len, parts)])[2:-1:2][~closes[:-1]]
        text = np.concatenate(parts)[: len(window)]
        window[: len(text)], window[len(text) :] = text, self._eod
        unmarked[:] = False
        unmarked[begins[begins < len(window)]] = True
        return len(text)

    def _permuted(self, document: np.ndarray, draws: np.ndarray) -> np.ndarray:
        if not len(document) or draws[0] >= self._rate:
            return document
        text = self._tokenizer.decode(document)
        if "\ufffd" in text:  # the window splits a character, whose bytes would be lost
            return document
        low, high = sorted(int(draw * (len(text) + 1)) for draw in draws[1:3])
        prefix, middle, suffix = self._tokenizer.encode_batch(
            [text[:low], text[low:high], text[high:]]
        )
        if draws[3] < self._spm_rate:
            return np.concatenate(
                [self._prefix, self._suffix, suffix, self._middle, prefix, middle]
            )
        return np.concatenate([self._prefix, prefix, self._suffix, suffix, self._middle, middle])
