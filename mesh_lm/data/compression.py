"""Reads compressed files. The only file that imports zstandard."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from mesh_lm.errors import ConfigError

UNREAD = (".lz4", ".lzma", ".lz", ".lzo", ".br", ".z", ".sz", ".snappy", ".zstd")
"""Suffixes of compressed files that are not read."""
_BUFFER = 2**20
_PLAUSIBLE = 2**26
"""Bytes that any file may decompress to."""
_RATIO = 200
"""How many times its size a longer file may decompress to. Text reaches 4 to 30 times."""


def is_compressed(path: Path | str) -> bool:
    """Whether the suffix is that of a compressed file that is read."""
    return Path(path).suffix.lower() in _STREAMS


def inner_suffix(path: Path | str) -> str:
    """Returns the last suffix in small letters, without that of a compression."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if len(suffixes) > 1 and (suffixes[-1] in _STREAMS or suffixes[-1] in UNREAD):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file for reading; returns its decompressed stream and the underlying file, whose
    `tell` is the position on disk.

    Raises:
      ConfigError: the file is unreadable or damaged, decompresses to far more than text does or to
        more than fits into memory, or zstandard is not installed.
    """
    suffix = path.suffix.lower()
    try:
        with open(path, "rb") as raw:
            if suffix not in _STREAMS:
                yield raw, raw
                return
            stream = _STREAMS[suffix](raw)
            with stream, io.BufferedReader(_Bounded(stream, raw), _BUFFER) as file:
                yield cast(BinaryIO, file), raw
    except OSError as error:
        raise unreadable(path, error) from error
    except MemoryError as error:
        raise ConfigError(
            f"{path} has a document or a line that does not fit into memory; split it"
        ) from error
    except (EOFError, zlib.error, lzma.LZMAError, _zstd_error(suffix)) as error:
        raise ConfigError(
            f"{path} is damaged or truncated: {error}; fetch or compress it again"
        ) from error


def unreadable(path: Path, error: OSError) -> ConfigError:
    """Returns the error to raise for a file that cannot be read."""
    if error.strerror is None:  # such as gzip's BadGzipFile
        return ConfigError(
            f"{path} is damaged or not of the type its name implies: {error}; fetch or compress it "
            "again"
        )
    return ConfigError(f"cannot read {path}: {error.strerror}; make it readable, or leave it out")


class _Bounded(io.RawIOBase):
    """A decompressed stream that ends with ConfigError where it becomes implausibly long, before it
    fills the memory.
    """

    def __init__(self, stream: Any, raw: BinaryIO) -> None:
        """raw: the compressed file that the stream is read from."""
        self._stream = stream
        self._raw = raw
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self._stream.readinto(buffer) or 0
        self._size += n
        if self._size > _PLAUSIBLE and self._size > _RATIO * self._raw.tell():
            raise ConfigError(
                f"{self._raw.name} decompresses to more than {_RATIO} times its size, which no "
                "text does; leave it out, or decompress it yourself"
            )
        return n


class _ZstdFrames(io.RawIOBase):
    """Decompresses the zstd frames of a file in order. The library's own reader mistakes truncation
    for the end of the file.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._decompressor = _zstandard().ZstdDecompressor()
        self._frame: Any = None  # the current frame
        self._input = b""
        self._output = memoryview(b"")  # a view, because its rest is not copied

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            # Little is read at once: a bomb decompresses to 32,768 times as much.
            data = self._input or self._raw.read(2**14)
            if not data:
                if self._frame:
                    raise EOFError("the last zstd frame is not complete")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._output = memoryview(self._frame.decompress(data))
            self._input = b""
            if self._frame.eof:
                self._input = self._frame.unused_data
                self._frame = None
        n = min(len(buffer), len(self._output))
        buffer[:n] = self._output[:n]
        self._output = self._output[n:]
        return n


_STREAMS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".zst": _ZstdFrames,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}
"""The decompressed stream of a file by its suffix."""


def _zstd_error(suffix: str) -> type[Exception]:
    return _zstandard().ZstdError if suffix == ".zst" else zlib.error


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("files of type .zst need zstandard: pip install -e '.[data]'") from error
    return zstandard
