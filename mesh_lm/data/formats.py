"""Reads .jsonl, .parquet and compressed (.gz, .zst) files. The only file that imports pyarrow and zstandard."""

from __future__ import annotations

import contextlib
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from mesh_lm.errors import ConfigError

Kind = Literal["jsonl", "txt", "parquet"]
_COMPRESSED = (".gz", ".zst")
_BUFFER = 2**20
_PLAUSIBLE, _RATIO = 2**26, 200
"""Bytes that any file may decompress to, and how many times its size a longer one may. Text reaches 4 to 30 times."""
_ROWS = 256
"""Rows of a .parquet file in memory at once."""
SUFFIXES = ".txt, .jsonl (each also .gz and .zst) and .parquet"


def kind_of(path: Path | str) -> Kind | None:
    """Returns the kind of file by its suffix; None for an unknown suffix."""
    suffixes = Path(path).suffixes
    if suffixes and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    elif suffixes and suffixes[-1] == ".parquet":
        return "parquet"
    match suffixes[-1:]:
        case [".jsonl"]:
            return "jsonl"
        case [".txt"]:
            return "txt"
        case _:
            return None


def is_compressed(path: Path | str) -> bool:
    """Whether the suffix is that of a compressed file."""
    return Path(path).suffix in _COMPRESSED


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file for reading; returns its decompressed stream and the underlying file, whose `tell` is the position on disk.

    Raises:
      ConfigError: the file is unreadable or damaged, decompresses to far more than text does or to more than fits into memory, or zstandard
        is not installed.
    """
    try:
        with open(path, "rb") as raw, _decompressed(raw, path.suffix) as file:
            yield file, raw
    except OSError as error:
        raise unreadable(path, error) from error
    except MemoryError as error:
        raise ConfigError(f"{path} has a document or a line that does not fit into memory; split it") from error
    except (EOFError, zlib.error, _zstd_error(path.suffix)) as error:
        raise ConfigError(f"{path} is damaged or truncated: {error}; fetch or compress it again") from error


def unreadable(path: Path, error: OSError) -> ConfigError:
    """Returns the error to raise for a file that cannot be read."""
    if error.strerror is None:  # such as gzip's BadGzipFile
        return ConfigError(f"{path} is damaged or not of the type its name implies: {error}; fetch or compress it again")
    return ConfigError(f"cannot read {path}: {error.strerror}; make it readable, or leave it out")


def text_of(line: bytes, field: str, where: str) -> str:
    """Returns the document in a line of a .jsonl file.

    Raises:
      ConfigError: the line is not a JSON object with a string under `field`; the message starts with `where`.
    """
    parsed: Any = None
    try:
        parsed = json.loads(line.decode("utf-8-sig"))  # Windows writes a byte order mark before the first line
        text = parsed[field]
        text.encode()  # JSON can spell lone surrogates, which are not text
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if (
            isinstance(parsed, dict)
            and field not in parsed
            and (others := [name for name, value in parsed.items() if isinstance(value, str)])
        ):
            names = ", ".join(f'"{name}"' for name in others[:8])
            raise ConfigError(f'{where}: has no "{field}"; it has {names}: choose one with text_field') from error
        raise ConfigError(
            f'{where}: expected a JSON object with a string "{field}", got {line[:60]!r} ({type(error).__name__}); '
            "correct or remove the line"
        ) from error
    return text


def row_groups(path: Path, field: str) -> list[tuple[int, int]]:
    """Returns (rows, uncompressed bytes of the column `field`) for each row group of a .parquet file. Raises as `rows`."""
    with _parquet(path) as file:
        _check_column(path, file, field)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        column = [groups[0].column(i).path_in_schema for i in range(groups[0].num_columns)].index(field) if groups else 0
        return [(group.num_rows, group.column(column).total_uncompressed_size) for group in groups]


def rows(path: Path, field: str, group: int | None = None, start: int = 0, stop: int | None = None) -> Iterator[str]:
    """Yields the strings of column `field` in rows start to stop of the file, or of one row group; "" for null.

    Raises:
      ConfigError: the file is damaged, or the column is missing or does not hold strings.
    """
    with _parquet(path) as file:
        _check_column(path, file, field)
        groups = None if group is None else [group]
        batches = file.iter_batches(_ROWS, row_groups=groups, columns=[field])
        texts = (text or "" for batch in batches for text in batch.column(0).to_pylist())
        yield from itertools.islice(texts, start, stop)


def _check_column(path: Path, file: Any, field: str) -> None:
    schema = file.schema_arrow
    if field not in schema.names:
        names = ", ".join(schema.names[:8])
        raise ConfigError(f'{path} has no column "{field}"; it has {names}: choose one with text_field')
    if not (kind := str(schema.field(field).type)).endswith(("string", "string_view")):
        raise ConfigError(f'{path}: column "{field}" holds {kind}, not strings; choose another with text_field')


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: pip install 'mesh_lm[data]'") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged or not a .parquet: {error}; fetch it again") from error
    except OSError as error:
        raise unreadable(path, error) from error


@contextlib.contextmanager
def _decompressed(raw: BinaryIO, suffix: str) -> Iterator[BinaryIO]:
    if suffix == ".gz":
        with gzip.open(raw) as gz, io.BufferedReader(_Bounded(gz, raw), _BUFFER) as file:
            yield cast(BinaryIO, file)
    elif suffix == ".zst":
        frames = _Frames(raw, _zstandard().ZstdDecompressor())
        with io.BufferedReader(_Bounded(frames, raw), _BUFFER) as file:
            yield cast(BinaryIO, file)
    else:
        yield raw


class _Bounded(io.RawIOBase):
    """A decompressed stream that ends with ConfigError where it becomes implausibly long, before it fills the memory."""

    def __init__(self, file: Any, raw: BinaryIO) -> None:
        """file: the stream. raw: the compressed file that it is read from."""
        self._file, self._raw, self._size = file, raw, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self._file.readinto(buffer) or 0
        self._size += n
        if self._size > _PLAUSIBLE and self._size > _RATIO * self._raw.tell():
            raise ConfigError(
                f"{self._raw.name} decompresses to more than {_RATIO} times its size, which no text does; "
                "leave it out, or decompress it yourself"
            )
        return n


class _Frames(io.RawIOBase):
    """Decompresses the zstd frames of a file in order. The library's own reader mistakes truncation for the end of the file."""

    def __init__(self, raw: BinaryIO, decompressor: Any) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame: Any = None  # the current frame
        self._input, self._output = b"", memoryview(b"")  # a view, because its rest is not copied

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not (data := self._input or self._raw.read(2**14)):  # a bomb makes 32,768 times as much of it
                if self._frame:
                    raise EOFError("the last zstd frame is not complete")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._output, self._input = memoryview(self._frame.decompress(data)), b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        n = min(len(buffer), len(self._output))
        buffer[:n], self._output = self._output[:n], self._output[n:]
        return n


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError("files of type .zst need zstandard: pip install 'mesh_lm[data]'") from error
    return zstandard


def _zstd_error(suffix: str) -> type[Exception]:
    return _zstandard().ZstdError if suffix == ".zst" else zlib.error
