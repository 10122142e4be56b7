"""Tokenized documents as training sequences, addressed by one number: the global sample position.

The stream is an EOD followed by all stored tokens. Sequence k reads stream[k S : k S + S + 1]: its first S tokens are the inputs, its last
S the labels, so neighbours overlap by one token and every stored token is a label exactly once. An EOD starts the document after it (it is
the input from which that document's first token is predicted), which is why the stream begins with one.

Position g is sequence order(g // n)[g % n] of the n sequences: g counts samples since the start of training, epoch after epoch, and says
everything about the state of the data. B below is the number of positions asked for.
"""

from __future__ import annotations

import threading
from typing import Literal

import numpy as np

from mesh_lm.config import ConfigError
from mesh_lm.data.indexed import Documents


class Sequences:
    """The sequences of one split. Safe to read from several threads; reads only the rows asked for.

    Args:
      documents: the split; each document ends with `eod`.
      seq_len: S, tokens in a sequence.
      seed: of the order.
      shuffle: whether each epoch has its own permutation, a function of (seed, epoch); else each is in stored order.
      documents_mode: `separate` adds segment_ids and positions.
      mask_document_start: weight 0 where the input is an EOD, i.e. on the first token of each document.
      eod: id of the end-of-document token.
      pad: the last, partial sequence is padded with `eod` at weight 0 (held-out text); else it is left out (training).

    Raises:
      ConfigError: fewer tokens than one sequence needs.
    """

    def __init__(
        self,
        documents: Documents,
        seq_len: int,
        *,
        seed: int,
        shuffle: bool,
        documents_mode: Literal["joined", "separate"],
        mask_document_start: bool,
        eod: int,
        pad: bool = False,
    ) -> None:
        self.seq_len, self._seed, self._shuffle, self._eod = seq_len, seed, shuffle, eod
        self._separate, self._mask_document_start = documents_mode == "separate", mask_document_start
        self._tokens = documents.tokens
        n_full = len(self._tokens) // seq_len
        self._full = self._tokens[: n_full * seq_len].reshape(n_full, seq_len)  # a view: labels of the full sequences
        self._tail = self._tokens[n_full * seq_len :] if pad else self._tokens[:0]
        self._n = n_full + (len(self._tail) > 0)
        if self._n == 0:
            raise ConfigError(
                f"the corpus has {len(self._tokens)} tokens, fewer than one sequence needs ({1 if pad else seq_len}); "
                "give more text (data.path) or a smaller model.seq_len"
            )
        self._orders: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Sequences in one epoch."""
        return self._n

    def require(self, global_batch: int) -> None:
        """Raises ConfigError when one epoch has fewer sequences than one global batch."""
        if self._n < global_batch:
            raise ConfigError(
                f"the corpus has {self._n} sequences of {self.seq_len} tokens, fewer than train.global_batch={global_batch}; "
                f"give more text (data.path), a smaller model.seq_len, or train.global_batch <= {self._n}"
            )

    def sample(self, g: int) -> dict[str, np.ndarray]:
        """One position: what `rows` gives, without the leading axis."""
        return {name: rows[0] for name, rows in self.rows(np.array([g])).items()}

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The sequences at the given global sample positions (>= 0, in any order).

        Args:
          indices: integers [B].

        Returns:
          tokens, labels: int32 [B, S]. weights: float32 [B, S], 1 where the label counts. sample_ids: uint32 [B], the positions mod 2^32.
          Only for separate documents: segment_ids, int32 [B, S], one higher from each EOD on; positions, int32 [B, S], 0 at each EOD (and
          at the start of the sequence).
        """
        labels, before, weights = self._read(self._sequence_numbers(indices))
        tokens = np.concatenate([before[:, None], labels[:, :-1]], axis=1)
        is_start = tokens == self._eod
        if self._mask_document_start:
            weights[is_start] = 0.0
        out = {"tokens": tokens, "labels": labels, "weights": weights, "sample_ids": indices.astype(np.uint32)}
        if self._separate:
            places = np.arange(self.seq_len, dtype=np.int32)
            out["segment_ids"] = np.cumsum(is_start, axis=1, dtype=np.int32)
            out["positions"] = places - np.maximum.accumulate(np.where(is_start, places, 0), axis=1)
        return out

    def _read(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Labels int32 [B, S], the token before each row's labels int32 [B], and weights float32 [B, S] of the given sequences [B]."""
        labels = np.full((len(numbers), self.seq_len), self._eod, np.int32)
        weights = np.ones(labels.shape, np.float32)
        is_full = numbers < len(self._full)
        labels[is_full] = self._full[numbers[is_full]]
        labels[~is_full, : len(self._tail)] = self._tail
        weights[~is_full, len(self._tail) :] = 0.0
        # The stream's leading EOD is not stored.
        before = np.where(numbers == 0, self._eod, self._tokens[np.maximum(numbers * self.seq_len - 1, 0)])
        return labels, before.astype(np.int32), weights

    def _sequence_numbers(self, indices: np.ndarray) -> np.ndarray:
        """Sequence number, 0 to n - 1, of each global sample position; int64 [B]."""
        epochs, numbers = np.divmod(indices.astype(np.int64), self._n)
        if self._shuffle:
            for epoch in np.unique(epochs):
                here = epochs == epoch
                numbers[here] = self._order(int(epoch))[numbers[here]]
        return numbers

    def _order(self, epoch: int) -> np.ndarray:
        """The epoch's permutation of 0..n - 1, int64 [n]; the two computed last are kept, since a batch may span two epochs."""
        with self._lock:
            if epoch not in self._orders:
                if len(self._orders) == 2:
                    del self._orders[next(iter(self._orders))]
                # Raw bits are sorted because NumPy promises the same bits from its bit generators in every version, but not the same
                # permutations from its Generator. SeedSequence refuses negative numbers.
                bits = np.random.PCG64(np.random.SeedSequence((self._seed % 2**64, epoch))).random_raw(self._n)
                self._orders[epoch] = np.argsort(bits, kind="stable")
            return self._orders[epoch]
