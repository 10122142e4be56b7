"""Perplexity of given texts, from log-probabilities in sliding windows."""

from __future__ import annotations

import dataclasses
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

_GROUP = 64
"""Batches of windows that are tokenized and sorted by length at a time, which bounds memory."""

_COMPRESSED = 64 * 2**20
"""Bytes of text that are compressed."""


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
        perplexity = math.exp(per_token) if per_token < 700 else math.inf
        bits = bits_per_byte(per_token, self.tokens, self.n_bytes)
        return {"nats_per_token": per_token, "perplexity": perplexity, "bits_per_byte": bits}


def bits_per_byte(nats_per_token: float, tokens: int, n_bytes: int) -> float:
    """Converts a loss to bits per byte of the encoded text, which does not depend on the
    tokenizer.
    """
    return nats_per_token / math.log(2) * tokens / n_bytes if n_bytes else math.inf


def read_texts(path: str, field: str = "text") -> Iterator[str]:
    """Yields the texts of a directory, a JSON or .parquet file, as `data.path` does, or any other
    (compressed) file as one text.

    field: the field of a JSON object, or the column of a .parquet file, that holds the text.

    Raises ConfigError if the file is missing or not UTF-8.
    """
    file = Path(path).expanduser()
    if path != "stdlib" and not file.exists():
        raise ConfigError(f"--text={path}: no such file or directory")
    if not file.is_file() or formats.has_records(file):
        yield from (document.text for document in sources.find(path, field).documents())
        return
    formats.require_readable(file)
    try:
        with formats.opened(file) as (opened, _):
            text = formats.text(opened.read())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--text={path} is not UTF-8 (byte {error.start}); convert it first"
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
    progress: Callable[[Perplexity], None] = lambda so_far: None,
) -> Perplexity:
    """Returns the perplexity of the texts, each read separately after the token `start`. stride: as
    in `windows`.

    max_lost_bytes: fraction of the texts' bytes that the tokens may fail to spell. These bytes are
    not counted. progress: called with the result so far after each group of windows.

    Raises ConfigError if there are no tokens, one is not in the model's vocabulary, or too many
    bytes are lost.
    """
    nats, tokens, n_bytes, lost, n_texts = 0.0, 0, 0, 0, 0
    for group in _groups(
        _all_windows(scorer, tokenizer, texts, stride, start), _GROUP * scorer.batch
    ):
        scores = scorer([ids for ids, _, _ in group])
        for score, (_, scored, size) in zip(scores, group, strict=True):
            nats -= float(score.logprobs[-scored:].astype(np.float64).sum())
            tokens, n_texts = tokens + scored, n_texts + bool(size.text)
            n_bytes, lost = n_bytes + size.text - size.lost, lost + size.lost
        progress(Perplexity(nats, tokens, n_bytes, lost, n_texts))
    lost_bytes.refuse(lost, n_bytes + lost, max_lost_bytes, "--max-lost-bytes")
    if not tokens:
        raise ConfigError("there is no text to evaluate: every text is empty")
    return Perplexity(nats, tokens, n_bytes, lost, n_texts)


class _Bytes(NamedTuple):
    """Bytes of a text, and those of them that its tokens do not spell."""

    text: int = 0
    lost: int = 0


_Window = tuple[Sequence[int], int, _Bytes]
"""(tokens, how many of them are scored, bytes of the text in its first window, else none)."""


def _all_windows(
    scorer: Scorer, tokenizer: Tokenizer, texts: Iterable[str], stride: int, start: int
) -> Iterator[_Window]:
    vocab_size, seq_len = scorer.layout.config.vocab_size, scorer.layout.config.seq_len
    for text in texts:
        encoded = tokenizer.encode_batch([text])[0]
        ids = [start, *encoded.tolist()]
        if max(ids) >= vocab_size:
            raise ConfigError(
                f"the text has token {max(ids)}, but the model's ids end at {vocab_size - 1}: the "
                "tokenizer is not the model's"
            )
        size = _Bytes(len(text.encode()), tokenizer.lost_bytes(text, encoded))
        for window, scored in windows(ids, seq_len, stride):
            yield window, scored, size
            size = _Bytes()


def windows(
    tokens: Sequence[int], seq_len: int, stride: int
) -> Iterator[tuple[Sequence[int], int]]:
    """Yields (window of at most seq_len + 1 tokens, how many at its end are scored); every token
    but the first is scored once.

    All of the first window is scored; each later one adds `stride` tokens, with at least seq_len -
    stride tokens of context.
    """
    done = 0
    while done < len(tokens) - 1:
        new = min(stride if done else seq_len, len(tokens) - 1 - done)
        done += new
        yield tokens[max(0, done - seq_len) : done + 1], new


def compressed_bits_per_byte(texts: Iterable[str]) -> dict[str, float]:
    """Returns the bits per byte of gzip and xz on the first 64 MiB of the texts; xz is slow. {} for
    no text.
    """
    gzip, xz = zlib.compressobj(9, wbits=31), lzma.LZMACompressor(preset=9)
    size = gzip_size = xz_size = 0
    limit = ""
    for data in (text.encode() for text in texts):
        if size + len(data) > _COMPRESSED:
            data, limit = data[: _COMPRESSED - size], f" of the first {_COMPRESSED / 2**20:.3g} MiB"
        size += len(data)
        gzip_size += len(gzip.compress(data))
        xz_size += len(xz.compress(data))
        if limit:
            break
    gzip_size, xz_size = gzip_size + len(gzip.flush()), xz_size + len(xz.flush())
    return (
        {f"gzip -9{limit}": 8 * gzip_size / size, f"xz -9{limit}": 8 * xz_size / size}
        if size
        else {}
    )


def _groups(items: Iterator[_Window], n: int) -> Iterator[list[_Window]]:
    group = []
    for item in items:
        group.append(item)
        if len(group) == n:
            yield group
            group = []
    if group:
        yield group
