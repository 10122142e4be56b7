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

Legend: B windows, S sequence length, W = S + 1 tokens of a sample (S without an extra token),
D documents in all epochs, N samples, P pieces (the part of one document that is in one sample).
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
"""Fraction of the last epoch below which it is shuffled separately."""
_WEIGHT = r"\s*(\d+\.?\d*|\.\d+)\s*"
_SPLIT = re.compile(rf"{_WEIGHT}(,{_WEIGHT}){{0,2}}")


def split_ranges(split: str, n: int) -> tuple[range, range, range]:
    """Returns the document numbers of the training, validation and test splits of n documents.

    Args:
      split: up to three weights, such as "969,30,1"; they are normalized.

    Raises:
      ConfigError: `split` does not have this form.
    """
    has_nonzero_digit = re.search("[1-9]", split)
    if not _SPLIT.fullmatch(split) or not has_nonzero_digit:
        raise ConfigError(
            f"data.split={split!r} must be up to three weights of training, validation and test "
            "documents, as 969,30,1"
        )
    weights = [float(weight) for weight in split.split(",")]
    weights = np.array([*weights, 0.0, 0.0][:3])
    shares = (weights / np.sum(weights)).tolist()
    bounds = [0.0, *itertools.accumulate(shares)]
    ends = [round(bound * float(n)) for bound in bounds]  # rounds half to even, as Megatron does
    return range(ends[0], ends[1]), range(ends[1], ends[2]), range(ends[2], ends[3])


