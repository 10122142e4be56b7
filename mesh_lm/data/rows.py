"""Turns windows of text into the rows of a batch, the same way for every sample order.

Legend: B rows, S sequence length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import numpy as np

from mesh_lm.data.fim import FillInMiddle
from mesh_lm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class TokenWindows:
    """The windows that a sample order returns for B positions."""

    tokens: np.ndarray
    """Inputs, int32 [B, S]."""
    labels: np.ndarray
    """The token that follows each input, int32 [B, S]."""
    weights: np.ndarray
    """Loss weights, float32 [B, S]; 0 where there is no label."""
    starts: np.ndarray | None = None
    """Whether an input starts a segment, bool [B, S]; None: EOD tokens do."""
    unmarked: np.ndarray | None = None
    """Whether an input is the first token of a document with no EOD before it, bool [B, S + 1];
    the last column is that of the last label. Such borders are known from the .idx alone. None:
    there are none."""

    @classmethod
    def of(cls, text: np.ndarray, unmarked: np.ndarray | None = None) -> TokenWindows:
        """Returns windows of consecutive tokens, int32 [B, S + 1]."""
        labels = text[:, 1:]
        weights = np.ones(labels.shape, np.float32)
        return cls(text[:, :-1], labels, weights, unmarked=unmarked)


def ranges(first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenates the ranges first[i] to stop[i] - 1.

    Returns, as int64, the i of each element and the elements.
    """
    sizes = stop - first
    row = np.repeat(np.arange(len(first)), sizes)
    starts = np.cumsum(sizes) - sizes
    return row, np.arange(len(row)) + np.repeat(first - starts, sizes)


def merged(numbers: np.ndarray, read: Callable[[int, np.ndarray], TokenWindows]) -> TokenWindows:
    """Returns windows from several orders.

    numbers: the order that each of the windows comes from, int [B].
    read: called with the number of an order and the rows of the result, int64 [b], that come from
      it; returns these.
    """
    rows = []
    parts = []
    for number in np.unique(numbers):
        rows.append(np.flatnonzero(numbers == number))
        parts.append(read(int(number), rows[-1]))
    if len(parts) == 1:
        return parts[0]
    original_order = np.argsort(np.concatenate(rows))

    def joined(arrays: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays)[original_order]

    # Either all parts have `starts` or none; some may have `unmarked`.
    starts = [part.starts for part in parts if part.starts is not None]
    unmarked = None
    if any(part.unmarked is not None for part in parts):
        arrays = []
        for part in parts:
            n_rows, seq_len = part.tokens.shape
            nowhere = np.zeros((n_rows, seq_len + 1), bool)
            arrays.append(nowhere if part.unmarked is None else part.unmarked)
        unmarked = joined(arrays)
    return TokenWindows(
        tokens=joined([part.tokens for part in parts]),
        labels=joined([part.labels for part in parts]),
        weights=joined([part.weights for part in parts]),
        starts=joined(starts) if starts else None,
        unmarked=unmarked,
    )


class SampleOrder(Protocol):
    """Windows by global sample position. Implementations are thread-safe."""

    seq_len: int

    def __len__(self) -> int:
        """Returns the number of sequences in one epoch."""
        ...

    def read(self, indices: np.ndarray) -> TokenWindows:
        """Returns the windows at positions int64 [B] >= 0, in any order."""
        ...


