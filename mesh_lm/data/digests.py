"""The side file `<prefix>.digests`, with which prepared tokens are verified while they are read; Megatron-LM ignores it.

The first line is JSON: `format` | `block`: bytes per block | `bytes`: size of the .bin | `index`, `about`: SHA-256 of the .idx, and of the
.json if there is one | `sampled`: the fingerprint that the files had without this one. Then come the CRC-32 of each block of the .bin, u32
little-endian, and the SHA-256 of everything before it.

A CRC-32 misses one damaged block in 2^32. It is against disks, copies and accidents, not against an attacker, and takes less than half as
long as SHA-256 (benchmarks/verified_data.py). A block is half a read-ahead of Linux: smaller ones make the file larger, and larger ones
make the first samples of a run slower, each of which touches blocks of its own.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
import zlib
from pathlib import Path

import numpy as np

from mesh_lm import strict_json
from mesh_lm.checksums import file_digest
from mesh_lm.data.rows import ranges
from mesh_lm.errors import ConfigError

BLOCK_BITS = 15
"""log2 of the bytes per block."""
_FORMAT = 1
_OWN = hashlib.sha256().digest_size
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
    """CRC-32 of each block, uint32 [blocks]."""
    own: str
    """SHA-256 of all of it, hexadecimal: it identifies the contents of the .bin and the .idx."""

    def check(self, path: Path, cure: str) -> None:
        """Raises ConfigError unless the .idx at `path`, or the .json if there was one, is the one that was sealed."""
        sealed = self.index if path.suffix == ".idx" else self.about
        if sealed is None:
            return
        try:
            if file_digest(path) == sealed:
                return
            what = "damaged: it is not as it was"
        except FileNotFoundError:
            what = "missing: it was there"
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        raise ConfigError(f"{path} is {what} when {self.path} was written; {cure}")


def read(prefix: Path | str, cure: str) -> Digests | None:
    """Returns the side file of a prefix, verified; None if there is none. Raises ConfigError with the cure if it is damaged."""
    path = digests_path(prefix)
    try:
        content = np.asarray(np.memmap(path, np.uint8, "r"))
        head = content[:_HEADER_SIZE].tobytes().partition(b"\n")[0]
        own = hashlib.sha256(content[:-_OWN].data).digest()
        if content[-_OWN:].tobytes() != own:
            raise ValueError("its own SHA-256 is another")
        header = strict_json.loads(head)
        if header.pop("format") != _FORMAT:
            raise ValueError("it is of another format")
        table = np.frombuffer(content, "<u4", -(-header["bytes"] // header["block"]), len(head) + 1)
        return Digests(path=path, table=table, own=own.hex(), **header)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, ArithmeticError) as error:
        raise ConfigError(f"{path} is damaged ({error}); {cure}") from error


def of(data: Path, index: Path, about: bytes | None, sampled: str) -> bytes:
    """Returns the contents of a side file for a .bin, an .idx and the contents of a .json, if there is one. Raises OSError."""
    block = 1 << BLOCK_BITS
    sums: list[np.ndarray] = []
    with open(data, "rb") as file:
        while part := memoryview(file.read(_READ)):
            sums.append(np.array([zlib.crc32(part[i : i + block]) for i in range(0, len(part), block)], "<u4"))
    header = {
        "format": _FORMAT, "block": block, "bytes": data.stat().st_size, "index": file_digest(index),
        "about": None if about is None else hashlib.sha256(about).hexdigest(), "sampled": sampled,
    }  # fmt: skip
    content = json.dumps(header).encode() + b"\n" + b"".join(part.tobytes() for part in sums)
    return content + hashlib.sha256(content).digest()


class Blocks:
    """Compares each block of a .bin with its digest before the first use of its tokens. Thread-safe.

    Attributes:
      complete: whether all blocks have been compared.
    """

    def __init__(self, path: Path, data: np.ndarray, digests: Digests, cure: str) -> None:
        """Takes the .bin's bytes, uint8 [size], and what to do about a damaged block. Raises ConfigError for another size."""
        if len(data) != digests.bytes:
            raise ConfigError(f"{path} is damaged: it has {len(data)} bytes, not the {digests.bytes} of {digests.path}; {cure}")
        self._path, self._data, self._digests, self._cure = path, data, digests, cure
        # A further element, for a range that is empty and starts where the data end.
        self._seen = np.zeros(len(digests.table) + 1, bool)
        self._seen[-1] = True
        self._left, self._lock = len(digests.table), threading.Lock()
        self.complete = not self._left

    def require(self, starts: np.ndarray, stops: np.ndarray) -> None:
        """Verifies the blocks of the byte ranges starts[i] to stops[i] - 1, int64 [n]. Raises ConfigError for a damaged one."""
        first = starts // self._digests.block
        last = np.maximum((stops - 1) // self._digests.block, first)
        if self._seen[first].all() and self._seen[last].all() and (last - first).max(initial=0) <= 1:
            return
        _, blocks = ranges(first, last + 1)
        blocks = np.array(sorted({*blocks[~self._seen[blocks]].tolist()}), np.int64)  # few: np.unique takes longer
        for block in blocks.tolist():
            self._compare(block)
        with self._lock:  # another thread may have verified some of them meanwhile
            self._left -= int((~self._seen[blocks]).sum())
            self._seen[blocks] = True
            self.complete = not self._left

    def require_all(self) -> None:
        """Verifies all blocks that have not been."""
        if not self.complete:
            self.require(np.zeros(1, np.int64), np.array([len(self._data)]))

    def _compare(self, block: int) -> None:
        start = block * self._digests.block
        part = self._data[start : start + self._digests.block]
        if zlib.crc32(part.data) != self._digests.table[block]:
            raise ConfigError(
                f"{self._path} is damaged: bytes {start:,} to {start + len(part) - 1:,} are not as they were when {self._digests.path} "
                f"was written (CRC-32); {self._cure}"
            )
