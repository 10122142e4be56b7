"""Best-fit packing: only documents longer than a sequence are split, and no token attends across
documents.

The documents of a split, in a shuffled order, are placed one by one into the fullest sequence that
still has room (online best fit; for language models: Ding et al., arXiv 2404.10830). A document
longer than S is split into pieces of S and a remainder. The packing is the same in all epochs; each
epoch permutes the sequences. So the position g is the entire state of the data, as for `Sequences`.

A piece of n tokens fills n slots of a sequence with n labels. Its inputs are the tokens before
them: EOD before a document's first token, the document's own token before a later piece. Legend: B
windows, S sequence length, N sequences, P pieces.
"""

from __future__ import annotations

import numpy as np

from mesh_lm.data.index_cache import Arrays, IndexCache
from mesh_lm.data.indexed import TokenStream
from mesh_lm.data.rows import TokenWindows, ranges
from mesh_lm.data.sequences import EpochPermutations
from mesh_lm.errors import ConfigError


class PackedSequences:
    """The packed sequences of one split. Thread-safe; holds only memory maps.

    Args:
      text: the split.
      seq_len: S.
      eod: id of the end-of-document token.
      seed: of the packing and of the permutations.

    Raises:
      ConfigError: the split has no tokens.
    """

    def __init__(
        self,
        text: TokenStream,
        seq_len: int,
        *,
        eod: int,
        seed: int,
        cache: IndexCache,
        fingerprint: str,
    ) -> None:
        if not text.n_tokens:
            raise ConfigError(
                f"{text.prefix} has no tokens in this split ({len(text)} documents from document "
                f"{text.first} on)"
            )
        self.seq_len, self._text, self._eod = seq_len, text, eod
        key = {
            "data": fingerprint,
            "documents": [text.first, len(text)],
            "seq_len": seq_len,
            "seed": seed,
        }
        arrays = cache.get(
            "packed",
            key,
            lambda: pack(np.asarray(text.offsets), seq_len, seed),
            size=len(text),
            slow=10**6,
        )
        self._bounds, self._starts, self._sizes, self._heads = (
            arrays[name] for name in ("bounds", "starts", "sizes", "heads")
        )
        self._epochs = EpochPermutations(len(self), seed)

    def __len__(self) -> int:
        """Returns the number of sequences in one epoch."""
        return len(self._bounds) - 1

    @property
    def fill(self) -> float:
        """The fraction of slots that hold a label."""
        return self._text.n_tokens / (len(self) * self.seq_len)

    def read(self, indices: np.ndarray) -> TokenWindows:
        """Returns the windows at positions int64 [B]; raises ConfigError for a token id that the
        model lacks.
        """
        numbers = self._epochs(indices)
        row, piece = ranges(self._bounds[numbers], self._bounds[numbers + 1])
        starts, sizes, heads = (
            self._starts[piece],
            self._sizes[piece].astype(np.int64),
            self._heads[piece],
        )
        ends = np.cumsum(sizes)
        # tokens in the rows before
        before = np.concatenate(([0], ends))[np.searchsorted(row, np.arange(len(indices)))]
        begins = ends - sizes - before[row] + row * self.seq_len  # slots among the B S
        _, slots = ranges(begins, begins + sizes)
        _, source = ranges(starts, starts + sizes)
        flat = {
            name: np.full(len(indices) * self.seq_len, self._eod, np.int32)
            for name in ("tokens", "labels")
        }
        tokens = self._text.verified(np.maximum(starts - 1, 0), starts + sizes)
        flat["labels"][slots] = tokens.take(source)
        flat["tokens"][slots] = tokens.take(np.maximum(source - 1, 0))
        flat["tokens"][begins[heads]] = self._eod
        weights, is_start = (
            np.zeros(flat["labels"].shape, np.float32),
            np.zeros(flat["labels"].shape, bool),
        )
        weights[slots] = 1.0
        is_start[begins] = True
        is_start[1:] |= (weights[1:] == 0) & (weights[:-1] == 1)  # padding is a separate segment
        shape = (len(indices), self.seq_len)
        labels = flat["labels"].reshape(shape)

        def source_of(row: int, column: int) -> int:
            return int(source[np.searchsorted(slots, row * self.seq_len + column)])

        self._text.check(labels, source_of)
        return TokenWindows(
            flat["tokens"].reshape(shape), labels, weights.reshape(shape), is_start.reshape(shape)
        )


def pack(offsets: np.ndarray, seq_len: int, seed: int) -> Arrays:
    """Assigns the pieces of documents to sequences.

    offsets: int64 [documents + 1], the documents' offsets in the stream.

    Returns bounds int64 [N + 1]: sequence i holds the pieces bounds[i] to bounds[i + 1] - 1; starts
    int64 [P] and sizes int32 [P]: the piece's labels are tokens[start : start + size]; heads bool
    [P]: whether it begins its document.
    """
    lengths = np.diff(offsets)
    counts = -(-lengths // seq_len)
    document, number = ranges(np.zeros_like(counts), counts)
    within = number * seq_len
    starts, sizes = offsets[document] + within, np.minimum(lengths[document] - within, seq_len)
    bits = np.random.PCG64(np.random.SeedSequence((seed % 2**64, 2**64 - 1))).random_raw(
        len(starts)
    )
    order = np.argsort(bits, kind="stable")
    bins = np.array(best_fit(sizes[order].tolist(), seq_len), np.int64)
    order = order[np.argsort(bins, kind="stable")]
    bounds = np.concatenate(([0], np.cumsum(np.bincount(bins))))
    return {
        "bounds": bounds,
        "starts": starts[order],
        "sizes": sizes[order].astype(np.int32),
        "heads": within[order] == 0,
    }


def best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Returns each item's bin: the fullest one with room for it, else a new one. Sizes are 1 to
    capacity.
    """
    open_bins: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room left
    rooms = 0  # bit r: a bin with room r is open
    numbers, n_bins = [], 0
    for size in sizes:
        if fitting := rooms >> size:
            room = size + (fitting & -fitting).bit_length() - 1
            number = open_bins[room].pop()
            if not open_bins[room]:
                rooms ^= 1 << room
        else:
            room, number = capacity, n_bins
            n_bins += 1
        numbers.append(number)
        if room := room - size:
            open_bins[room].append(number)
            rooms |= 1 << room
    return numbers
