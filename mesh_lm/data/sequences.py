"""Tokenized documents as training sequences, addressed by the global sample position.

The stream is an EOD followed by all stored tokens. Sequence k reads stream[k S : k S + S + 1]: its
first S tokens are the inputs, its last S the labels, so neighbours overlap by one token and every
stored token is a label exactly once. An EOD starts the document after it (it is the input from
which that document's first token is predicted), which is why the stream begins with one.

Position g is sequence permutation(g // n)[g % n] of the n sequences. It counts samples since the
start of training, across epochs, and is the entire state of the data. B below is the number of
positions read at once.
"""

from __future__ import annotations

import threading

import numpy as np

from mesh_lm.data.indexed import TokenStream
from mesh_lm.data.rows import TokenWindows, ranges
from mesh_lm.errors import ConfigError


class EpochPermutations:
    """Maps positions to sequence numbers 0..n - 1. Thread-safe.

    Each epoch has its own permutation, a function of (seed, epoch).
    """

    def __init__(self, n: int, seed: int) -> None:
        self._n = n
        self._seed = seed
        self._orders: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Returns the sequence numbers, int64 [B], of positions int64 [B]."""
        epochs, numbers = np.divmod(indices, self._n)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            numbers[in_epoch] = self._order(int(epoch))[numbers[in_epoch]]
        return numbers

    def _order(self, epoch: int) -> np.ndarray:
        """Returns the epoch's permutation, int64 [n]."""
        with self._lock:
            if epoch not in self._orders:
                # Two are cached, because a batch may span two epochs.
                if len(self._orders) == 2:
                    del self._orders[next(iter(self._orders))]
                # Raw bits are sorted because NumPy guarantees the same bits in every version, but
                # not the same permutations from its Generator. SeedSequence refuses negative
                # numbers.
                seeds = np.random.SeedSequence((self._seed % 2**64, epoch))
                bits = np.random.PCG64(seeds).random_raw(self._n)
                self._orders[epoch] = np.argsort(bits, kind="stable")
            return self._orders[epoch]


class Sequences:
    """The sequences of one split, shuffled per epoch. Thread-safe; reads only the requested
    windows.

    Args:
      text: the tokens of the split; each document ends with `eod`, or where the next one begins.
      seq_len: S, tokens in a sequence.
      eod: id of the end-of-document token; None: unknown, so that the first token of the split is
        never a label.
      seed: of the permutations; None: each epoch in stored order.
      pad: whether the last, partial sequence is padded with `eod` at weight 0 (held-out text) or
        dropped (training).

    Raises:
      ConfigError: the split has fewer tokens than one sequence needs.
    """

    def __init__(
        self,
        text: TokenStream,
        seq_len: int,
        *,
        eod: int | None,
        seed: int | None,
        pad: bool = False,
    ) -> None:
        self.seq_len = seq_len
        self._eod = eod
        self._text = text
        self._n_full, n_tail = divmod(text.n_tokens, seq_len)
        self._n = self._n_full + (pad and n_tail > 0)
        if self._n == 0:
            raise ConfigError(
                f"the corpus has {text.n_tokens} tokens, fewer than one sequence needs "
                f"({1 if pad else seq_len}); give more text (data.path) or a smaller model.seq_len"
            )
        self._epochs = None if seed is None else EpochPermutations(self._n, seed)

    def __len__(self) -> int:
        """Returns the number of sequences in one epoch."""
        return self._n

    def read(self, indices: np.ndarray) -> TokenWindows:
        """Returns the windows at positions int64 [B] >= 0.

        Raises ConfigError for a token id that the model lacks.
        """
        numbers = self._epochs(indices) if self._epochs else indices % self._n
        starts = numbers * self.seq_len
        stops = np.minimum(starts + self.seq_len, self._text.n_tokens)
        tokens = self._text.verified(np.maximum(starts - 1, 0), stops)

        # The labels. Only the last sequence may be partial.
        labels = np.full((len(numbers), self.seq_len), self._eod or 0, np.int32)
        weights = np.ones(labels.shape, np.float32)
        is_full = numbers < self._n_full
        full = tokens[: self._n_full * self.seq_len].reshape(self._n_full, self.seq_len)
        labels[is_full] = full[numbers[is_full]]
        if not is_full.all():
            tail = tokens[self._n_full * self.seq_len :]
            labels[~is_full, : len(tail)] = tail
            weights[~is_full, len(tail) :] = 0.0
        self._text.check(labels, lambda row, column: int(starts[row]) + column)

        # The inputs are the labels and the token before them; the stream's leading EOD is not
        # stored.
        stored = tokens[np.maximum(starts - 1, 0)]
        first_inputs = np.where(numbers == 0, self._eod or 0, stored).astype(np.int32)
        inputs = np.concatenate([first_inputs[:, None], labels[:, :-1]], axis=1)
        if self._eod is None:
            weights[numbers == 0, 0] = 0.0
            return TokenWindows(inputs, labels, weights)
        return TokenWindows(inputs, labels, weights, unmarked=self._unmarked(starts, tokens))

    def _unmarked(self, starts: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns `TokenWindows.unmarked`, bool [B, S + 1].

        starts: where the labels of each window begin, int64 [B]. tokens: of the stream.
        """
        unmarked = np.zeros((len(starts), self.seq_len + 1), bool)
        # Documents that begin among the labels. The first of the stream follows the stream's
        # leading EOD.
        stops = np.minimum(starts + self.seq_len, self._text.n_tokens)
        first_document = self._text.offsets.search(np.maximum(starts, 1))
        stop_document = self._text.offsets.search(stops)
        row, document = ranges(first_document, stop_document)
        begins = self._text.offsets[document]
        is_unmarked = tokens.take(begins - 1) != self._eod
        is_unmarked[is_unmarked] = self._text.ends_document(document[is_unmarked] - 1)
        column = begins - starts[row] + 1  # column 0 is the token before the first label
        unmarked[row[is_unmarked], column[is_unmarked]] = True
        return unmarked
