r"""Tokenized documents in Megatron's .bin/.idx format, read by memory map.

`<prefix>.bin` holds the token ids of all documents back to back. `<prefix>.idx` holds,
little-endian and unpadded:

  magic `MMIDIDX\0\0` | version u64 = 1 | dtype code u8 | sequences u64 | document indices u64
  lengths i32[sequences] | byte offsets i64[sequences] | document indices i64[documents + 1]: first
  sequence of each document, and the end

Source: megatron/core/datasets/indexed_dataset.py of Megatron-LM (`_IndexWriter`, `_IndexReader`,
`DType`). The writer stores one sequence per document; the reader takes any number. A *sequence* of
the format is a document to Megatron's GPTDataset, and so to `TokenStream`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mesh_lm.data import digests
from mesh_lm.data.atomic import atomic_write
from mesh_lm.data.digests import digests_path
from mesh_lm.data.offsets import Offsets
from mesh_lm.errors import ConfigError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}.items()
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_UINT16_VOCAB = 65500  # Megatron's threshold (`DType.optimal_dtype`)
_BLOCK = 2**20
"""Documents per block when an index is written or checked."""
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

    If there is a `<prefix>.digests`, the .idx is verified at once, and each block of the .bin when
    it is first read.

    Attributes:
      prefix: as given.
      sequences: int64 [sequences + 1], the offsets of the format's sequences.
      dtype: the type of a token in the file.
      is_sealed: whether there is a `<prefix>.digests`, so that the tokens are verified.

    Raises:
      ConfigError: a file is missing, truncated, damaged, or not of this format; the message names
      the file.
    """

    def __init__(self, prefix: Path | str, *, cure: str = "") -> None:
        """Opens the files of a prefix; cure: what to do about damaged ones (default: for a prefix
        that a user has prepared).
        """
        data, index = _map(bin_path(prefix)), _map(idx_path(prefix))
        cure = cure or (
            f"restore it from a copy, or remove {prefix}.bin, .idx, .json and .digests and prepare "
            f"the text again. If the tokens are as they should be, remove {digests_path(prefix)} "
            f"and run: mesh-lm prepare seal {prefix}"
        )
        self._digests = digests.read(prefix, cure)
        if self._digests:
            self._digests.check(idx_path(prefix), cure)
            self._digests.check(Path(f"{prefix}.json"), cure)
        if len(index) < _HEADER.size:
            raise _broken(
                idx_path(prefix),
                f"it has {len(index)} bytes, fewer than the header's {_HEADER.size}",
            )
        magic, version, code, n_sequences, n_indices = _HEADER.unpack(
            index[: _HEADER.size].tobytes()
        )
        if magic != _MAGIC:
            raise _broken(idx_path(prefix), f"it starts with {magic!r} instead of {_MAGIC!r}")
        if version != 1 or code not in _DTYPES:
            raise _broken(
                idx_path(prefix),
                (
                    f"version {version} and dtype code {code}; readable are version 1 and codes "
                    f"{sorted(_DTYPES)}"
                ),
            )
        expected = _HEADER.size + 12 * n_sequences + 8 * n_indices
        if len(index) != expected:
            raise _broken(
                idx_path(prefix), f"it has {len(index)} bytes, but its header implies {expected}"
            )
        lengths = np.frombuffer(index, "<i4", n_sequences, _HEADER.size)
        pointers = np.frombuffer(index, "<i8", n_sequences, _HEADER.size + 4 * n_sequences)
        indices = np.frombuffer(index, "<i8", n_indices, _HEADER.size + 12 * n_sequences)

        dtype, end = _DTYPES[code], 0
        for i in range(0, n_sequences, _BLOCK):
            sizes = lengths[i : i + _BLOCK].astype(np.int64)
            ends = end + np.cumsum(sizes)
            if sizes.min() < 0 or not np.array_equal(
                pointers[i : i + _BLOCK], (ends - sizes) * dtype.itemsize
            ):
                raise _broken(idx_path(prefix), "its sequences are not back to back in the .bin")
            end = int(ends[-1])
        if not n_indices or indices[0] != 0 or indices[-1] != n_sequences or not _ascends(indices):
            raise _broken(
                idx_path(prefix),
                f"its document indices do not run from 0 to its {n_sequences} sequences",
            )
        self._blocks = (
            digests.Blocks(bin_path(prefix), data, self._digests, cure) if self._digests else None
        )
        if len(data) != end * dtype.itemsize:
            raise _broken(
                bin_path(prefix),
                f"it has {len(data)} bytes, but its .idx implies {end * dtype.itemsize}",
            )
        self.prefix, self.sequences, self.dtype = (
            str(prefix),
            Offsets(pointers, dtype.itemsize, end),
            dtype,
        )
        self._first, self._starts = indices, Offsets(indices[:-1], 1, int(indices[-1]))
        self.unverified, self.is_sealed = data.view(dtype), self._digests is not None

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self._first) - 1

    @property
    def offsets(self) -> np.ndarray:
        """Returns int64 [documents + 1] in memory; document i is tokens[offsets[i] : offsets[i +
        1]].
        """
        return self.sequences[self._first]

    def ends_document(self, sequences: np.ndarray) -> np.ndarray:
        """Returns whether each of the format's sequences, int64 [n], is the last one of its
        document, bool [n].
        """
        return self._starts[self._starts.search(sequences + 1)] == sequences + 1

    @property
    def source(self) -> str:
        """The file of the tokens, for errors."""
        return str(bin_path(self.prefix))

    def __getitem__(self, document: int) -> np.ndarray:
        """Returns the token ids of one document, [length]."""
        if not 0 <= document < len(self):
            raise IndexError(document)
        start, stop = self.sequences[self._first[document : document + 2]]
        self.require(start[None], stop[None])
        return self.unverified[start:stop]

    @property
    def tokens(self) -> np.ndarray:
        """All documents back to back, [total tokens], a read-only memory map in the file's integer
        type; all of it is verified now.
        """
        if self._blocks:
            self._blocks.require_all()
        return self.unverified

    def require(self, starts: np.ndarray, stops: np.ndarray, base: int = 0) -> None:
        """Verifies the tokens base + starts[i] to base + stops[i] - 1, int64 [n], of `unverified`.
        Raises ConfigError for damage.
        """
        if self._blocks and not self._blocks.complete:
            self._blocks.require(
                (starts + base) * self.dtype.itemsize, (stops + base) * self.dtype.itemsize
            )

    def fingerprint(self) -> str:
        """Identifies the data by its contents; paths do not count.

        Returns 16 hex digits of a SHA-256 of all lengths, the dtype, and the first and last MiB of
        tokens. If the prefix is sealed, they are from the time of sealing, and a hyphen and 16 hex
        digits of the seal follow, which covers all tokens.
        """
        return (
            f"{self._digests.sampled}-{self._digests.own[:16]}"
            if self._digests
            else _sampled(self.sequences, self.unverified)
        )

    def seal(self, about: bytes | None = None) -> None:
        """Writes `<prefix>.digests` for the files as they are; about: contents of the
        `<prefix>.json` to come, else that of now.

        Raises:
          OSError: the disk is full or not writable.
        """
        beside = Path(f"{self.prefix}.json")
        about = beside.read_bytes() if about is None and beside.exists() else about
        content = digests.of(
            bin_path(self.prefix),
            idx_path(self.prefix),
            about,
            _sampled(self.sequences, self.unverified),
        )
        with atomic_write(digests_path(self.prefix)) as (file,):
            file.write(content)


