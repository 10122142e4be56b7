"""The formats of text files. The only file that imports pyarrow.

A new format is a class, derived from `Lines`, `Items` or `Table`, and its suffixes in `FORMATS`.
One that is not in this package is added by the config file that uses it, for its data.path:
`formats.FORMATS[".csv"] = Csv()`.
"""

from __future__ import annotations

import abc
import codecs
import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mesh_lm import strict_json
from mesh_lm.data.compression import UNREAD, inner_suffix, is_compressed, opened, unreadable
from mesh_lm.errors import ConfigError

_ARCHIVES = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".tzst", ".zip", ".7z", ".rar")
_BUFFER = 2**20
_FIRST_LINE = 2**26
"""Bytes that are read of the first line of a .json file, at most. A longer one of JSON lines is a
document of its own."""
_SHOWN = 8
"""Most files, fields or columns that one message names."""
_SHOWN_CHARACTERS = 60
"""Characters of a line that a message quotes."""
_ROWS = 256
"""Rows of a .parquet file in memory at once."""
FIELD_OPTION = "--data.text_field"
"""The option of `mesh-lm train` that names the field of the text, in messages."""


class Format(abc.ABC):
    """How the files of one format hold documents. Instances have no state."""

    name: str
    """Part of the digest of a corpus that is one file of this format."""
    is_compressible: bool = True
    """Whether its files may be compressed as a whole."""

    def resolve(self, path: Path, field: str = "") -> Format:
        """Returns the format of a file: this one, unless its suffix leaves a choice.

        field: the field of the text, if it is to be looked for. Raises ConfigError for a file of
        neither format.
        """
        return self


class PlainText(Format):
    """A file is one document, in UTF-8."""

    name = "txt"


class Records(Format):
    """A file has any number of documents, each in a field (or column) of a record."""

    @abc.abstractmethod
    def documents(self, path: Path, field: str) -> Iterator[tuple[int, str]]:
        """Yields (number, from 1, as messages and splits count it; text, perhaps empty).

        Raises ConfigError if the file cannot be read, or a record has no string in the field.
        """


class Lines(Records):
    """Records on a line each, so that a large file is divided at any line end."""

    @abc.abstractmethod
    def text(self, line: bytes, field: str, location: str) -> str:
        """Returns the document in a line.

        Raises ConfigError if it has no string in the field; the message starts with `location`.
        """

    def documents(self, path: Path, field: str) -> Iterator[tuple[int, str]]:
        """Implements `Records.documents`; blank lines are skipped, but counted."""
        with opened(path) as (file, _):
            for number, line in enumerate(file, 1):
                if not is_blank(line):
                    yield number, self.text(line, field, f"{path}, line {number}")


class Items(Records):
    """Records that are parsed all at once, so that a file is not divided."""

    @abc.abstractmethod
    def items(self, path: Path) -> list[Any]:
        """Returns the records of a file. Raises ConfigError if it is damaged or too large."""

    @abc.abstractmethod
    def text(self, item: Any, field: str, location: str) -> str:
        """Returns the document in a record.

        Raises ConfigError if it has no string in the field; the message starts with `location`.
        """

    def documents(self, path: Path, field: str) -> Iterator[tuple[int, str]]:
        """Implements `Records.documents`."""
        for number, item in enumerate(self.items(path), 1):
            yield number, self.text(item, field, f"{path}, item {number}")


class RowGroup(NamedTuple):
    """A part of a table that can be read on its own."""

    n_rows: int
    size: int
    """Uncompressed bytes of the column of the text."""


