"""From windows of text to the rows of a batch: the last step, the same for every order of samples.

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
    """What an order gives for B positions."""

    tokens: np.ndarray
    """Inputs, int32 [B, S]."""
    labels: np.ndarray
    """The token after each input, int32 [B, S]."""
    weights: np.ndarray
    """float32 [B, S], 0 where there is no label."""
    starts: np.ndarray | None = None
    """Whether an input begins a segment, bool [B, S]; None: those that are EOD do."""

    @classmethod
    def of(cls, text: np.ndarray) -> TokenWindows:
        """Consecutive tokens, int32 [B, S + 1]: every window of a stream."""
        return cls(text[:, :-1], text[:, 1:], np.ones((len(text), text.shape[1] - 1), np.float32))


def ranges(first: np.ndarray, stop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All numbers of the ranges first[i] to stop[i] - 1, one range after the other, after the i of each: two of int64."""
    sizes = stop - first
    row = np.repeat(np.arange(len(first)), sizes)
    return row, np.arange(len(row)) + np.repeat(first - (np.cumsum(sizes) - sizes), sizes)


def merged(which: np.ndarray, read: Callable[[int, np.ndarray], TokenWindows]) -> TokenWindows:
    """Windows from several orders: `read(i, here)` gives those of the rows `here` (int64 [b]), where `which` (int [B]) is i."""
    rows = [np.flatnonzero(which == i) for i in np.unique(which)]
    parts = [read(int(which[here[0]]), here) for here in rows]
    if len(parts) == 1:
        return parts[0]
    back = np.argsort(np.concatenate(rows))
    tokens, labels, weights = (np.concatenate([getattr(part, name) for part in parts])[back] for name in ("tokens", "labels", "weights"))
    starts = [part.starts for part in parts if part.starts is not None]
    return TokenWindows(tokens, labels, weights, np.concatenate(starts)[back] if starts else None)


class SampleOrder(Protocol):
    """Windows by position. Safe to read from several threads."""

    seq_len: int

    def __len__(self) -> int:
        """Sequences in one epoch."""
        ...

    def read(self, indices: np.ndarray) -> TokenWindows:
        """The windows at the positions int64 [B], each >= 0, in any order."""
        ...


class ConcatOrder:
    """Orders one after the other, each for one epoch; at the end it starts anew."""

    def __init__(self, orders: Sequence[SampleOrder]) -> None:
        self._orders, self.seq_len = orders, orders[0].seq_len
        self._sizes = np.array([len(order) for order in orders])
        self._ends = np.cumsum(self._sizes)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: np.ndarray) -> TokenWindows:
        """As `SampleOrder.read`."""
        indices = indices % len(self)
        which = np.searchsorted(self._ends, indices, side="right")
        return merged(which, lambda i, rows: self._orders[i].read(indices[rows] - (self._ends[i] - self._sizes[i])))


class RowReader:
    """The rows of an order, as the loader reads them.

    Args:
      order: of the windows; position g of the rows is its position g.
      eod: id of the end-of-document token, None where it is unknown. An EOD starts the document after it: it is the input from which that
        document's first token is predicted.
      documents: `joined`, or `separate` / `packed` for segment_ids and positions.
      mask_document_start: weight 0 on the first token of each document.
      fill_in_middle: rearranges the documents within a window; not for packed ones.

    Raises:
      ConfigError: what was asked for needs an EOD, and it is unknown.
    """

    def __init__(
        self,
        order: SampleOrder,
        *,
        eod: int | None,
        documents: Literal["joined", "separate", "packed"] = "joined",
        mask_document_start: bool = False,
        fill_in_middle: FillInMiddle | None = None,
    ) -> None:
        if eod is None and (documents != "joined" or mask_document_start):
            asked = "data.mask_document_start" if documents == "joined" else f"data.documents={documents}"
            raise ConfigError(f"{asked}: the end-of-document token of this data is not known; set data.tokenizer")
        self.order, self.seq_len = order, order.seq_len
        self._eod, self._separate = eod, documents != "joined"
        self._mask_document_start, self._fill_in_middle = mask_document_start, fill_in_middle

    def __len__(self) -> int:
        """Sequences in one epoch."""
        return len(self.order)

    def require(self, global_batch: int) -> None:
        """Raises ConfigError when one epoch has fewer sequences than one global batch."""
        if len(self) < global_batch:
            raise ConfigError(
                f"the corpus has {len(self)} sequences of {self.seq_len} tokens, fewer than train.global_batch={global_batch}; "
                f"give more text (data.path), a smaller model.seq_len, or train.global_batch <= {len(self)}"
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
          Unless documents are joined: segment_ids, int32 [B, S], one higher from each start of a document on; positions, int32 [B, S], 0
          at each (and at the start of the sequence).

        Raises:
          ConfigError: a token id that the model does not have.
        """
        indices = indices.astype(np.int64)
        windows = self.order.read(indices)
        if self._fill_in_middle:
            windows = self._rearranged(windows, indices)
        out = {"tokens": windows.tokens, "labels": windows.labels, "weights": windows.weights, "sample_ids": indices.astype(np.uint32)}
        if self._mask_document_start:
            out["weights"][windows.tokens == self._eod] = 0.0
        if self._separate:
            starts = windows.tokens == self._eod if windows.starts is None else windows.starts
            places = np.arange(self.seq_len, dtype=np.int32)
            out["segment_ids"] = np.cumsum(starts, axis=1, dtype=np.int32)
            out["positions"] = places - np.maximum.accumulate(np.where(starts, places, 0), axis=1)
        return out

    def _rearranged(self, windows: TokenWindows, indices: np.ndarray) -> TokenWindows:
        assert self._fill_in_middle is not None and windows.starts is None
        text = np.concatenate([windows.tokens, windows.labels[:, -1:]], axis=1)
        counts = [self._fill_in_middle(row, int(g)) for row, g in zip(text, indices, strict=True)]
        kept = np.arange(1, text.shape[1]) < np.array(counts)[:, None]  # labels that are text and not padding
        return TokenWindows(text[:, :-1], text[:, 1:], windows.weights * kept)
