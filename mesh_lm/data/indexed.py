"""Tokenized documents on disk, in Megatron's .bin/.idx format, read by memory map.

`<prefix>.bin` holds the token ids of all documents back to back. `<prefix>.idx` holds, little-endian and unpadded:

  magic `MMIDIDX\\0\\0` | version u64 = 1 | dtype code u8 | sequences u64 | document indices u64
  lengths i32[sequences] | byte offsets i64[sequences] | document indices i64[documents + 1]: first sequence of each document, and the end

Source: megatron/core/datasets/indexed_dataset.py of Megatron-LM (`_IndexWriter`, `_IndexReader`, `DType`). The writer stores one sequence
per document; the reader takes any number.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mesh_lm.config import ConfigError
from mesh_lm.data.atomic import atomic_write

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {code: np.dtype(name) for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_UINT16_VOCAB = 65500  # Megatron's threshold (`DType.optimal_dtype`)


def bin_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: Path | str) -> Path:
    return Path(f"{prefix}.idx")


class Documents:
    """The documents under a prefix.

    Attributes:
      tokens: all documents back to back, [total tokens], a read-only memory map in the file's integer type.
      offsets: int64 [documents + 1]; document i is tokens[offsets[i] : offsets[i + 1]].

    Raises:
      ConfigError: a file is missing, truncated, or not of this format; the text names the file.
    """

    tokens: np.ndarray
    offsets: np.ndarray

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
        self.tokens, self.offsets = data.view(dtype), ends[indices]

    def __len__(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    def __getitem__(self, document: int) -> np.ndarray:
        """Token ids of one document, [its length]."""
        if not 0 <= document < len(self):
            raise IndexError(document)
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]


def write_documents(prefix: Path | str, documents: Iterable[np.ndarray], *, vocab: int) -> Documents:
    """Writes the documents (integer ids, [length] each) under `prefix`, atomically, one at a time in memory, and opens the result.

    Ids are stored as uint16 where Megatron does so (vocab < 65500), else as int32. The .idx is renamed last. An exception, also one raised
    by `documents`, leaves what was there before.

    Raises:
      ValueError: an id outside 0..vocab - 1.
      ConfigError: a document longer than the format's 2^31 - 1 tokens.
      OSError: with the path, when the disk is full or not writable.
    """
    dtype = np.dtype("<u2") if vocab < _UINT16_VOCAB else np.dtype("<i4")
    lengths: list[int] = []
    with atomic_write(bin_path(prefix), idx_path(prefix)) as (data, index):
        for ids in documents:
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
                raise ValueError(f"document {len(lengths)} has ids {ids.min()} to {ids.max()}, outside 0 to {vocab - 1}")
            if len(ids) >= 2**31:
                raise ConfigError(f"document {len(lengths)} has {len(ids)} tokens; the .idx format holds up to 2^31 - 1: split it")
            data.write(ids.astype(dtype).data)
            lengths.append(len(ids))
        sizes = np.array(lengths, np.int64)
        index.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype], len(sizes), len(sizes) + 1))
        index.write(sizes.astype("<i4").data)
        index.write(((np.cumsum(sizes) - sizes) * dtype.itemsize).astype("<i8").data)
        index.write(np.arange(len(sizes) + 1, dtype="<i8").data)
    return Documents(prefix)


def _map(path: Path) -> np.ndarray:
    """The file's bytes, uint8 [size], not read until used."""
    try:
        if path.stat().st_size == 0:  # mmap refuses empty files
            return np.empty(0, np.uint8)
        return np.asarray(np.memmap(path, np.uint8, "r"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; tokens are a .bin and an .idx file of the same name") from error


def _broken(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} is truncated or not a Megatron .bin/.idx file: {reason}; write it again")