class Table(Records):
    """Records in groups of rows, so that a large file is divided into ranges of rows."""

    @abc.abstractmethod
    def row_groups(self, path: Path, field: str) -> list[RowGroup]:
        """Returns the groups of a file. Raises ConfigError as `rows`."""

    @abc.abstractmethod
    def rows(
        self,
        path: Path,
        field: str,
        group: int | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Iterator[str]:
        """Yields column `field` of the rows start to stop - 1 of a file, or of one group of it.

        A null is "". Raises ConfigError if the file is damaged, or the column is missing or does
        not hold strings.
        """

    def documents(self, path: Path, field: str) -> Iterator[tuple[int, str]]:
        """Implements `Records.documents`."""
        return enumerate(self.rows(path, field), 1)


class JsonLines(Lines):
    """A JSON object on each line."""

    name = "jsonl"

    def text(self, line: bytes, field: str, location: str) -> str:
        """Implements `Lines.text`."""
        try:
            # Windows writes a byte order mark before the first line.
            parsed = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise _no_text(line[:_SHOWN_CHARACTERS], field, location, error) from error
        return _text_in(parsed, field, location, line)


class JsonList(Items):
    """One list of JSON objects."""

    name = "json"

    def items(self, path: Path) -> list[Any]:
        """Implements `Items.items`, up to 512 MiB."""
        with opened(path) as (file, _):
            data = file.read(strict_json.LARGE_FILE + 1)
        if len(data) > strict_json.LARGE_FILE:
            raise ConfigError(
                f"{path} is a list of more than {strict_json.LARGE_FILE // 2**20} "
                f"MiB; convert it: jq -c '.[]' {path} > lines.jsonl"
            )
        try:
            return strict_json.loads(data.decode("utf-8-sig"), list, size=strict_json.LARGE_FILE)
        except ValueError as error:
            raise ConfigError(
                f"{path} is not JSON: {error}; correct it, or leave it out"
            ) from error

    def text(self, item: Any, field: str, location: str) -> str:
        """Implements `Items.text`."""
        return _text_in(item, field, location)


class Json(Records):
    """JSON lines, or one list of objects."""

    name = "json"

    def resolve(self, path: Path, field: str = "") -> Lines | Items:
        """Returns the format of a .json file, by its start.

        field: the field of the text, which the first of the lines must have: settings on one line
        have not. "": any object will do. Raises ConfigError if the file is neither a list nor lines
        of objects.
        """
        with opened(path) as (file, _):
            # The first characters that are neither white space nor a byte order mark.
            start = b""
            number = 1
            while not start:
                data = file.read(_BUFFER)
                if not data:
                    break
                start = data.lstrip().removeprefix(codecs.BOM_UTF8).lstrip()
                number += data.count(b"\n") - start.count(b"\n")
            if start.startswith(b"["):  # perhaps on one line of gigabytes
                return _JSON_LIST
            line, line_end, _ = start.partition(b"\n")
            if not line_end:
                line += file.readline(_FIRST_LINE)
        if not line or (line.startswith(b"{") and len(line) >= _FIRST_LINE):
            return _JSON_LINES
        parsed = None
        with contextlib.suppress(ValueError, RecursionError):
            parsed = json.loads(line)
        if isinstance(parsed, dict):
            if not field:
                return _JSON_LINES
            if any(isinstance(value, str) for value in parsed.values()):
                _text_in(parsed, field, f"{path}, line {number}", line)  # raises without the field
                return _JSON_LINES
        requirement = f' with a string "{field}"' if field else ""
        raise ConfigError(
            f"{path} holds neither JSON lines nor a list of objects{requirement}; convert it to "
            ".jsonl, leave it out, or give it the suffix .txt to read it as one document"
        )

    def documents(self, path: Path, field: str) -> Iterator[tuple[int, str]]:
        """Implements `Records.documents`."""
        return self.resolve(path).documents(path, field)


class Parquet(Table):
    """A column of strings in a .parquet file."""

    name = "parquet"
    is_compressible = False

    def row_groups(self, path: Path, field: str) -> list[RowGroup]:
        """Implements `Table.row_groups`."""
        with _parquet_file(path, field) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            if not groups:
                return []
            names = [groups[0].column(i).path_in_schema for i in range(groups[0].num_columns)]
            column = names.index(field)
            return [
                RowGroup(group.num_rows, group.column(column).total_uncompressed_size)
                for group in groups
            ]

    def rows(
        self,
        path: Path,
        field: str,
        group: int | None = None,
        start: int = 0,
        stop: int | None = None,
    ) -> Iterator[str]:
        """Implements `Table.rows`."""
        groups = None if group is None else [group]
        with _parquet_file(path, field) as file:
            batches = file.iter_batches(_ROWS, row_groups=groups, columns=[field])
            texts = (text or "" for batch in batches for text in batch.column(0).to_pylist())
            yield from itertools.islice(texts, start, stop)


_JSON_LINES = JsonLines()
_JSON_LIST = JsonList()
FORMATS: dict[str, Format] = {
    ".txt": PlainText(),
    ".jsonl": _JSON_LINES,
    ".ndjson": _JSON_LINES,
    ".json": Json(),
    ".parquet": Parquet(),
}
"""The format of a file by its suffix."""
_FIRST_SUFFIXES = (".txt", ".jsonl", ".parquet")
"""Suffixes that the first versions knew; see `newly_read`."""


def suffixes() -> str:
    """Returns the suffixes of all formats, for messages."""
    compressible: list[str] = []
    incompressible: list[str] = []
    for suffix, format in FORMATS.items():
        (compressible if format.is_compressible else incompressible).append(suffix)
    return (
        f"{', '.join(compressible)} (each also .gz, .zst, .bz2 and .xz) and "
        f"{', '.join(incompressible)}"
    )


def detect(path: Path | str) -> Format | None:
    """Returns the format of a file by its suffix, in letters of any case; None for an unknown
    suffix.
    """
    format = FORMATS.get(inner_suffix(path))
    if format is None or Path(path).suffix.lower() in UNREAD:
        return None
    if is_compressed(path) and not format.is_compressible:
        return None
    return format


def has_records(path: Path | str) -> bool:
    """Whether a file, by its suffix, has documents in a field."""
    return isinstance(detect(path), Records)


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
    """Raises ConfigError for a file whose name says that it holds text in a form that is not read.

    That is better than to skip it, or to take it for one document: a tar of text is valid UTF-8, as
    is any JSON. field: what the first line of JSON lines must have, if it is known; see
    `Json.resolve`.
    """
    if inner_suffix(path) in _ARCHIVES:
        raise ConfigError(f"{path} is an archive; extract it, or leave it out")
    format = detect(path)
    is_known = inner_suffix(path) in FORMATS
    if Path(path).suffix.lower() in UNREAD or (is_known and format is None):
        raise ConfigError(
            f"{path} is compressed in a way that is not read; decompress it, compress it as .gz or "
            ".zst, or leave it out"
        )
    if format:
        format.resolve(path, field)


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
        lines = [f"{len(problems)} files are not read as they are", *problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            lines.append(f"and {len(problems) - _SHOWN} more")
        raise ConfigError("\n  - ".join(lines))


def text(data: bytes) -> str:
    """Returns the text of a UTF-8 file without the byte order mark that editors on Windows write.
    Raises UnicodeDecodeError.
    """
    return data.decode().removeprefix("\ufeff")


def is_blank(line: bytes) -> bool:
    """Whether a line has nothing but white space, and perhaps a byte order mark."""
    return not line.removeprefix(codecs.BOM_UTF8).strip()


def has_mark(path: Path | str) -> bool:
    """Whether a file of text begins with a byte order mark, which older versions kept: a corpus
    made then is a different one.
    """
    path = Path(path)
    if has_records(path):
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
    suffix = inner_suffix(path)
    is_new_format = suffix in FORMATS and suffix not in _FIRST_SUFFIXES
    return is_new_format or Path(path).suffix.lower() in (".bz2", ".xz")


def _text_in(parsed: Any, field: str, location: str, line: bytes = b"") -> str:
    """Returns the document in an object. Raises ConfigError if it has no string in the field.

    line: how the file spells it, for the message.
    """
    try:
        text = parsed[field]
        text.encode()  # JSON can spell lone surrogates, which are not text
        return text
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(parsed, dict) and field not in parsed:
            text_fields = [name for name, value in parsed.items() if isinstance(value, str)]
            if text_fields:
                names = ", ".join(f'"{name}"' for name in text_fields[:_SHOWN])
                raise ConfigError(
                    f'{location}: this JSON object has no "{field}"; it has {names}: choose one '
                    f"with {FIELD_OPTION}"
                ) from error
        quoted = line[:_SHOWN_CHARACTERS] or json.dumps(parsed)[:_SHOWN_CHARACTERS]
        raise _no_text(quoted, field, location, error) from error


def _no_text(quoted: bytes | str, field: str, location: str, error: Exception) -> ConfigError:
    return ConfigError(
        f'{location}: expected a JSON object with a string "{field}", got {quoted!r} '
        f"({type(error).__name__}); correct or remove it"
    )


@contextlib.contextmanager
def _parquet_file(path: Path, field: str) -> Iterator[Any]:
    """Opens a .parquet file. Raises ConfigError unless it has a column `field` of strings."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: pip install -e '.[data]'") from error
    try:
        # A name goes to pyarrow as UTF-8, which not every locale has.
        with open(path, "rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
            schema = file.schema_arrow
            if field not in schema.names:
                names = ", ".join(schema.names[:_SHOWN])
                raise ConfigError(
                    f'{path}: the table has no column "{field}"; it has {names}: choose one with '
                    f"{FIELD_OPTION}"
                )
            type_name = str(schema.field(field).type)
            if not type_name.endswith(("string", "string_view")):
                raise ConfigError(
                    f'{path}: column "{field}" holds {type_name}, not strings; choose another with '
                    f"{FIELD_OPTION}"
                )
            yield file
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is damaged or not a .parquet: {error}; fetch it again"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
