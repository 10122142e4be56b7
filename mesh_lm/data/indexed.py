r"""Tokenized documents in Megatron's .bin/.idx format, read by memory map.

`<prefix>.bin` holds the token ids of all documents back to back. `<prefix>.idx` holds, little-endian and unpadded:

  magic `MMIDIDX\0\0` | version u64 = 1 | dtype code u8 | sequences u64 | document indices u64
  lengths i32[sequences] | byte offsets i64[sequences] | document indices i64[documents + 1]: first sequence of each document, and the end

Source: megatron/core/datasets/indexed_dataset.py of Megatron-LM (`_IndexWriter`, `_IndexReader`, `DType`). The writer stores one sequence
per document; the reader takes any number. A *sequence* of the format is a document to Megatron's GPTDataset, and so to `TokenStream`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mesh_lm.data.atomic import atomic_write
from mesh_lm.errors import ConfigError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_UINT16_VOCAB = 65500  # Megatron's threshold (`DType.optimal_dtype`)
_BLOCK = 2**20
"""Documents per block when an index is written."""
_SAMPLED = 2**20
"""Bytes at each end of the .bin that its fingerprint covers."""


def bin_path(prefix: Path | str) -> Path:
    """Returns <prefix>.bin."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    """Returns <prefix>.idx."""
    return Path(f"{prefix}.idx")


class Documents:
    """The documents stored under a prefix.

    Attributes:
      prefix: as given.
      tokens: all documents back to back, [total tokens], a read-only memory map in the file's integer type.
      offsets: int64 [documents + 1]; document i is tokens[offsets[i] : offsets[i + 1]].
      sequences: int64 [sequences + 1], the offsets of the format's sequences.

    Raises:
      ConfigError: a file is missing, truncated, or not of this format; the message names the file.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    sequences: np.ndarray

    def __init__(self, prefix: Path | str) -> None:
        data, index = _map(bin_path(prefix)), _map(idx_path(prefix))
        if len(index) < _HEADER.size:
            raise _broken(idx_path(prefix), f"it has {len(index)} bytes, fewer than the header's {_HEADER.size}")
        magic, version, code, n_sequences, n_indices = _HEADER.unpack(index[: _HEADER.size].tobytes())
        if magic != _MAGIC:
            raise _broken(idx_path(prefix), f"it starts with {magic!r} instead of {_MAGIC!r}")
        if version != 1 or code not in _DTYPES:
            raise _broken(idx_path(prefix), f"version {version} and dtype code {code}; readable are version 1 and codes {sorted(_DTYPES)}")
        expected = _HEADER.size + 12 * n_sequences + 8 * n_indices
        if len(index) != expected:
            raise _broken(idx_path(prefix), f"it has {len(index)} bytes, but its header implies {expected}")
        lengths = np.frombuffer(index, "<i4", n_sequences, _HEADER.size)
        pointers = np.frombuffer(index, "<i8", n_sequences, _HEADER.size + 4 * n_sequences)
        indices = np.frombuffer(index, "<i8", n_indices, _HEADER.size + 12 * n_sequences)

        ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        dtype = _DTYPES[code]
        if n_sequences and (lengths.min() < 0 or not np.array_equal(pointers, ends[:-1] * dtype.itemsize)):
            raise _broken(idx_path(prefix), "its sequences are not back to back in the .bin")
        if not n_indices or indices[0] != 0 or indices[-1] != n_sequences or (np.diff(indices) < 0).any():
            raise _broken(idx_path(prefix), f"its document indices do not run from 0 to its {n_sequences} sequences")
        if len(data) != ends[-1] * dtype.itemsize:
            raise _broken(bin_path(prefix), f"it has {len(data)} bytes, but its .idx implies {ends[-1] * dtype.itemsize}")
        self.prefix, self.tokens, self.offsets, self.sequences = str(prefix), data.view(dtype), ends[indices], ends

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self.offsets) - 1

    @property
    def source(self) -> str:
        """The file of the tokens, for errors."""
        return str(bin_path(self.prefix))

    def __getitem__(self, document: int) -> np.ndarray:
        """Returns the token ids of one document, [length]."""
        if not 0 <= document < len(self):
            raise IndexError(document)
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]

    def fingerprint(self) -> str:
        """Returns 16 hex digits of a SHA-256 of all lengths, the dtype, and the first and last MiB of tokens; paths do not count."""
        digest = hashlib.sha256(self.tokens.dtype.str.encode())
        digest.update(np.ascontiguousarray(self.sequences, "<i8").data)
        data = self.tokens.view(np.uint8)
        for part in (data[:_SAMPLED], data[-_SAMPLED:]):
            digest.update(part.tobytes())
        return digest.hexdigest()[:16]


def stored_tokens(prefix: Path | str) -> int:
    """Returns the number of tokens under a prefix, from the header and the file sizes alone. Raises ConfigError as `Documents`."""
    data, index = _map(bin_path(prefix)), _map(idx_path(prefix))
    _, _, code, *_ = _HEADER.unpack(index[: _HEADER.size].tobytes().ljust(_HEADER.size, b"\0"))
    return len(data) // _DTYPES[code].itemsize if code in _DTYPES else len(Documents(prefix).tokens)