def stored_tokens(prefix: Path | str) -> int:
    """Returns the number of tokens under a prefix, from the header and the file sizes alone. Raises
    ConfigError as `Documents`.
    """
    data, index = _map(bin_path(prefix)), _map(idx_path(prefix))
    _, _, code, *_ = _HEADER.unpack(index[: _HEADER.size].tobytes().ljust(_HEADER.size, b"\0"))
    return len(data) // _DTYPES[code].itemsize if code in _DTYPES else len(Documents(prefix).tokens)


class InMemory:
    """Documents in memory, for a `TokenStream`, with the attributes of `Documents`; sequences:
    their offsets, default: of one document.
    """

    prefix = source = "the given token ids"

    def __init__(self, tokens: np.ndarray, sequences: np.ndarray | None = None) -> None:
        self.unverified, self.dtype = tokens, tokens.dtype
        ends = np.array([0, len(tokens)]) if sequences is None else sequences
        self.sequences = Offsets(ends[:-1], 1, int(ends[-1]))

    def require(self, starts: np.ndarray, stops: np.ndarray, base: int = 0) -> None:
        """Does nothing, because memory is not verified."""

    def ends_document(self, sequences: np.ndarray) -> np.ndarray:
        """Returns True for each of the sequences, int64 [n]: each is a document."""
        return np.ones(sequences.shape, bool)


