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
    """Whether an input, or in the last column the last label, is the first token of a document with
    no EOD before it, bool [B, S + 1]: such borders are known from the .idx alone. None: there are
    none."""

    @classmethod
    def of(cls, text: np.ndarray, unmarked: np.ndarray | None = None) -> TokenWindows:
        """Returns windows of consecutive tokens, int32 [B, S + 1]."""
        return cls(
            text[:, :-1],
            text[:, 1:],
            np.ones((len(text), text.shape[1] - 1), np.float32),
            unmarked=unmarked,
        )


def ranges(first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Concatenates the ranges first[i] to stop[i] - 1. Returns, as int64, the i of each element and
    the elements.
    """
    sizes = stop - first
    row = np.repeat(np.arange(len(first)), sizes)
    return row, np.arange(len(row)) + np.repeat(first - (np.cumsum(sizes) - sizes), sizes)


def merged(which: np.ndarray, read: Callable[[int, np.ndarray], TokenWindows]) -> TokenWindows:
    """Returns windows from several orders: `read(i, rows)` returns those of the rows (int64 [b])
    where `which` (int [B]) is i.
    """
    rows = [np.flatnonzero(which == i) for i in np.unique(which)]
    parts = [read(int(which[here[0]]), here) for here in rows]
    if len(parts) == 1:
        return parts[0]
    back = np.argsort(np.concatenate(rows))
    tokens, labels, weights = (
        np.concatenate([getattr(part, name) for part in parts])[back]
        for name in ("tokens", "labels", "weights")
    )
    starts = [part.starts for part in parts if part.starts is not None]
    unmarked = None
    if any(part.unmarked is not None for part in parts):
        shape = (tokens.shape[1] + 1,)
        columns = [
            np.zeros((len(part.tokens), *shape), bool) if part.unmarked is None else part.unmarked
            for part in parts
        ]
        unmarked = np.concatenate(columns)[back]
    return TokenWindows(
        tokens, labels, weights, np.concatenate(starts)[back] if starts else None, unmarked
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
        self._orders, self.seq_len = orders, orders[0].seq_len
        self._sizes = np.array([len(order) for order in orders])
        self._ends = np.cumsum(self._sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> TokenWindows:
        """Returns windows as `SampleOrder.read` does."""
        indices = indices % len(self)
        which = np.searchsorted(self._ends, indices, side="right")
        return merged(
            which,
            lambda i, rows: self._orders[i].read(indices[rows] - (self._ends[i] - self._sizes[i])),
        )


class RowReader:
    """Reads the rows of a batch from a sample order.

    Args:
      order: the sample order; row g is its window at position g. eod: id of the end-of-document
      token, None if unknown. An EOD belongs to the document after it, as the input from which that
        document's first token is predicted.
      documents: `joined`, or `separate` / `packed` for segment_ids and positions; `megatron`: the
      same, but an EOD belongs to the document
        before it, and the next one starts after it. A document that does not follow an EOD starts
        with its first token, as the order's windows say (`TokenWindows.unmarked`).
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
            option = (
                "data.mask_document_start"
                if documents == "joined"
                else f"data.documents={documents}"
            )
            raise ConfigError(
                f"{option}: the end-of-document token of this data is not known; set data.tokenizer"
            )
        self.order, self.seq_len = order, order.seq_len
        self._eod, self._separate, self._closes = (
            eod,
            documents != "joined",
            documents == "megatron",
        )
        self._mask_document_start, self._fill_in_middle = mask_document_start, fill_in_middle

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
        out = {
            "tokens": windows.tokens,
            "labels": windows.labels,
            "weights": windows.weights,
            "sample_ids": indices.astype(np.uint32),
        }
        if self._mask_document_start:
            out["weights"][windows.tokens == self._eod] = 0.0
            if windows.unmarked is not None:
                out["weights"][windows.unmarked[:, 1:]] = 0.0
        if self._separate:
            starts = windows.tokens == self._eod if windows.starts is None else windows.starts
            if self._closes:
                starts = np.pad(starts[:, :-1], ((0, 0), (1, 0)))
            if windows.unmarked is not None:
                starts = starts | windows.unmarked[:, :-1]
            columns = np.arange(self.seq_len, dtype=np.int32)
            out["segment_ids"] = np.cumsum(starts, axis=1, dtype=np.int32)
            out["positions"] = columns - np.maximum.accumulate(np.where(starts, columns, 0), axis=1)
        return out

    def _rearranged(self, windows: TokenWindows, indices: np.ndarray) -> TokenWindows:
        assert self._fill_in_middle is not None and windows.starts is None
        text = np.concatenate([windows.tokens, windows.labels[:, -1:]], axis=1)
        unmarked = (
            np.zeros(text.shape, bool) if windows.unmarked is None else windows.unmarked.copy()
        )
        counts = [
            self._fill_in_middle(row, int(g), first)
            for row, g, first in zip(text, indices, unmarked, strict=True)
        ]
        # labels that are text and not padding
        kept = np.arange(1, text.shape[1]) < np.array(counts)[:, None]
        return TokenWindows(text[:, :-1], text[:, 1:], windows.weights * kept, unmarked=unmarked)
