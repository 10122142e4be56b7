"""Reads a text corpus: which documents are held out, a sample for the tokenizer, and how well gzip
and xz compress the held-out part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import lzma
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

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
    """Yields the documents of a source, the one with the number `chosen`, from 0, as held out."""
    for number, document in enumerate(source.documents()):
        yield dataclasses.replace(document, heldout=True) if number == chosen else document


def chosen_of(sizes: list[int]) -> int:
    """Returns the number of the document to hold out: by its size nearest to a twentieth of the
    text, by a factor, and not the largest.
    """
    share, largest = sum(sizes) / sources.HELDOUT, sizes.index(max(sizes))
    return min(
        (n for n in range(len(sizes)) if n != largest),
        key=lambda n: max(sizes[n] / share, share / sizes[n]),
    )


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


def add(sums: list[int], n: int) -> None:
    """Adds to the last of some sums."""
    sums[-1] += n


def read(
    given: Iterator[sources.Document], path: str
) -> tuple[list[str], bytearray, dict[str, int], list[int]]:
    """Reads all documents once. Returns text to train the BPE on, the first 64 MiB of held-out
    bytes, all bytes per split, and the bytes of each document before the first that is held out.
    """
    sample: list[tuple[float, str]] = []
    sample_size, threshold, n_pieces = 0, 1.0, 0
    heldout, sizes = bytearray(), []
    counts, n_bytes = {"training": 0, "held-out": 0}, {"training": 0, "held-out": 0}
    for document in given:
        split, encoded = "held-out" if document.heldout else "training", document.text.encode()
        counts[split] += 1
        n_bytes[split] += len(encoded)
        if document.heldout:
            heldout += encoded[: _BASELINE_BYTES - len(heldout)]
            continue
        if not heldout:
            sizes.append(len(encoded))
        for piece in pieces(document.text):
            n_pieces += 1
            if (mark := _fraction(n_pieces)) < threshold:
                sample.append((mark, piece))
                sample_size += len(piece)
        while sample_size > _BPE_CHARACTERS:
            threshold *= 0.8
            sample = [(mark, piece) for mark, piece in sample if mark < threshold]
            sample_size = sum(len(piece) for _, piece in sample)
    if not any(counts.values()):
        raise ConfigError(
            f"data.path={path} has no text: all its files are empty or not UTF-8; give .txt, .md, "
            ".py or similar files"
        )
    if not counts["training"]:
        raise ConfigError(
            f"data.path={path} has too few documents ({sum(counts.values())}): one in 20 is held "
            "out by a hash, and none fell in the training split; give more of them, or join them "
            "into one .txt"
        )
    return [piece for _, piece in sample], heldout, n_bytes, sizes


def _fraction(number: int) -> float:
    """Returns a pseudo-random number in [0, 1) that depends only on `number`."""
    return int.from_bytes(hashlib.sha256(str(number).encode()).digest()[:6], "big") / 2**48


class Reporter:
    """Reports progress every _REPORT characters."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress, self._done = progress, 0

    def done(self, characters: int) -> None:
        """Counts characters that were encoded."""
        before, self._done = self._done, self._done + characters
        if self._done // _REPORT > before // _REPORT:
            self._progress(f"encoded {self._done / 1e6:.0f} M characters")


def gzip_size(data: bytes) -> int:
    """Returns the bytes that gzip -9 makes of these."""
    return len(zlib.compress(data, 9, wbits=31))


def xz_size(data: bytes) -> int:
    """Returns the bytes that xz -9 makes of these."""
    return len(lzma.compress(data, preset=9))