class TokenStream:
    """Consecutive sequences of a prefix as one stream of tokens.

    Attributes:
      n_tokens: tokens of the stream. offsets: like int64 [documents + 1]; document i is the tokens
      offsets[i] to offsets[i + 1] - 1. first: number of the first sequence in the file.
    """

    def __init__(
        self,
        documents: Documents | InMemory,
        first: int = 0,
        stop: int | None = None,
        *,
        vocab: int | None = None,
    ) -> None:
        """Takes the sequences first to stop - 1 (default: all); vocab: number of ids that the model
        has (None: no check).
        """
        stop = len(documents.sequences) - 1 if stop is None else stop
        self.offsets = documents.sequences.part(first, stop)
        self._documents, self._base, end = (
            documents,
            int(documents.sequences[first]),
            int(documents.sequences[stop]),
        )
        self.prefix, self.first = documents.prefix, first
        self._tokens, self._vocab = documents.unverified[self._base : end], vocab
        self.n_tokens = len(self._tokens)
        self._is_always_valid = vocab is None or (
            documents.dtype.kind == "u" and np.iinfo(documents.dtype).max < vocab
        )

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self.offsets) - 1

    def verified(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns the tokens of the stream, [n_tokens], a view of the memory map of which the given
        ranges are verified.

        starts, stops: int64 [n], where the ranges begin and end. Raises ConfigError if they are
        damaged.
        """
        self._documents.require(starts, stops, self._base)
        return self._tokens

    def ends_document(self, sequences: np.ndarray) -> np.ndarray:
        """Returns whether a document ends with each of the stream's sequences, int64 [n]; those of
        a file may be sentences.
        """
        return self._documents.ends_document(sequences + self.first)

    def check(self, tokens: np.ndarray, offset_of: Callable[[int, int], int]) -> None:
        """Raises ConfigError if tokens [B, n] hold an id that the model lacks; `offset_of` maps
        (row, column) to a stream offset.
        """
        if (
            self._is_always_valid
            or not tokens.size
            or (tokens.min() >= 0 and tokens.max() < (self._vocab or 0))
        ):
            return
        row, column = np.argwhere((tokens < 0) | (tokens >= (self._vocab or 0)))[0]
        document = (
            self.first
            + int(
                np.searchsorted(
                    np.asarray(self.offsets), offset_of(int(row), int(column)), side="right"
                )
            )
            - 1
        )
        raise ConfigError(
            f"{self._documents.source}, document {document}: token id {tokens[row, column]}, but "
            f"model.vocab_size={self._vocab} has ids 0 to {(self._vocab or 0) - 1}; set the "
            "vocab_size of this data's tokenizer, or give data of that tokenizer"
        )


def write_documents(
    prefix: Path | str, documents: Iterable[np.ndarray], *, vocab: int
) -> Documents:
    """Writes documents (integer ids, [length] each), sealed, atomically under `prefix` and returns
    them opened; one is in memory at a time.

    Ids are stored as uint16 if vocab < 65500, as in Megatron, else as int32. The .idx is renamed
    last. An exception, also one raised by `documents`, leaves existing files untouched.

    Raises:
      ValueError: an id outside 0..vocab - 1.
      ConfigError: a document longer than the format's 2^31 - 1 tokens.
      OSError: the disk is full or not writable; the error has the path.
    """
    dtype = dtype_of(vocab)
    lengths: list[int] = []
    with atomic_write(bin_path(prefix), digests_path(prefix), idx_path(prefix)) as (
        data,
        sums,
        index,
    ):
        for ids in documents:
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
                raise ValueError(
                    f"document {len(lengths)} has ids {ids.min()} to {ids.max()}, outside 0 to "
                    f"{vocab - 1}"
                )
            if len(ids) >= 2**31:
                raise ConfigError(
                    f"document {len(lengths)} has {len(ids)} tokens; the .idx format holds up to "
                    "2^31 - 1: split it"
                )
            data.write(ids.astype(dtype).data)
            lengths.append(len(ids))
        write_index(index, np.array(lengths, np.int32), dtype)
        for file in (data, index):
            file.flush()
        starts = np.cumsum([0, *lengths])
        ends = Offsets(starts[:-1], 1, int(starts[-1]))
        sums.write(
            digests.of(
                Path(data.name),
                Path(index.name),
                None,
                _sampled(ends, _map(Path(data.name)).view(dtype)),
            )
        )
    return Documents(prefix)


def seal(prefix: str) -> str:
    """Seals the files of a prefix, or verifies all of them if they are sealed. Returns a line about
    it; raises ConfigError.
    """
    documents = Documents(Path(prefix).expanduser())
    size = f"{len(documents):,} documents, {len(documents.tokens):,} tokens"
    if documents.is_sealed:
        return f"{prefix}: intact ({size})"
    try:
        documents.seal()
    except OSError as error:
        raise ConfigError(f"cannot seal {prefix}: {error.strerror} ({error.filename})") from error
    return f"{prefix}: sealed ({size})"


def dtype_of(vocab: int) -> np.dtype:
    """Returns the dtype in which ids of a vocabulary of this size are stored."""
    return np.dtype("<u2") if vocab < _UINT16_VOCAB else np.dtype("<i4")


def write_index(index: BinaryIO, lengths: np.ndarray, dtype: np.dtype) -> None:
    """Writes an .idx with one sequence per document. lengths, int32 [documents], may be a memory
    map: it is read in blocks.
    """
    index.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype], len(lengths), len(lengths) + 1))
    blocks = range(0, len(lengths) + 1, _BLOCK)
    for i in blocks:
        index.write(lengths[i : i + _BLOCK].astype("<i4").data)
    offset = 0
    for i in blocks:
        ends = offset + np.cumsum(
            sizes := lengths[i : i + _BLOCK].astype(np.int64) * dtype.itemsize
        )
        index.write((ends - sizes).astype("<i8").data)
        offset = int(ends[-1]) if len(ends) else offset
    for i in blocks:
        index.write(np.arange(i, min(i + _BLOCK, len(lengths) + 1), dtype="<i8").data)


def _ascends(indices: np.ndarray) -> bool:
    return all(
        (np.diff(indices[i : i + _BLOCK + 1]) >= 0).all() for i in range(0, len(indices), _BLOCK)
    )


def _sampled(sequences: Offsets, tokens: np.ndarray) -> str:
    """Returns 16 hex digits: of a SHA-256 of the offsets, the dtype, and the first and last MiB of
    the tokens.
    """
    digest = hashlib.sha256(tokens.dtype.str.encode())
    for offsets in sequences.blocks():
        digest.update(np.ascontiguousarray(offsets, "<i8").data)
    data = tokens.view(np.uint8)
    for part in (data[:_SAMPLED], data[-_SAMPLED:]):
        digest.update(part.tobytes())
    return digest.hexdigest()[:16]


def _map(path: Path) -> np.ndarray:
    """Returns a file's bytes as a memory map, uint8 [size]."""
    try:
        if path.stat().st_size == 0:  # mmap refuses empty files
            return np.empty(0, np.uint8)
        return np.asarray(np.memmap(path, np.uint8, "r"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}; tokens are a .bin and an .idx file of the same "
            "name"
        ) from error


def _broken(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{path} is truncated or not a Megatron .bin/.idx file: {reason}; write it again"
    )
