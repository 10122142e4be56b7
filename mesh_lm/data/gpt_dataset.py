"""The sample order of Megatron-LM's `GPTDataset`, bit for bit, in NumPy.

As many epochs of the split's documents as the requested samples need are shuffled and concatenated.
Sample i is the S + 1 tokens from offset i S, so that neighbours overlap by one. Then the samples
are shuffled. If less than 80% of the last epoch is needed, it is shuffled separately, so that
documents seen once more do not displace those of full epochs.

Source: megatron/core/datasets/gpt_dataset.py, blended_megatron_dataset_{config,builder}.py and
helpers.cpp of Megatron-LM (megatron-core 0.16.1). The last partial sequence is dropped, and a
sample has one extra token, from which its last label comes, unless `extra_token` is False
(`add_extra_token_to_sequence`): then sample i is the S tokens from offset i S, without a label for
the last of them.

A document of the split string is a *sequence* of the .idx file, which is the same unless the file
was written sentence by sentence.

Legend: B windows, S sequence length, D documents in all epochs, N samples.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

import numpy as np

from mesh_lm.data.index_cache import Arrays, IndexCache
from mesh_lm.data.indexed import TokenStream
from mesh_lm.data.rows import TokenWindows, ranges
from mesh_lm.errors import ConfigError

SPLITS = ("train", "valid", "test")
_SEPARATE_BELOW = 0.80


def split_ranges(split: str, n: int) -> tuple[range, range, range]:
    """Returns the document numbers of the training, validation and test splits of n documents.

    Args:
      split: up to three weights, such as "969,30,1"; they are normalized.

    Raises:
      ConfigError: `split` does not have this form.
    """
    if not re.fullmatch(
        r"\s*(\d+\.?\d*|\.\d+)(\s*,\s*(\d+\.?\d*|\.\d+)){0,2}\s*", split
    ) or not re.search("[1-9]", split):
        raise ConfigError(
            f"data.split={split!r} must be up to three weights of training, validation and test "
            "documents, as 969,30,1"
        )
    weights = np.array([*map(float, split.split(",")), 0.0, 0.0][:3])
    bounds = [0.0, *itertools.accumulate((weights / np.sum(weights)).tolist())]
    ends = [round(bound * float(n)) for bound in bounds]  # rounds half to even
    return (range(ends[0], ends[1]), range(ends[1], ends[2]), range(ends[2], ends[3]))


@dataclasses.dataclass(frozen=True)
class EpochCount:
    """How many epochs a number of samples needs, and whether the last one is shuffled
    separately.
    """

    n: int
    separate_last: bool

    @classmethod
    def of(
        cls, n_samples: int, n_tokens: int, seq_len: int, extra_token: bool = True
    ) -> EpochCount:
        """Returns the epochs for `n_samples` of `seq_len` tokens; n_tokens: tokens in one epoch, at
        least 1.
        """
        n = max(1, -(-(n_samples * seq_len + extra_token) // n_tokens))
        from_last = n_samples - samples_in((n - 1) * n_tokens, seq_len, extra_token)
        return cls(
            n,
            n > 1 and from_last < int(_SEPARATE_BELOW * samples_in(n_tokens, seq_len, extra_token)),
        )


def samples_in(n_tokens: int, seq_len: int, extra_token: bool = True) -> int:
    """Returns how many sequences of S + 1 tokens, each overlapping the previous one by one, the
    tokens give; or of S tokens.
    """
    return (n_tokens - extra_token) // seq_len


def sample_index(lengths: np.ndarray, seq_len: int, extra_token: bool = True) -> np.ndarray:
    """Where each sample begins: (number of its first document, offset in it), [N + 1, 2], int32
    where that is wide enough.

    lengths: of the documents in order, [D]. The last row is where a further sample would begin.
    Megatron's `build_sample_idx`.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    dtype = (
        np.int32 if max(len(lengths), int(lengths.max())) <= np.iinfo(np.int32).max else np.int64
    )
    offsets = np.arange(samples_in(int(ends[-1]), seq_len, extra_token) + 1) * seq_len
    # Without an extra token, the last one of a sample is before its end, so that the next sample
    # may begin at the end of a document.
    lasts = offsets - (not extra_token)
    lasts[0] = -1  # the first sample begins with the first document, even if that is empty
    first = np.searchsorted(ends, lasts, side="right")
    index = np.empty((len(offsets), 2), dtype)
    index[:, 0] = first
    index[:, 1] = offsets - (ends[first] - lengths[first])
    return index


