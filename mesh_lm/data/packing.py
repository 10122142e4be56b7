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

_SLOW = 10**6
"""Documents from which on a message says that they are packed."""


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
        self.seq_len = seq_len
        self._text = text
        self._eod = eod

        key = {
            "data": fingerprint,
            "documents": [text.first, len(text)],
            "seq_len": seq_len,
            "seed": seed,
        }

        def pack_documents() -> Arrays:
            return pack(np.asarray(text.offsets), seq_len, seed)

        arrays = cache.get("packed", key, pack_documents, size=len(text), slow=_SLOW)
        self._bounds = arrays["bounds"]
        self._starts = arrays["starts"]
        self._sizes = arrays["sizes"]
        self._heads = arrays["heads"]
        self._epochs = EpochPermutations(len(self), seed)

    def __len__(self) -> int:
        """Returns the number of sequences in one epoch."""
        return len(self._bounds) - 1

    @property
    def fill(self) -> float:
        """The fraction of slots that hold a label."""
        return self._text.n_tokens / (len(self) * self.seq_len)

    def read(self, indices: np.ndarray) -> TokenWindows:
        """Returns the windows at positions int64 [B].

        Raises ConfigError for a token id that the model lacks.
        """
        # The pieces of all windows in order, [P]; `row` is the window of each.
        sequences = self._epochs(indices)
        row, piece = ranges(self._bounds[sequences], self._bounds[sequences + 1])
        starts = self._starts[piece]
        sizes = self._sizes[piece].astype(np.int64)
        heads = self._heads[piece]

        # Where each piece begins among the B S slots, and where its tokens are in the stream.
        n_rows = len(indices)
        ends = np.cumsum(sizes)
        first_pieces = np.searchsorted(row, np.arange(n_rows))
        tokens_before_row = np.concatenate(([0], ends))[first_pieces]
        begins = ends - sizes - tokens_before_row[row] + row * self.seq_len
        _, slots = ranges(begins, begins + sizes)
        _, offsets = ranges(starts, starts + sizes)

        stream = self._text.verified(np.maximum(starts - 1, 0), starts + sizes)
        n_slots = n_rows * self.seq_len
        labels = np.full(n_slots, self._eod, np.int32)
        labels[slots] = stream.take(offsets)
        tokens = np.full(n_slots, self._eod, np.int32)
        tokens[slots] = stream.take(np.maximum(offsets - 1, 0))
        tokens[begins[heads]] = self._eod

        weights = np.zeros(n_slots, np.float32)
        weights[slots] = 1.0
        is_start = np.zeros(n_slots, bool)
        is_start[begins] = True
        is_start[1:] |= (weights[1:] == 0) & (weights[:-1] == 1)  # padding is a separate segment

        def offset_of(row: int, column: int) -> int:
            return int(offsets[np.searchsorted(slots, row * self.seq_len + column)])

        shape = (n_rows, self.seq_len)
        labels = labels.reshape(shape)
        self._text.check(labels, offset_of)
        return TokenWindows(
            tokens.reshape(shape), labels, weights.reshape(shape), is_start.reshape(shape)
        )


def pack(offsets: np.ndarray, seq_len: int, seed: int) -> Arrays:
    """Assigns the pieces of documents to sequences.

    offsets: int64 [documents + 1], the documents' offsets in the stream.

    Returns:
      bounds: int64 [N + 1]; sequence i holds the pieces bounds[i] to bounds[i + 1] - 1.
      starts, sizes: int64 [P], int32 [P]; the labels of a piece are tokens[start : start + size].
      heads: bool [P], whether a piece begins its document.
    """
    # Split the documents into pieces.
    lengths = np.diff(offsets)
    n_pieces = -(-lengths // seq_len)
    document, number = ranges(np.zeros_like(n_pieces), n_pieces)
    position = number * seq_len
    starts = offsets[document] + position
    sizes = np.minimum(lengths[document] - position, seq_len)

    # Place them in a shuffled order. Raw bits are sorted because NumPy guarantees the same bits in
    # every version.
    seeds = np.random.SeedSequence((seed % 2**64, 2**64 - 1))
    bits = np.random.PCG64(seeds).random_raw(len(starts))
    order = np.argsort(bits, kind="stable")
    bins = np.array(best_fit(sizes[order].tolist(), seq_len), np.int64)
    order = order[np.argsort(bins, kind="stable")]
    return {
        "bounds": np.concatenate(([0], np.cumsum(np.bincount(bins)))),
        "starts": starts[order],
        "sizes": sizes[order].astype(np.int32),
        "heads": position[order] == 0,
    }


def best_fit(sizes: list[int], capacity: int) -> list[int]:
    """Returns each item's bin: the fullest one with room for it, else a new one.

    Sizes are 1 to capacity.
    """
    open_bins: list[list[int]] = [[] for _ in range(capacity + 1)]  # by the room left
    open_rooms = 0  # bit r: a bin with room r is open
    bins = []
    n_bins = 0
    for size in sizes:
        fitting = open_rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1  # of the lowest bit
            number = open_bins[room].pop()
            if not open_bins[room]:
                open_rooms ^= 1 << room
        else:
            room = capacity
            number = n_bins
            n_bins += 1
        bins.append(number)
        room -= size
        if room:
            open_bins[room].append(number)
            open_rooms |= 1 << room
    return bins
