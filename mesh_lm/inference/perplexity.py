"""Perplexity of given texts, from log-probabilities in sliding windows."""

from __future__ import annotations

import dataclasses
import itertools
import lzma
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mesh_lm.data import formats, lost_bytes, sources
from mesh_lm.data.tokenizer import Tokenizer
from mesh_lm.errors import ConfigError
from mesh_lm.inference import Scorer

_GROUP_BATCHES = 64
"""Batches of windows that are tokenized and sorted by length at a time, which bounds memory."""
_COMPRESSED = 64 * 2**20
"""Bytes of text that are compressed."""
_MAX_EXPONENT = 700.0
"""exp of more than 709.8 overflows."""


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """Sums over texts. Every token of a text counts once; the start token before it does not."""

    nats: float
    tokens: int
    n_bytes: int
    """UTF-8 bytes of the texts, without those that are lost."""
    lost_bytes: int
    """UTF-8 bytes that the tokens do not spell (`Tokenizer.lost_bytes`)."""
    texts: int

    def summary(self) -> dict[str, float]:
        """Returns nats per token, perplexity, and bits per byte, which does not depend on the
        tokenizer.
        """
        per_token = self.nats / self.tokens
        perplexity = math.exp(per_token) if per_token < _MAX_EXPONENT else math.inf
        bits = bits_per_byte(per_token, self.tokens, self.n_bytes)
        return {"nats_per_token": per_token, "perplexity": perplexity, "bits_per_byte": bits}

    def __add__(self, other: Perplexity) -> Perplexity:
        """Returns the perplexity of the texts of both."""
        return Perplexity(
            self.nats + other.nats,
            self.tokens + other.tokens,
            self.n_bytes + other.n_bytes,
            self.lost_bytes + other.lost_bytes,
            self.texts + other.texts,
        )


def bits_per_byte(nats_per_token: float, tokens: int, n_bytes: int) -> float:
    """Converts a loss to bits per byte of the encoded text, which does not depend on the
    tokenizer.
    """
    if not n_bytes:
        return math.inf
    return nats_per_token / math.log(2) * tokens / n_bytes


def read_texts(path: str, field: str = "text") -> Iterator[str]:
    """Yields the texts of a directory, a JSON or .parquet file, as `data.path` does, or any other
    (compressed) file as one text.

    Args:
      field: the field of a JSON object, or the column of a .parquet file, that holds the text.

    Raises:
      ConfigError: the file is missing or not UTF-8.
    """
    file = Path(path).expanduser()
    if path != "stdlib" and not file.exists():
        raise ConfigError(f"--text={path}: no such text file or directory")
    if not file.is_file() or formats.has_records(file):
        yield from (document.text for document in sources.find(path, field).documents())
        return
    formats.require_readable(file)
    try:
        with formats.opened(file) as (opened, _):
            text = formats.text(opened.read())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--text={path} is not UTF-8 (byte {error.start}); convert it to UTF-8 first"
        ) from error
    if text:
        yield text


def measure_perplexity(
    scorer: Scorer,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    *,
    stride: int,
    start: int,
    max_lost_bytes: float = lost_bytes.TOLERATED,
    progress: Callable[[Perplexity], None] = lambda measured: None,
) -> Perplexity:
    """Returns the perplexity of the texts, each read separately after the token `start`.

    Args:
      stride: as in `windows`.
      max_lost_bytes: fraction of the texts' bytes that the tokens may fail to spell. These bytes
        are not counted.
      progress: called with the result so far after each group of windows.

    Raises:
      ConfigError: there are no tokens, one is not in the model's vocabulary, or too many bytes are
        lost.
    """
    measured = Perplexity(0.0, 0, 0, 0, 0)
    all_windows = _all_windows(scorer, tokenizer, texts, stride, start)
    for group in _groups(all_windows, _GROUP_BATCHES * scorer.batch):
        scores = scorer([window.tokens for window in group])
        for score, window in zip(scores, group, strict=True):
            logprobs = score.logprobs[-window.n_scored :]
            measured += Perplexity(
                nats=-float(logprobs.astype(np.float64).sum()),
                tokens=window.n_scored,
                n_bytes=window.text_bytes - window.lost_bytes,
                lost_bytes=window.lost_bytes,
                texts=int(window.text_bytes > 0),
            )
        progress(measured)
    n_bytes = measured.n_bytes + measured.lost_bytes
    lost_bytes.refuse(measured.lost_bytes, n_bytes, max_lost_bytes, "--max-lost-bytes")
    if not measured.tokens:
        raise ConfigError("there is no text to evaluate: every text is empty")
    return measured


class _Window(NamedTuple):
    tokens: Sequence[int]
    n_scored: int
    """How many tokens at its end are scored."""
    text_bytes: int
    """Bytes of the text in its first window; 0 in the others."""
    lost_bytes: int
    """Bytes of the text that its tokens do not spell, in its first window; 0 in the others."""


def _all_windows(
    scorer: Scorer, tokenizer: Tokenizer, texts: Iterable[str], stride: int, start: int
) -> Iterator[_Window]:
    vocab_size = scorer.layout.config.vocab_size
    for text in texts:
        encoded = tokenizer.encode_batch([text])[0]
        ids = [start, *encoded.tolist()]
        if max(ids) >= vocab_size:
            raise ConfigError(
                f"the text has token {max(ids)}, but the model's ids end at {vocab_size - 1}: the "
                "tokenizer is not the model's"
            )
        text_bytes = len(text.encode())
        n_lost = tokenizer.lost_bytes(text, encoded)
        for tokens, n_scored in windows(ids, scorer.layout.config.seq_len, stride):
            yield _Window(tokens, n_scored, text_bytes, n_lost)
            text_bytes = 0
            n_lost = 0


def windows(
    tokens: Sequence[int], seq_len: int, stride: int
) -> Iterator[tuple[Sequence[int], int]]:
    """Yields (window of at most seq_len + 1 tokens, how many at its end are scored); every token
    but the first is scored once.

    All of the first window is scored; each later one adds `stride` tokens, with at least seq_len -
    stride tokens of context.
    """
    end = 0  # the last token that is scored
    while end < len(tokens) - 1:
        n_scored = min(stride if end else seq_len, len(tokens) - 1 - end)
        end += n_scored
        yield tokens[max(0, end - seq_len) : end + 1], n_scored


def compressed_bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """Returns the bits per byte of gzip and xz on the first 64 MiB of the texts; xz is slow. {} for
    no text.
    """
    gzip = zlib.compressobj(9, wbits=31)
    xz = lzma.LZMACompressor(preset=9)
    size = 0
    gzip_size = 0
    xz_size = 0
    limit = ""
    for text in texts:
        data = text.encode()
        if size + len(data) > _COMPRESSED:
            data = data[: _COMPRESSED - size]
            limit = f" of the first {_COMPRESSED / 2**20:.3g} MiB"
        size += len(data)
        gzip_size += len(gzip.compress(data))
        xz_size += len(xz.compress(data))
        if limit:
            break
    if not size:
        return {}
    gzip_size += len(gzip.flush())
    xz_size += len(xz.flush())
    return {f"gzip -9{limit}": 8 * gzip_size / size, f"xz -9{limit}": 8 * xz_size / size}


def _groups(items: Iterator[_Window], n: int) -> Iterator[list[_Window]]:
    while True:
        group = list(itertools.islice(items, n))
        if not group:
            return
        yield group
