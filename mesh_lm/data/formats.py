"""Reads JSON, .parquet and compressed files. The only file that imports pyarrow and zstandard."""

from __future__ import annotations

import bz2
import codecs
import contextlib
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from mesh_lm import strict_json
from mesh_lm.errors import ConfigError

Kind = Literal["jsonl", "json", "txt", "parquet"]
"""json: JSON lines, or one list of objects (`json_kind`)."""
_KINDS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".txt": "txt",
    ".parquet": "parquet",
}
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
_ARCHIVES = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".zip", ".7z", ".rar")
_FOREIGN = (".lz4", ".lzma", ".lz", ".lzo", ".br", ".z", ".sz", ".snappy", ".zstd")
"""Suffixes of compressed files that are not read."""
_BUFFER = 2**20
_FIRST_LINE = 2**26
"""Bytes that are read of the first line of a .json file, at most. A longer one of JSON lines is a
document of its own."""
_PLAUSIBLE, _RATIO = 2**26, 200
"""Bytes that any file may decompress to, and how many times its size a longer one may. Text reaches
4 to 30 times."""
_SHOWN = 8
"""Most files that one message names."""
_ROWS = 256
"""Rows of a .parquet file in memory at once."""
FIELD_OPTION = "--data.text_field"
"""The option of `mesh-lm train` that names the field of the text, in messages."""
SUFFIXES = ".txt, .jsonl, .ndjson, .json (each also .gz, .zst, .bz2 and .xz) and .parquet"


def kind_of(path: Path | str) -> Kind | None:
    """Returns the kind of file by its suffix, in letters of any case; None for an unknown
    suffix.
    """
    kind, last = _KINDS.get(_suffix(path)), Path(path).suffix.lower()
    return None if last in _FOREIGN or (kind == "parquet" and last in _COMPRESSED) else kind


@contextlib.contextmanager
def field_option(name: str) -> Iterator[None]:
    """Gives the option of another command for the field of the text its own name in every
    ConfigError, those of worker processes too.
    """
    try:
        yield
    except ConfigError as error:
        if FIELD_OPTION not in str(error):
            raise
        raise type(error)(str(error).replace(FIELD_OPTION, name)) from error


def require_readable(path: Path, field: str = "") -> None:
    """Raises ConfigError for a file whose name says that it holds text in a form that is not read:
    better than to skip it, or to take it for one document. A tar of text is valid UTF-8, as is any
    JSON.

    field: what the first line of JSON lines must have, if it is known; see `json_kind`.
    """
    suffix = Path(path).suffix.lower()
    if _suffix(path) in _ARCHIVES:
        raise ConfigError(f"{path} is an archive; extract it, or leave it out")
    if suffix in _FOREIGN or (is_compressed(path) and _suffix(path) == ".parquet"):
        raise ConfigError(
            f"{path} is compressed in a way that is not read; decompress it, compress it as .gz or "
            ".zst, or leave it out"
        )
    if kind_of(path) == "json":
        json_kind(path, field)


def require_all_readable(paths: Iterable[Path], field: str = "") -> None:
    """Raises ConfigError as `require_readable`, and lists the files."""
    problems = []
    for path in paths:
        try:
            require_readable(path, field)
        except ConfigError as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise ConfigError(
            "\n  - ".join(
                [f"{len(problems)} files are not read as they are", *problems[:_SHOWN], *more]
            )
        )