class InMemory:
    """A single document in memory, for a `TokenStream`, with the attributes of `Documents`."""

    prefix = source = "the given token ids"

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.sequences = tokens, np.array([0, len(tokens)])


class TokenStream:
    """Consecutive sequences of a prefix as one stream of tokens.

    Attributes:
      tokens: the stream, [tokens], a view of the memory map.
      offsets: int64 [documents + 1]; document i is tokens[offsets[i] : offsets[i + 1]].
      first: number of the first sequence in the file.
    """

    def __init__(self, documents: Documents | InMemory, first: int = 0, stop: int | None = None, *, vocab: int | None = None) -> None:
        """Takes the sequences first to stop - 1 (default: all); vocab: number of ids that the model has (None: no check)."""
        stop = len(documents.sequences) - 1 if stop is None else stop
        bounds = documents.sequences[first : stop + 1]
        self._source = documents.source
        self.prefix, self.first, self.offsets = documents.prefix, first, bounds - bounds[0] if bounds[0] else bounds
        self.tokens, self._vocab = documents.tokens[bounds[0] : bounds[-1]], vocab
        is_unsigned = documents.tokens.dtype.kind == "u"
        self._is_always_valid = vocab is None or (is_unsigned and np.iinfo(documents.tokens.dtype).max < vocab)

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self.offsets) - 1

    def check(self, tokens: np.ndarray, offset_of: Callable[[int, int], int]) -> None:
        """Raises ConfigError if tokens [B, n] hold an id that the model lacks; `offset_of` maps (row, column) to a stream offset."""
        if self._is_always_valid or not tokens.size or (tokens.min() >= 0 and tokens.max() < (self._vocab or 0)):
            return
        row, column = np.argwhere((tokens < 0) | (tokens >= (self._vocab or 0)))[0]
        document = self.first + int(np.searchsorted(self.offsets, offset_of(int(row), int(column)), side="right")) - 1
        raise ConfigError(
            f"{self._source}, document {document}: token id {tokens[row, column]}, but model.vocab_size={self._vocab} "
            f"has ids 0 to {(self._vocab or 0) - 1}; set the vocab_size of this data's tokenizer, or give data of that tokenizer"
        )


def write_documents(prefix: Path | str, documents: Iterable[np.ndarray], *, vocab: int) -> Documents:
    """Writes documents (integer ids, [length] each) atomically under `prefix` and returns them opened; one is in memory at a time.

    Ids are stored as uint16 if vocab < 65500, as in Megatron, else as int32. The .idx is renamed last. An exception, also one raised by
    `documents`, leaves existing files untouched.

    Raises:
      ValueError: an id outside 0..vocab - 1.
      ConfigError: a document longer than the format's 2^31 - 1 tokens.
      OSError: the disk is full or not writable; the error has the path.
    """
    dtype = dtype_of(vocab)
    lengths: list[int] = []
    with atomic_write(bin_path(prefix), idx_path(prefix)) as (data, index):
        for ids in documents:
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
                raise ValueError(f"document {len(lengths)} has ids {ids.min()} to {ids.max()}, outside 0 to {vocab - 1}")
            if len(ids) >= 2**31:
                raise ConfigError(f"document {len(lengths)} has {len(ids)} tokens; the .idx format holds up to 2^31 - 1: split it")
            data.write(ids.astype(dtype).data)
            lengths.append(len(ids))
        write_index(index, np.array(lengths, np.int32), dtype)
    return Documents(prefix)


def dtype_of(vocab: int) -> np.dtype:
    """Returns the dtype in which ids of a vocabulary of this size are stored."""
    return np.dtype("<u2") if vocab < _UINT16_VOCAB else np.dtype("<i4")


def write_index(index: BinaryIO, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Writes an .idx with one sequence per document. lengths, int32 [documents], may be a memory map: it is read in blocks."""
    index.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype], len(lengths), len(lengths) + 1))
    blocks = range(0, len(lengths) + 1, _BLOCK)
    for i in blocks:
        index.write(lengths[i : i + _BLOCK].astype("<i4").data)
    offset = 0
    for i in blocks:
        ends = offset + np.cumsum(sizes := lengths[i : i + _BLOCK].astype(np.int64) * dtype.itemsize)
        index.write((ends - sizes).astype("<i8").data)
        offset = int(ends[-1]) if len(ends) else offset
    for i in blocks:
        index.write(np.arange(i, min(i + _BLOCK, len(lengths) + 1), dtype="<i8").data)


def _map(path: Path) -> np.ndarray:
    """Returns a file's bytes as a memory map, uint8 [size]."""
    try:
        if path.stat().st_size == 0:  # mmap refuses empty files
            return np.empty(0, np.uint8)
        return np.asarray(np.memmap(path, np.uint8, "r"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; tokens are a .bin and an .idx file of the same name") from error


def _broken(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} is truncated or not a Megatron .bin/.idx file: {reason}; write it again")
