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
from typing import BinaryIO, NamedTuple

import numpy as np

from mesh_lm.data import digests
from mesh_lm.data.atomic import atomic_write
from mesh_lm.data.digests import digests_path
from mesh_lm.data.offsets import Offsets
from mesh_lm.errors import ConfigError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
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
      unverified: all tokens, a memory map in the file's integer type.
      is_sealed: whether there is a `<prefix>.digests`, so that the tokens are verified.

    Raises:
      ConfigError: a file is missing, truncated, damaged, or not of this format; the message names
        the file.
    """

    def __init__(self, prefix: Path | str, *, cure: str = "") -> None:
        """Opens the files of a prefix; cure: what to do about damaged ones (default: for a prefix
        that a user has prepared).
        """
        cure = cure or (
            f"restore it from a copy, or remove {prefix}.bin, .idx, .json and .digests and prepare "
            f"the text again. If the tokens are as they should be, remove {digests_path(prefix)} "
            f"and run: mesh-lm prepare seal {prefix}"
        )
        data = _map(bin_path(prefix))
        index = _map(idx_path(prefix))
        self._digests = digests.read(prefix, cure)
        if self._digests:
            self._digests.check(idx_path(prefix), cure)
            self._digests.check(Path(f"{prefix}.json"), cure)
        parsed = _parse_index(idx_path(prefix), index)

        # The blocks come first: their error for a wrong size names the cure.
        self._blocks = None
        if self._digests:
            self._blocks = digests.Blocks(bin_path(prefix), data, self._digests, cure)
        if len(data) != parsed.n_tokens * parsed.dtype.itemsize:
            raise _broken(
                bin_path(prefix),
                f"it has {len(data)} bytes, but its .idx implies "
                f"{parsed.n_tokens * parsed.dtype.itemsize}",
            )
        self.prefix = str(prefix)
        self.dtype = parsed.dtype
        self.sequences = Offsets(parsed.pointers, parsed.dtype.itemsize, parsed.n_tokens)
        self.unverified = data.view(parsed.dtype)
        self.is_sealed = self._digests is not None
        self._first_sequences = parsed.first_sequences
        self._document_starts = Offsets(
            parsed.first_sequences[:-1], 1, int(parsed.first_sequences[-1])
        )

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self._first_sequences) - 1

    @property
    def offsets(self) -> np.ndarray:
        """Where documents begin and end, int64 [documents + 1] in memory: document i is
        tokens[offsets[i] : offsets[i + 1]].
        """
        return self.sequences[self._first_sequences]

    def ends_document(self, sequences: np.ndarray) -> np.ndarray:
        """Returns whether each of the format's sequences, int64 [n], is the last one of its
        document, bool [n].
        """
        following = self._document_starts.search(sequences + 1)
        return self._document_starts[following] == sequences + 1

    @property
    def source(self) -> str:
        """The file of the tokens, for errors."""
        return str(bin_path(self.prefix))

    def __getitem__(self, document: int) -> np.ndarray:
        """Returns the token ids of one document, [length]."""
        if not 0 <= document < len(self):
            raise IndexError(document)
        start, stop = self.sequences[self._first_sequences[document : document + 2]]
        self.require(start[None], stop[None])
        return self.unverified[start:stop]

    @property
    def tokens(self) -> np.ndarray:
        """All documents back to back, [tokens], a read-only memory map in the file's integer type.

        Reading this attribute verifies all of it.
        """
        if self._blocks:
            self._blocks.require_all()
        return self.unverified

    def require(self, starts: np.ndarray, stops: np.ndarray, base: int = 0) -> None:
        """Verifies the tokens base + starts[i] to base + stops[i] - 1, int64 [n], of `unverified`.
        Raises ConfigError for damage.
        """
        if self._blocks and not self._blocks.complete:
            size = self.dtype.itemsize
            self._blocks.require((starts + base) * size, (stops + base) * size)

    def fingerprint(self) -> str:
        """Identifies the data by its contents; paths do not count.

        Returns 16 hex digits of a SHA-256 of all lengths, the dtype, and the first and last MiB of
        tokens. If the prefix is sealed, they are from the time of sealing, and a hyphen and 16 hex
        digits of the seal follow, which covers all tokens.
        """
        if self._digests:
            return f"{self._digests.sampled}-{self._digests.seal[:16]}"
        return _sampled(self.sequences, self.unverified)

    def seal(self, description: bytes | None = None) -> None:
        """Writes `<prefix>.digests` for the files as they are.

        description: contents of the `<prefix>.json` that will be written; None: those of the
        present one.

        Raises:
          OSError: the disk is full or not writable.
        """
        description_path = Path(f"{self.prefix}.json")
        if description is None and description_path.exists():
            description = description_path.read_bytes()
        sampled = _sampled(self.sequences, self.unverified)
        content = digests.of(bin_path(self.prefix), idx_path(self.prefix), description, sampled)
        with atomic_write(digests_path(self.prefix)) as (file,):
            file.write(content)


class _Index(NamedTuple):
    """The contents of an .idx."""

    dtype: np.dtype
    n_tokens: int
    pointers: np.ndarray
    """Byte offset of each sequence in the .bin, int64 [sequences]."""
    first_sequences: np.ndarray
    """First sequence of each document, and the end, int64 [documents + 1]."""


def _parse_index(path: Path, index: np.ndarray) -> _Index:
    """Parses the bytes of an .idx, uint8 [size]. Raises ConfigError for invalid ones."""
    if len(index) < _HEADER.size:
        raise _broken(path, f"it has {len(index)} bytes, fewer than the header's {_HEADER.size}")
    header = index[: _HEADER.size].tobytes()
    magic, version, code, n_sequences, n_indices = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise _broken(path, f"it starts with {magic!r} instead of {_MAGIC!r}")
    if version != 1 or code not in _DTYPES:
        raise _broken(
            path,
            f"version {version} and dtype code {code}; readable are version 1 and codes "
            f"{sorted(_DTYPES)}",
        )
    expected = _HEADER.size + 12 * n_sequences + 8 * n_indices
    if len(index) != expected:
        raise _broken(path, f"it has {len(index)} bytes, but its header implies {expected}")
    lengths = np.frombuffer(index, "<i4", n_sequences, _HEADER.size)
    pointers = np.frombuffer(index, "<i8", n_sequences, _HEADER.size + 4 * n_sequences)
    first_sequences = np.frombuffer(index, "<i8", n_indices, _HEADER.size + 12 * n_sequences)

    dtype = _DTYPES[code]
    n_tokens = 0
    for i in range(0, n_sequences, _BLOCK):
        sizes = lengths[i : i + _BLOCK].astype(np.int64)
        ends = n_tokens + np.cumsum(sizes)
        starts = (ends - sizes) * dtype.itemsize
        if sizes.min() < 0 or not np.array_equal(pointers[i : i + _BLOCK], starts):
            raise _broken(path, "its sequences are not back to back in the .bin")
        n_tokens = int(ends[-1])
    runs_to_end = n_indices and first_sequences[0] == 0 and first_sequences[-1] == n_sequences
    if not runs_to_end or not _ascends(first_sequences):
        raise _broken(
            path, f"its document indices do not run from 0 to its {n_sequences} sequences"
        )
    return _Index(dtype, n_tokens, pointers, first_sequences)


def _ascends(indices: np.ndarray) -> bool:
    for i in range(0, len(indices), _BLOCK):
        if (np.diff(indices[i : i + _BLOCK + 1]) < 0).any():
            return False
    return True


def stored_tokens(prefix: Path | str) -> int:
    """Returns the number of tokens under a prefix, from the header and the file sizes alone.

    Raises ConfigError as `Documents`.
    """
    data = _map(bin_path(prefix))
    index = _map(idx_path(prefix))
    header = index[: _HEADER.size].tobytes().ljust(_HEADER.size, b"\0")
    _, _, code, _, _ = _HEADER.unpack(header)
    if code not in _DTYPES:
        return len(Documents(prefix).tokens)  # raises the error of a broken index
    return len(data) // _DTYPES[code].itemsize


class InMemory:
    """Documents in memory, for a `TokenStream`, with the attributes of `Documents`.

    sequences: their offsets, int64 [documents + 1]; default: those of one document.
    """

    prefix = source = "the given token ids"

    def __init__(self, tokens: np.ndarray, sequences: np.ndarray | None = None) -> None:
        self.unverified = tokens
        self.dtype = tokens.dtype
        if sequences is None:
            sequences = np.array([0, len(tokens)])
        self.sequences = Offsets(sequences[:-1], 1, int(sequences[-1]))

    def require(self, starts: np.ndarray, stops: np.ndarray, base: int = 0) -> None:
        """Does nothing, because memory is not verified."""

    def ends_document(self, sequences: np.ndarray) -> np.ndarray:
        """Returns True for each of the sequences, int64 [n]: each is a document."""
        return np.ones(sequences.shape, bool)


class TokenStream:
    """Consecutive sequences of a prefix as one stream of tokens.

    Attributes:
      n_tokens: tokens of the stream.
      offsets: like int64 [documents + 1]; document i is the tokens offsets[i] to
        offsets[i + 1] - 1.
      first: number of the first sequence in the file.
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
        self.prefix = documents.prefix
        self.first = first
        self.offsets = documents.sequences.part(first, stop)
        self._documents = documents
        self._base = int(documents.sequences[first])
        self._tokens = documents.unverified[self._base : int(documents.sequences[stop])]
        self.n_tokens = len(self._tokens)
        # No id that the dtype can hold needs a check.
        unsigned = documents.dtype.kind == "u"
        if vocab is not None and unsigned and np.iinfo(documents.dtype).max < vocab:
            vocab = None
        self._vocab = vocab

    def __len__(self) -> int:
        """Returns the number of documents."""
        return len(self.offsets) - 1

    def verified(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns all tokens of the stream, [n_tokens], of which some ranges are verified.

        They are a view of the memory map. starts, stops: int64 [n], where the ranges begin and end.
        Raises ConfigError if they are damaged.
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
        if self._vocab is None or not tokens.size:
            return
        if tokens.min() >= 0 and tokens.max() < self._vocab:
            return
        row, column = np.argwhere((tokens < 0) | (tokens >= self._vocab))[0]
        offset = offset_of(int(row), int(column))
        document = int(np.searchsorted(np.asarray(self.offsets), offset, side="right")) - 1
        raise ConfigError(
            f"{self._documents.source}, document {self.first + document}: token id "
            f"{tokens[row, column]}, but model.vocab_size={self._vocab} has ids 0 to "
            f"{self._vocab - 1}; set the "
            "vocab_size of this data's tokenizer, or give data of that tokenizer"
        )


def write_documents(
    prefix: Path | str, documents: Iterable[np.ndarray], *, vocab: int
) -> Documents:
    """Writes documents (integer ids, [length] each), sealed, atomically under `prefix`, and returns
    them opened.

    One document is in memory at a time. Ids are stored as uint16 if vocab < 65500, as in Megatron,
    else as int32. The .idx is renamed last. An exception, also one raised by `documents`, leaves
    existing files untouched.

    Raises:
      ValueError: an id outside 0..vocab - 1.
      ConfigError: a document longer than the format's 2^31 - 1 tokens.
      OSError: the disk is full or not writable; the error has the path.
    """
    dtype = dtype_of(vocab)
    lengths: list[int] = []
    paths = (bin_path(prefix), digests_path(prefix), idx_path(prefix))
    with atomic_write(*paths) as (data, side_file, index):
        for ids in documents:
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab:
                raise ValueError(
                    f"document {len(lengths)} has ids {ids.min()} to {ids.max()}, "
                    f"outside of the vocabulary 0 to {vocab - 1}"
                )
            if len(ids) >= 2**31:
                raise ConfigError(
                    f"document {len(lengths)} has {len(ids)} tokens; the .idx format holds up to "
                    "2^31 - 1: split it"
                )
            data.write(ids.astype(dtype).data)
            lengths.append(len(ids))
        write_index(index, np.array(lengths, np.int32), dtype)
        data.flush()
        index.flush()
        offsets = np.cumsum([0, *lengths])
        sequences = Offsets(offsets[:-1], 1, int(offsets[-1]))
        sampled = _sampled(sequences, _map(Path(data.name)).view(dtype))
        side_file.write(digests.of(Path(data.name), Path(index.name), None, sampled))
    return Documents(prefix)


def seal(prefix: str) -> str:
    """Seals the files of a prefix, or verifies all of them if they are sealed.

    Returns a line about it. Raises ConfigError.
    """
    documents = Documents(Path(prefix).expanduser())
    size = f"{len(documents):,} documents, {len(documents.tokens):,} tokens"
    if documents.is_sealed:
        return f"{prefix}: intact ({size})"
    try:
        documents.seal()
    except OSError as error:
        raise ConfigError(
            f"cannot write the digests that seal {prefix}: {error.strerror} ({error.filename})"
        ) from error
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
        sizes = lengths[i : i + _BLOCK].astype(np.int64) * dtype.itemsize
        ends = offset + np.cumsum(sizes)
        index.write((ends - sizes).astype("<i8").data)
        offset = int(ends[-1]) if len(ends) else offset
    for i in blocks:
        index.write(np.arange(i, min(i + _BLOCK, len(lengths) + 1), dtype="<i8").data)


def _sampled(sequences: Offsets, tokens: np.ndarray) -> str:
    """Returns 16 hex digits of a SHA-256 of the dtype, the offsets, and the first and last MiB of
    the tokens.
    """
    digest = hashlib.sha256(tokens.dtype.str.encode())
    for offsets in sequences.blocks():
        digest.update(np.ascontiguousarray(offsets, "<i8").data)
    data = tokens.view(np.uint8)
    digest.update(data[:_SAMPLED].tobytes())
    digest.update(data[-_SAMPLED:].tobytes())
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