@dataclasses.dataclass(frozen=True)
class EpochCount:
    """How many epochs a number of samples needs, and whether the last is shuffled separately."""

    n: int
    separate_last: bool

    @classmethod
    def of(
        cls, n_samples: int, n_tokens: int, seq_len: int, extra_token: bool = True
    ) -> EpochCount:
        """Returns the epochs for `n_samples`. n_tokens: tokens in one epoch, at least 1."""
        n_needed = n_samples * seq_len + extra_token
        n_epochs = max(1, -(-n_needed // n_tokens))
        if n_epochs == 1:
            return cls(1, False)
        n_before_last = samples_in((n_epochs - 1) * n_tokens, seq_len, extra_token)
        n_per_epoch = samples_in(n_tokens, seq_len, extra_token)
        n_last = n_samples - n_before_last
        return cls(n_epochs, n_last < int(_SEPARATE_BELOW * n_per_epoch))


def samples_in(n_tokens: int, seq_len: int, extra_token: bool = True) -> int:
    """Returns how many samples these tokens give."""
    return (n_tokens - extra_token) // seq_len


def sample_index(lengths: np.ndarray, seq_len: int, extra_token: bool = True) -> np.ndarray:
    """Returns where each sample begins: [N + 1, 2] (number of its first document, offset in it).

    It is int32 where that is wide enough. The last row is where a further sample would begin.
    lengths: of the documents in order, [D]. Megatron's `build_sample_idx`.
    """
    document_ends = np.cumsum(lengths, dtype=np.int64)
    n_samples = samples_in(int(document_ends[-1]), seq_len, extra_token)
    sample_offsets = np.arange(n_samples + 1) * seq_len

    # A sample begins in the document of this token. Without an extra token, that is the last token
    # of the previous sample, so that a sample may begin at the end of a document.
    tokens = sample_offsets.copy() if extra_token else sample_offsets - 1
    tokens[0] = -1  # the first sample begins with the first document, even if that is empty
    documents = np.searchsorted(document_ends, tokens, side="right")

    largest = max(len(lengths), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    document_starts = document_ends[documents] - lengths[documents]
    index = np.empty((n_samples + 1, 2), dtype)
    index[:, 0] = documents
    index[:, 1] = sample_offsets - document_starts
    return index


class GPTDataset:
    """The sample order of one split of one prefix. Thread-safe; holds only memory maps.

    Args:
      text: the split.
      seq_len: S.
      n_samples: samples needed; `len` rounds this up to full epochs.
      seed: Megatron's `--seed`.
      extra_token: Megatron's `add_extra_token_to_sequence`.
      eod: id of the end-of-document token; None: unknown, so that the windows do not say where
        documents begin that no EOD precedes.

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
        self.seq_len = seq_len
        self._width = seq_len + extra_token
        self._text = text
        self._eod = eod

        epochs = EpochCount(0, False)
        if text.n_tokens:
            epochs = EpochCount.of(n_samples, text.n_tokens, seq_len, extra_token)
        if text.n_tokens * epochs.n < self._width:
            raise ConfigError(
                f"{text.prefix} has {text.n_tokens} tokens in this split ({len(text)} documents "
                f"from document {text.first} on), fewer than one sample needs ({self._width}); "
                "leave it out of data.blend, or set another data.split or a smaller model.seq_len"
            )

        key = {
            "data": fingerprint,
            "documents": [text.first, len(text)],
            "seq_len": seq_len,
            "seed": seed,
            **dataclasses.asdict(epochs),
        }
        # Not in the key by default: that is the key of caches from before there was the option.
        if not extra_token:
            key["extra_token"] = False

        def build_arrays() -> Arrays:
            lengths = np.diff(np.asarray(text.offsets)).astype(np.int32)
            return build(lengths, seq_len, epochs, seed, extra_token)

        arrays = cache.get("gpt", key, build_arrays, size=len(text) * epochs.n)
        self._documents = arrays["documents"]
        self._samples = arrays["samples"]
        self._shuffle = arrays["shuffle"]

    def __len__(self) -> int:
        return len(self._shuffle)

    def read(self, indices: np.ndarray) -> TokenWindows:
        """Returns the windows at positions int64 [B], modulo `len`.

        Raises ConfigError for a token id that the model lacks.
        """
        # A sample is the tokens from its own beginning to that of the next sample. These are pieces
        # of documents, [P] in all; `row` is the window of each piece.
        samples = self._shuffle[indices % len(self)].astype(np.int64)
        first_document, first_offset = self._samples[samples].T.astype(np.int64)
        last_document, _ = self._samples[samples + 1].T.astype(np.int64)
        row, position = ranges(first_document, last_document + 1)
        documents = self._documents[position]
        starts = self._text.offsets[documents]
        stops = self._text.offsets[documents + 1]
        is_first = np.flatnonzero(np.diff(row, prepend=-1))
        starts[is_first] += first_offset

        # Truncate each row to W tokens. Its documents have at least as many after the first offset.
        # `ends` are positions among the B W tokens of the result.
        ends = np.cumsum(stops - starts)
        tokens_before_row = np.concatenate(([0], ends[is_first[1:] - 1]))
        ends_in_row = np.minimum(ends - tokens_before_row[row], self._width)
        ends = ends_in_row + row * self._width
        sizes = np.diff(ends, prepend=0)
        begins = ends - sizes

        # Where each of the B W tokens is in the stream.
        offsets = np.repeat(starts - begins, sizes) + np.arange(len(samples) * self._width)

        tokens = self._text.verified(starts, starts + sizes).take(offsets)
        tokens = tokens.astype(np.int32).reshape(len(samples), self._width)
        self._text.check(tokens, lambda row, column: int(offsets[row * self._width + column]))
        unmarked = None
        if self._eod is not None:
            unmarked = self._unmarked(tokens, documents, row, begins)
        if self._width > self.seq_len:
            return TokenWindows.of(tokens, unmarked)

        # Without an extra token the last position has no label.
        padding = ((0, 0), (0, 1))
        if unmarked is not None:
            unmarked = np.pad(unmarked, padding)
        windows = TokenWindows.of(np.pad(tokens, padding), unmarked)
        windows.weights[:, -1] = 0.0
        return windows

    def _unmarked(
        self, tokens: np.ndarray, documents: np.ndarray, row: np.ndarray, begins: np.ndarray
    ) -> np.ndarray:
        """Returns where documents begin that no EOD precedes, bool [B, W].

        Args:
          tokens: of the windows, [B, W].
          documents, row, begins: int64 [P], the document of each piece, its window, and where it
            begins among the B W tokens.
        """
        unmarked = np.zeros(tokens.size, bool)
        # An empty document may begin where its window ends, and the first of a window begins in
        # column 0.
        is_inside = (begins > row * self._width) & (begins < (row + 1) * self._width)
        pieces = np.flatnonzero(is_inside)
        pieces = pieces[tokens.ravel()[begins[pieces] - 1] != self._eod]
        pieces = pieces[self._text.ends_document(documents[pieces - 1])]
        unmarked[begins[pieces]] = True
        return unmarked.reshape(tokens.shape)


def build(
    lengths: np.ndarray,
    seq_len: int,
    epochs: EpochCount,
    seed: int,
    extra_token: bool = True,
) -> Arrays:
    """Returns Megatron's three indices.

    documents: int32 [D], numbers in the split; samples: [N + 1, 2], as `sample_index` returns them;
    shuffle: uint32 or int64 [N]. lengths: int32, of the split's documents.
    """
    random = np.random.RandomState(seed % 2**32)
    n_joint_epochs = epochs.n - 1 if epochs.separate_last else epochs.n

    documents = np.tile(np.arange(len(lengths), dtype=np.int32), epochs.n)
    _shuffle(documents, n_joint_epochs * len(lengths), random)
    samples = sample_index(lengths[documents], seq_len, extra_token)

    n_samples = len(samples) - 1
    n_joint_samples = n_samples
    if epochs.separate_last:
        n_tokens = int(lengths.sum(dtype=np.int64))
        n_joint_samples = samples_in(n_joint_epochs * n_tokens, seq_len, extra_token)
    dtype = np.uint32 if n_samples < np.iinfo(np.uint32).max - 1 else np.int64
    shuffle = np.arange(n_samples, dtype=dtype)
    _shuffle(shuffle, n_joint_samples, random)
    return {"documents": documents, "samples": samples, "shuffle": shuffle}


def _shuffle(array: np.ndarray, n: int, random: np.random.RandomState) -> None:
    """Shuffles the first n elements, then the others."""
    random.shuffle(array[:n])
    if n < len(array):
        random.shuffle(array[n:])