def json_kind(path: Path, field: str = "") -> Literal["lines", "list"]:
    """Returns what a .json file holds, by its start. Raises ConfigError if it is neither a list nor
    lines of objects.

    field: the field of the text, which the first of the lines must have: settings on one line have
    not. "": any object will do.
    """
    with opened(path) as (file, _):
        start, number = b"", 1
        while not start and (read := file.read(_BUFFER)):
            start = read.lstrip().removeprefix(codecs.BOM_UTF8).lstrip()
            number += read.count(b"\n") - start.count(b"\n")
        if start.startswith(b"["):  # perhaps on one line of gigabytes
            return "list"
        line, ends, _ = start.partition(b"\n")
        line += b"" if ends else file.readline(_FIRST_LINE)
    if not line or (line.startswith(b"{") and len(line) >= _FIRST_LINE):
        return "lines"
    parsed = None
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(line)
    if isinstance(parsed, dict) and (
        not field or any(isinstance(value, str) for value in parsed.values())
    ):
        if field:
            text_in(parsed, field, f"{path}, line {number}", line)
        return "lines"
    with_field = f' with a string "{field}"' if field else ""
    raise ConfigError(
        f"{path} holds neither JSON lines nor a list of objects{with_field}; convert it to .jsonl, "
        "leave it out, or give it the suffix .txt to read it as one document"
    )


def text(data: bytes) -> str:
    """Returns the text of a UTF-8 file without the byte order mark that editors on Windows write.
    Raises UnicodeDecodeError.
    """
    return data.decode().removeprefix("\ufeff")


def is_blank(line: bytes) -> bool:
    """Whether a line of a .jsonl file has nothing but white space, and perhaps a byte order
    mark.
    """
    return not line.removeprefix(codecs.BOM_UTF8).strip()


def has_mark(path: Path | str) -> bool:
    """Whether a file of text begins with a byte order mark, which older versions kept: a corpus
    made then is a different one.
    """
    path = Path(path)
    if kind_of(path) in ("jsonl", "json", "parquet"):
        return False
    try:
        with opened(path) as (file, _):
            return file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8
    except ConfigError:  # it cannot be read
        return False


def newly_read(path: Path | str) -> bool:
    """Whether older versions skipped such a file in a directory, or read it as one document: a
    corpus made then is a different one.
    """
    return _suffix(path) in (".json", ".ndjson") or Path(path).suffix.lower() in (".bz2", ".xz")


def _suffix(path: Path | str) -> str:
    """Returns the last suffix in small letters, without that of a compression."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    if suffixes and suffixes[-1] in (*_COMPRESSED, *_FOREIGN) and len(suffixes) > 1:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


def is_compressed(path: Path | str) -> bool:
    """Whether the suffix is that of a compressed file."""
    return Path(path).suffix.lower() in _COMPRESSED


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Opens a file for reading; returns its decompressed stream and the underlying file, whose
    `tell` is the position on disk.

    Raises:
      ConfigError: the file is unreadable or damaged, decompresses to far more than text does or to
      more than fits into memory, or zstandard
        is not installed.
    """
    try:
        with open(path, "rb") as raw, _decompressed(raw, path.suffix.lower()) as file:
            yield file, raw
    except OSError as error:
        raise unreadable(path, error) from error
    except MemoryError as error:
        raise ConfigError(
            f"{path} has a document or a line that does not fit into memory; split it"
        ) from error
    except (EOFError, zlib.error, lzma.LZMAError, _zstd_error(path.suffix.lower())) as error:
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


def text_of(line: bytes, field: str, where: str) -> str:
    """Returns the document in a line of a .jsonl file.

    Raises:
      ConfigError: the line is not a JSON object with a string under `field`; the message starts
      with `where`.
    """
    try:
        # Windows writes a byte order mark before the first line
        parsed = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise _no_text(line[:60], field, where, error) from error
    return text_in(parsed, field, where, line)


def list_of(path: Path) -> list[Any]:
    """Returns the list in a .json file. Raises ConfigError if it is damaged, or longer than 512
    MiB.
    """
    with opened(path) as (file, _):
        data = file.read(strict_json.LARGE_FILE + 1)
    if len(data) > strict_json.LARGE_FILE:
        raise ConfigError(
            f"{path} is a list of more than {strict_json.LARGE_FILE // 2**20} MiB; convert it: jq "
            f"-c '.[]' {path} > lines.jsonl"
        )
    try:
        return strict_json.loads(data.decode("utf-8-sig"), list, size=strict_json.LARGE_FILE)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}; correct it, or leave it out") from error