class ConcatOrder:
    """Several orders in sequence, one epoch of each, repeated without end."""

    def __init__(self, orders: Sequence[SampleOrder]) -> None:
        self._orders = orders
        self.seq_len = orders[0].seq_len
        self._sizes = np.array([len(order) for order in orders])
        self._ends = np.cumsum(self._sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> TokenWindows:
        """Implements `SampleOrder.read`."""
        indices = indices % len(self)
        orders = np.searchsorted(self._ends, indices, side="right")
        positions = indices - (self._ends - self._sizes)[orders]
        return merged(orders, lambda i, rows: self._orders[i].read(positions[rows]))


class RowReader:
    """Reads the rows of a batch from a sample order.

    Args:
      order: the sample order; row g is its window at position g.
      eod: id of the end-of-document token, None if unknown. An EOD belongs to the document after
        it, as the input from which that document's first token is predicted.
      documents: `joined`, or `separate` / `packed` for segment_ids and positions; `megatron`: the
        same, but an EOD belongs to the document before it, and the next one starts after it. A
        document that does not follow an EOD starts with its first token, as the order's windows say
        (`TokenWindows.unmarked`).
      mask_document_start: whether the first token of each document has weight 0.
      fill_in_middle: rearranges the documents within a window; not supported for packed documents.

    Raises:
      ConfigError: an option needs the EOD, which is unknown.
    """

    def __init__(
        self,
        order: SampleOrder,
        *,
        eod: int | None,
        documents: Literal["joined", "separate", "megatron", "packed"] = "joined",
        mask_document_start: bool = False,
        fill_in_middle: FillInMiddle | None = None,
    ) -> None:
        if eod is None and (documents != "joined" or mask_document_start):
            option = f"data.documents={documents}"
            if documents == "joined":
                option = "data.megatron=mask_document_start"
            raise ConfigError(
                f"{option}: the end-of-document token of this data is not known; set data.tokenizer"
            )
        self.order = order
        self.seq_len = order.seq_len
        self._eod = eod
        self._documents = documents
        self._mask_document_start = mask_document_start
        self._fill_in_middle = fill_in_middle

    def __len__(self) -> int:
        """Returns the number of sequences in one epoch."""
        return len(self.order)

    def require(self, global_batch: int) -> None:
        """Raises ConfigError if one epoch has fewer sequences than one global batch."""
        if len(self) < global_batch:
            raise ConfigError(
                f"the corpus has {len(self)} sequences of {self.seq_len} tokens, fewer than "
                f"train.global_batch={global_batch}; give more text (data.path), a smaller "
                f"model.seq_len, or train.global_batch <= {len(self)}"
            )

    def sample(self, g: int) -> dict[str, np.ndarray]:
        """Returns one row of `rows`, without the leading axis."""
        return {name: rows[0] for name, rows in self.rows(np.array([g])).items()}

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the sequences at global sample positions (>= 0, in any order).

        Args:
          indices: integers [B].

        Returns:
          tokens, labels: int32 [B, S]. weights: float32 [B, S], 1 where the label counts.
          sample_ids: uint32 [B], the positions mod 2^32. Unless documents are joined: segment_ids,
          int32 [B, S], increasing by one at each document start; positions, int32 [B, S], which
          restart at 0 there (and at the start of the sequence).

        Raises:
          ConfigError: a token id is not in the model's vocabulary.
        """
        indices = indices.astype(np.int64)
        windows = self.order.read(indices)
        if self._fill_in_middle:
            windows = self._rearranged(windows, indices)
        rows = {
            "tokens": windows.tokens,
            "labels": windows.labels,
            "weights": windows.weights,
            "sample_ids": indices.astype(np.uint32),
        }
        if self._mask_document_start:
            rows["weights"][windows.tokens == self._eod] = 0.0
            if windows.unmarked is not None:
                rows["weights"][windows.unmarked[:, 1:]] = 0.0
        if self._documents != "joined":
            starts = self._document_starts(windows)
            columns = np.arange(self.seq_len, dtype=np.int32)
            start_columns = np.where(starts, columns, 0)
            rows["segment_ids"] = np.cumsum(starts, axis=1, dtype=np.int32)
            rows["positions"] = columns - np.maximum.accumulate(start_columns, axis=1)
        return rows

    def _document_starts(self, windows: TokenWindows) -> np.ndarray:
        """Returns whether each input starts a document, bool [B, S]."""
        starts = windows.starts
        if starts is None:
            starts = windows.tokens == self._eod
        if self._documents == "megatron":  # it starts after the EOD
            starts = np.pad(starts[:, :-1], ((0, 0), (1, 0)))
        if windows.unmarked is not None:
            starts = starts | windows.unmarked[:, :-1]
        return starts

    def _rearranged(self, windows: TokenWindows, indices: np.ndarray) -> TokenWindows:
        """Returns windows with the middle of some documents at their end."""
        assert self._fill_in_middle is not None and windows.starts is None
        text = np.concatenate([windows.tokens, windows.labels[:, -1:]], axis=1)
        if windows.unmarked is None:
            unmarked = np.zeros(text.shape, bool)
        else:
            unmarked = windows.unmarked.copy()
        n_tokens = np.zeros((len(text), 1), np.int64)
        for i, g in enumerate(indices):
            n_tokens[i] = self._fill_in_middle(text[i], int(g), unmarked[i])  # in place
        # The others are padding.
        is_text = np.arange(1, text.shape[1]) < n_tokens
        weights = windows.weights * is_text
        return TokenWindows(text[:, :-1], text[:, 1:], weights, unmarked=unmarked)
