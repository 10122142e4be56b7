"""The side file `<prefix>.digests`, with which prepared tokens are verified while they are read;
Megatron-LM ignores it.

The first line is JSON: `format` | `block`: bytes per block | `bytes`: size of the .bin | `index`,
`about`: SHA-256 of the .idx, and of the .json if there is one | `sampled`: the fingerprint that the
files had without this one. Then come the XXH3-64 of each block of the .bin, u64 little-endian, and
the SHA-256 of everything before it.

XXH3 is against disks, copies and accidents, not against an attacker, and reads memory several times
as fast as CRC-32 and SHA-256 (benchmarks/verified_data.py). A block is half a read-ahead of Linux:
smaller ones make the file larger, and larger ones make the first samples of a run slower, each of
which touches blocks of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from pathlib import Path

import numpy as np
import xxhash

from mesh_lm import strict_json
from mesh_lm.checksums import file_digest
from mesh_lm.data.rows import ranges
from mesh_lm.errors import ConfigError

BLOCK_BITS = 15
"""log2 of the bytes per block."""
_FORMAT = 2
_SEAL_SIZE = hashlib.sha256().digest_size
_HEADER_SIZE = 2**12
_READ = 2**22
"""Bytes read at once."""


def digests_path(prefix: Path | str) -> Path:
    """Returns <prefix>.digests."""
    return Path(f"{prefix}.digests")


@dataclasses.dataclass(frozen=True)
class Digests:
    """The contents of a side file."""

    path: Path
    block: int
    bytes: int
    index: str
    about: str | None
    sampled: str
    table: np.ndarray
    """XXH3-64 of each block, uint64 [blocks]."""
    seal: str
    """SHA-256 of all of it, hexadecimal: it identifies the contents of the .bin and the .idx."""

    def check(self, path: Path, cure: str) -> None:
        """Raises ConfigError unless the .idx at `path`, or the .json if there was one, is the one
        that was sealed.
        """
        sealed = self.index if path.suffix == ".idx" else self.about
        if sealed is None:
            return
        try:
            if file_digest(path) == sealed:
                return
        except FileNotFoundError:
            raise ConfigError(
                f"{path} is missing: it was there when {self.path} was written; {cure}"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot read {path} to compare its SHA-256 digest: {error.strerror}"
            ) from error
        raise ConfigError(
            f"{path} is damaged: it is not as it was when {self.path} was written; {cure}"
        )


def read(prefix: Path | str, cure: str) -> Digests | None:
    """Returns the side file of a prefix, verified; None if there is none.

    Raises ConfigError with the cure if it is damaged.
    """
    path = digests_path(prefix)
    try:
        content = np.asarray(np.memmap(path, np.uint8, "r"))
        head = content[:_HEADER_SIZE].tobytes().partition(b"\n")[0]
        seal = hashlib.sha256(content[:-_SEAL_SIZE].data).digest()
        if content[-_SEAL_SIZE:].tobytes() != seal:
            raise ValueError("its own SHA-256 is another")
        header = strict_json.loads(head)
        if header.pop("format") != _FORMAT:
            raise ValueError("its format is another than that of this version")
        n_blocks = -(-header["bytes"] // header["block"])
        table = np.frombuffer(content, "<u8", n_blocks, len(head) + 1)
        return Digests(path=path, table=table, seal=seal.hex(), **header)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read the digests in {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise ConfigError(f"{path} is damaged and gives no digests ({error}); {cure}") from error


def of(data: Path, index: Path, description: bytes | None, sampled: str) -> bytes:
    """Returns the contents of a side file. Raises OSError.

    data, index: the .bin and the .idx. description: contents of the .json, if there is one.
    sampled: the fingerprint without a side file.
    """
    block = 1 << BLOCK_BITS
    table = bytearray()
    with open(data, "rb") as file:
        while True:
            part = memoryview(file.read(_READ))
            if not part:
                break
            blocks = [part[i : i + block] for i in range(0, len(part), block)]
            table += np.array([xxhash.xxh3_64_intdigest(b) for b in blocks], "<u8").tobytes()
    header = {
        "format": _FORMAT,
        "block": block,
        "bytes": data.stat().st_size,
        "index": file_digest(index),
        "about": None if description is None else hashlib.sha256(description).hexdigest(),
        "sampled": sampled,
    }
    content = json.dumps(header).encode() + b"\n" + table
    return content + hashlib.sha256(content).digest()


class Blocks:
    """Compares each block of a .bin with its digest before the first use of its tokens.
    Thread-safe.

    Attributes:
      complete: whether all blocks have been compared.
    """

    def __init__(self, path: Path, data: np.ndarray, digests: Digests, cure: str) -> None:
        """Takes the .bin's bytes, uint8 [size], and what to do about a damaged block.

        Raises ConfigError for another size.
        """
        if len(data) != digests.bytes:
            raise ConfigError(
                f"{path} is damaged: its size is {len(data)} bytes, not the {digests.bytes} of "
                f"{digests.path}; {cure}"
            )
        self._path = path
        self._data = data.data
        self._digests = digests
        self._cure = cure
        # A further element, for a range that is empty and starts where the data end.
        self._is_verified = np.zeros(len(digests.table) + 1, bool)
        self._is_verified[-1] = True
        self._n_unverified = len(digests.table)
        self._lock = threading.Lock()
        self.complete = not self._n_unverified

    def require(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Verifies the blocks of the byte ranges starts[i] to stops[i] - 1, int64 [n].

        Raises ConfigError for a damaged one.
        """
        # Nearly always a range is in one block, or in two. This is called for every batch, so every
        # step of NumPy counts.
        blocks = np.concatenate([starts, np.maximum(stops - 1, starts)]) // self._digests.block
        if (stops - starts).max(initial=0) > self._digests.block:
            _, blocks = ranges(blocks[: len(starts)], blocks[len(starts) :] + 1)
        unverified = blocks[~self._is_verified[blocks]]
        if not unverified.size:
            return
        new = sorted({*unverified.tolist()})
        self._compare(new)
        with self._lock:  # another thread may have verified some of them meanwhile
            for block in new:
                self._n_unverified -= not self._is_verified[block]
                self._is_verified[block] = True
            self.complete = not self._n_unverified

    def require_all(self) -> None:
        """Verifies all blocks that have not been."""
        if self.complete:
            return
        # The numbers of a few blocks are in memory, not those of all.
        step = self._digests.block << 12
        for start in range(0, len(self._data), step):
            self.require(np.array([start]), np.array([min(start + step, len(self._data))]))

    def _compare(self, blocks: list[int]) -> None:
        digests = self._digests.table[blocks].tolist()
        for block, digest in zip(blocks, digests, strict=True):
            start = block * self._digests.block
            part = self._data[start : start + self._digests.block]
            if xxhash.xxh3_64_intdigest(part) != digest:
                raise ConfigError(
                    f"{self._path} is damaged: bytes {start:,} to {start + len(part) - 1:,} "
                    f"are not as they were when {self._digests.path} was written (XXH3-64); "
                    f"{self._cure}"
                )
