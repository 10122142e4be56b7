"""Reads a text corpus: which documents are held out, a sample for the tokenizer, and how well gzip
and xz compress the held-out part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from mesh_lm.data import sources
from mesh_lm.data.encoding import pieces
from mesh_lm.errors import ConfigError

_REPORT = 10**8
"""Characters between two progress messages."""
_BPE_CHARACTERS = 2**25
"""Characters that the vocabulary is trained on. Longer text is sampled (80 to 100% of this size),
because training time grows with the text while the vocabulary hardly changes. Less text costs
compression: a fifth of stdlib gives 3% more tokens."""
_BASELINE_BYTES = 64 * 2**20
"""Bytes of held-out text that gzip and xz compress; xz takes about a second per MB."""


def documents(source: sources.Source, chosen: int | None) -> Iterator[sources.Document]:
    """Yields the documents of a source.

    chosen: number, from 0, of a document that is held out as well.
    """
    for number, document in enumerate(source.documents()):
        if number == chosen:
            document = dataclasses.replace(document, heldout=True)
        yield document


def heldout_choice(sizes: list[int]) -> int:
    """Returns the number of the document to hold out.

    Its size is nearest, by a factor, to a twentieth of the text, and it is not the largest.
    """
    target = sum(sizes) / sources.HELDOUT
    candidates = list(range(len(sizes)))
    candidates.remove(sizes.index(max(sizes)))
    return min(candidates, key=lambda n: max(sizes[n] / target, target / sizes[n]))


class Survey(NamedTuple):
    """What one pass over a text finds out about it."""

    sample: list[str]
    """Training text for the vocabulary."""
    heldout: bytes
    """The first 64 MiB of the held-out text, in UTF-8."""
    train_bytes: int
    heldout_bytes: int
    sizes: list[int]
    """UTF-8 bytes of each document before the first that is held out."""


def survey(documents: Iterable[sources.Document], path: str) -> Survey:
    """Reads all documents of data.path once.

    Raises ConfigError if there are none, or none to train on.
    """
    sample = _Sample()
    heldout = bytearray()
    sizes: list[int] = []
    n_train = n_heldout = 0
    train_bytes = heldout_bytes = 0
    for document in documents:
        encoded = document.text.encode()
        if document.heldout:
            n_heldout += 1
            heldout_bytes += len(encoded)
            heldout += encoded[: _BASELINE_BYTES - len(heldout)]
            continue
        n_train += 1
        train_bytes += len(encoded)
        if not heldout:
            sizes.append(len(encoded))
        sample.add(document.text)
    if not n_train and not n_heldout:
        raise ConfigError(
            f"data.path={path} has no text: all its files are empty or not UTF-8; give .txt, .md, "
            ".py or similar files"
        )
    if not n_train:
        raise ConfigError(
            f"data.path={path} has too few documents ({n_heldout}): one in 20 is held out by a "
            "hash, and none fell in the training split; give more of them, or join them into one "
            ".txt"
        )
    return Survey(sample.pieces(), bytes(heldout), train_bytes, heldout_bytes, sizes)


class _Sample:
    """A random sample of the pieces of a text, of up to _BPE_CHARACTERS.

    Each piece draws a number in [0, 1) and is in the sample while that is below a threshold, which
    falls as the sample fills.
    """

    def __init__(self) -> None:
        self._drawn: list[tuple[float, str]] = []
        self._n_characters = 0
        self._n_pieces = 0
        self._threshold = 1.0

    def add(self, text: str) -> None:
        for piece in pieces(text):
            self._n_pieces += 1
            number = _fraction(self._n_pieces)
            if number < self._threshold:
                self._drawn.append((number, piece))
                self._n_characters += len(piece)
        while self._n_characters > _BPE_CHARACTERS:
            self._threshold *= 0.8
            self._drawn = [draw for draw in self._drawn if draw[0] < self._threshold]
            self._n_characters = sum(len(piece) for _, piece in self._drawn)

    def pieces(self) -> list[str]:
        return [piece for _, piece in self._drawn]


def _fraction(number: int) -> float:
    """Returns a pseudo-random number in [0, 1) that depends only on `number`."""
    digest = hashlib.sha256(str(number).encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


@contextlib.contextmanager
def threads(n: int) -> Iterator[ThreadPoolExecutor]:
    """Threads for which nothing waits if the block raises: an interrupted preparation removes its
    files without them.
    """
    pool = ThreadPoolExecutor(n)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


class Reporter:
    """Reports progress every _REPORT characters."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._n_characters = 0

    def add(self, characters: int) -> None:
        """Counts characters that were encoded."""
        n_reports = self._n_characters // _REPORT
        self._n_characters += characters
        if self._n_characters // _REPORT > n_reports:
            self._progress(f"encoded {self._n_characters / 1e6:.0f} M characters")


def gzip_size(data: bytes) -> int:
    """Returns the size in bytes of the data after gzip -9."""
    return len(zlib.compress(data, 9, wbits=31))


def xz_size(data: bytes) -> int:
    """Returns the size in bytes of the data after xz -9."""
    return len(lzma.compress(data, preset=9))