class GPTDataset:
    """The sample order of one split of one prefix. Thread-safe; holds only memory maps.

    Args:
      text: the split. seq_len: S. n_samples: samples needed; `len` rounds this up to full epochs.
      seed: Megatron's `--seed`. extra_token: Megatron's `add_extra_token_to_sequence`. eod: id of
      the end-of-document token; None: unknown, so that the windows do not say where documents begin
      that no EOD precedes.

    Raises:
      ConfigError: the split has too few tokens for one sample.
    """

    def __init__(
        self,
        text: TokenStream,
        seq_len: int,
        *,
        n_samples: int,
        seed: int,
        cache: IndexCache,
        fingerprint: str,
        extra_token: bool = True,
        eod: int | None = None,
    ) -> None:
        n_tokens, width = text.n_tokens, seq_len + extra_token
        epochs = (
            EpochCount.of(n_samples, n_tokens, seq_len, extra_token)
            if n_tokens
            else EpochCount(0, False)
        )
        if n_tokens * epochs.n < width:
            raise ConfigError(
                f"{text.prefix} has {n_tokens} tokens in this split ({len(text)} documents from "
                f"document {text.first} on), fewer than one sample needs ({width}); leave it out "
                "of data.blend, or set another data.split or a smaller model.seq_len"
            )
        self.seq_len, self._width, self._text, self._eod = seq_len, width, text, eod
        key = {
            "data": fingerprint,
            "documents": [text.first, len(text)],
            "seq_len": seq_len,
            "seed": seed,
        } | dataclasses.asdict(epochs)
        key |= {} if extra_token else {"extra_token": False}
        arrays = cache.get(
            "gpt",
            key,
            lambda: build(_lengths(text), seq_len, epochs, seed, extra_token),
            size=len(text) * epochs.n,
        )
        self._documents, self._samples, self._shuffle = (
            arrays[name] for name in ("documents", "samples", "shuffle")
        )

    def __len__(self) -> int:
        return len(self._shuffle)

    def read(self, indices: np.ndarray) -> TokenWindows:
        """Returns the windows at positions int64 [B], modulo `len`; raises ConfigError for an id
        that the model lacks.
        """
        samples = self._shuffle[indices % len(self)].astype(np.int64)
        (first, offset), (last, _) = (
            self._samples[samples].T.astype(np.int64),
            self._samples[samples + 1].T.astype(np.int64),
        )
        row, number = ranges(first, last + 1)
        documents = self._documents[number]
        starts, stops = self._text.offsets[documents], self._text.offsets[documents + 1]
        is_first = np.flatnonzero(np.diff(row, prepend=-1))
        starts[is_first] += offset
        # Each row's documents hold at least W = S + 1 tokens (S without the extra one) from the
        # first one's offset.
        ends = np.cumsum(stops - starts)
        before = np.concatenate(([0], ends[is_first[1:] - 1]))
        ends = np.minimum(ends - before[row], self._width) + row * self._width
        sizes = np.diff(ends, prepend=0)
        offsets = np.repeat(starts - (ends - sizes), sizes) + np.arange(len(samples) * self._width)
        text = (
            self._text.verified(starts, starts + sizes)
            .take(offsets)
            .astype(np.int32)
            .reshape(len(samples), self._width)
        )
        self._text.check(text, lambda row, column: int(offsets[row * self._width + column]))
        unmarked = None if self._eod is None else self._unmarked(text, documents, row, ends - sizes)
        if self._width > self.seq_len:
            return TokenWindows.of(text, unmarked)
        after = ((0, 0), (0, 1))
        windows = TokenWindows.of(
            np.pad(text, after), None if unmarked is None else np.pad(unmarked, after)
        )
        windows.weights[:, -1] = 0.0
        return windows

    def _unmarked(
        self, text: np.ndarray, documents: np.ndarray, row: np.ndarray, begins: np.ndarray
    ) -> np.ndarray:
        """Returns where documents begin that no EOD precedes, bool [B, W].

        Args:
          text: tokens [B, W]. documents, row, begins: int64 [n], the documents in the order of the
          windows, their windows, and where they begin in
            `text.ravel()`.
        """
        unmarked = np.zeros(text.size, bool)
        # An empty document may begin where its window ends, and the first of a window begins in
        # column 0.
        is_inside = (begins > row * self._width) & (begins < (row + 1) * self._width)
        followers = np.flatnonzero(is_inside)
        followers = followers[text.ravel()[begins[followers] - 1] != self._eod]
        followers = followers[self._text.ends_document(documents[followers - 1])]
        unmarked[begins[followers]] = True
        return unmarked.reshape(text.shape)


def _lengths(text: TokenStream) -> np.ndarray:
    return np.diff(np.asarray(text.offsets)).astype(np.int32)


def build(
    lengths: np.ndarray, seq_len: int, epochs: EpochCount, seed: int, extra_token: bool = True
) -> Arrays:
    """Returns Megatron's three indices: documents int32 [D] (numbers in the split), samples [N + 1,
    2], shuffle uint32 or int64 [N].
    """
    random = np.random.RandomState(seed % 2**32)
    together = epochs.n - epochs.separate_last
    documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs.n)
    _shuffle(documents, together * len(lengths), random)
    samples = sample_index(lengths[documents], seq_len, extra_token)
    n = len(samples) - 1
    shuffle = np.arange(n, dtype=np.uint32 if n < np.iinfo(np.uint32).max - 1 else np.int64)
    n_tokens = int(lengths.sum(dtype=np.int64))
    _shuffle(
        shuffle,
        samples_in(together * n_tokens, seq_len, extra_token) if epochs.separate_last else n,
        random,
    )
    return {"documents": documents, "samples": samples, "shuffle": shuffle}


def _shuffle(array: np.ndarray, n: int, random: np.random.RandomState) -> None:
    """Shuffles the first n elements, then the others."""
    random.shuffle(array[:n])
    if n < len(array):
        random.shuffle(array[n:])