def text_in(parsed: Any, field: str, where: str, line: bytes = b"") -> str:
    """Returns the document in an object; line: how the file spells it, for the message. Raises
    ConfigError as `text_of`.
    """
    try:
        text = parsed[field]
        text.encode()  # JSON can spell lone surrogates, which are not text
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if (
            isinstance(parsed, dict)
            and field not in parsed
            and (others := [name for name, value in parsed.items() if isinstance(value, str)])
        ):
            names = ", ".join(f'"{name}"' for name in others[:8])
            raise ConfigError(
                f'{where}: has no "{field}"; it has {names}: choose one with {FIELD_OPTION}'
            ) from error
        raise _no_text(line[:60] or json.dumps(parsed)[:60], field, where, error) from error
    return text


def _no_text(got: bytes | str, field: str, where: str, error: Exception) -> ConfigError:
    return ConfigError(
        f'{where}: expected a JSON object with a string "{field}", got {got!r} '
        f"({type(error).__name__}); correct or remove it"
    )


def row_groups(path: Path, field: str) -> list[tuple[int, int]]:
    """Returns (rows, uncompressed bytes of the column `field`) for each row group of a .parquet
    file. Raises as `rows`.
    """
    with _parquet(path) as file:
        _check_column(path, file, field)
        groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
        column = (
            [groups[0].column(i).path_in_schema for i in range(groups[0].num_columns)].index(field)
            if groups
            else 0
        )
        return [(group.num_rows, group.column(column).total_uncompressed_size) for group in groups]


def rows(
    path: Path, field: str, group: int | None = None, start: int = 0, stop: int | None = None
) -> Iterator[str]:
    """Yields the strings of column `field` in rows start to stop of the file, or of one row group;
    "" for null.

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
        raise ConfigError(
            f'{path} has no column "{field}"; it has {names}: choose one with {FIELD_OPTION}'
        )
    if not (kind := str(schema.field(field).type)).endswith(("string", "string_view")):
        raise ConfigError(
            f'{path}: column "{field}" holds {kind}, not strings; choose another with '
            f"{FIELD_OPTION}"
        )


@contextlib.contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: pip install -e '.[data]'") from error
    try:
        # A name goes to pyarrow as UTF-8, which not every locale has.
        with open(path, "rb") as opened, pyarrow.parquet.ParquetFile(opened) as file:
            yield file
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is damaged or not a .parquet: {error}; fetch it again"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error


@contextlib.contextmanager
def _decompressed(raw: BinaryIO, suffix: str) -> Iterator[BinaryIO]:
    if suffix in _STANDARD:
        with (
            _STANDARD[suffix](raw) as stream,
            io.BufferedReader(_Bounded(stream, raw), _BUFFER) as file,
        ):
            yield cast(BinaryIO, file)
    elif suffix == ".zst":
        frames = _Frames(raw, _zstandard().ZstdDecompressor())
        with io.BufferedReader(_Bounded(frames, raw), _BUFFER) as file:
            yield cast(BinaryIO, file)
    else:
        yield raw


_STANDARD: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
}


class _Bounded(io.RawIOBase):
    """A decompressed stream that ends with ConfigError where it becomes implausibly long, before it
    fills the memory.
    """

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
                f"{self._raw.name} decompresses to more than {_RATIO} times its size, which no "
                "text does; leave it out, or decompress it yourself"
            )
        return n


class _Frames(io.RawIOBase):
    """Decompresses the zstd frames of a file in order. The library's own reader mistakes truncation
    for the end of the file.
    """

    def __init__(self, raw: BinaryIO, decompressor: Any) -> None:
        self._raw, self._decompressor = raw, decompressor
        self._frame: Any = None  # the current frame
        self._input, self._output = b"", memoryview(b"")  # a view, because its rest is not copied

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            # a bomb makes 32,768 times as much of it
            if not (data := self._input or self._raw.read(2**14)):
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
        raise ConfigError("files of type .zst need zstandard: pip install -e '.[data]'") from error
    return zstandard


def _zstd_error(suffix: str) -> type[Exception]:
    return _zstandard().ZstdError if suffix == ".zst" else zlib.error
