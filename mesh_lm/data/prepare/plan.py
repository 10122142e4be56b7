"""Splits input files into shards of text. The same files give the same shards for any number of
workers.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from mesh_lm.data import formats, sources, written
from mesh_lm.errors import ConfigError

SHARD = 2 * 2**20
"""Approximate bytes of text in a shard: a few seconds of work."""
_SHARDS_PER_PART = 16
"""A larger row group of a table is read in parts, each of which decodes the earlier ones again."""
_MAX_CHUNKS = 2**10
"""Assumed bound on the chunks of a compressed file, whose text has an unknown size."""
_SNIFFED_BYTES = 4096
_READ_BYTES = 2**20


class InputFile(NamedTuple):
    """A file, with the size and the time by which a change is noticed."""

    path: str
    """Absolute."""
    size: int
    modified_ns: int


@dataclasses.dataclass(frozen=True)
class FileRange:
    """A range of one file."""

    path: str
    format: formats.Format | None
    """None: a file of a directory with an unknown suffix; it is one document if it is UTF-8."""
    start: int = 0
    stop: int = 0
    """The lines that start at the bytes [start, stop) belong to the range; of a table, the rows
    [start, stop)."""
    group: int = 0
    """Row group of a table."""
    entire_file: bool = True
    """Whether the range is the entire file."""


@dataclasses.dataclass(frozen=True)
class ReadUnit:
    """Input that can be read independently: a range of a large file, several small files, or one
    compressed file.
    """

    segments: tuple[FileRange, ...]
    size: int
    """Bytes on disk."""
    ends: bool = True
    """Whether its last document ends with it; False inside a large .txt file."""


@dataclasses.dataclass(frozen=True)
class TextShard:
    """A task of a worker: a unit, or a chunk of a compressed unit's text."""

    unit: int
    chunk: int
    segments: tuple[FileRange, ...]
    size: int
    """Bytes on disk that it accounts for."""
    ends: bool = True
    """Whether its last document ends with it."""
    last: bool = True
    """Whether it is the last shard of the unit."""
    data: bytes | None = None
    """The decompressed text of a chunk."""
    first_line: int = 1
    """The line number at which `data` starts."""


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """All input, in the order in which it is read."""

    units: tuple[ReadUnit, ...]
    files: tuple[InputFile, ...]
    not_text: int
    """Number of files in directories that are skipped because they are not UTF-8."""

    @property
    def size(self) -> int:
        """Bytes on disk of all input."""
        return sum(unit.size for unit in self.units)

    @property
    def tasks(self) -> int:
        """An upper bound on the number of shards."""
        bound = 0
        for unit in self.units:
            bound += _MAX_CHUNKS if formats.is_compressed(unit.segments[0].path) else 1
        return bound

    def shards(self, unit: int = 0, chunk: int = 0) -> Iterator[TextShard]:
        """Yields the shards in order, starting at a chunk of a unit."""
        for number in range(unit, len(self.units)):
            first_chunk = chunk if number == unit else 0
            yield from _shards(number, self.units[number], first_chunk)


def make(
    inputs: Sequence[str], field: str, output: str = "", skip_bad_lines: bool = False
) -> ReadPlan:
    """Returns the plan for files and directories in the given order.

    Args:
      inputs: paths of files and directories.
      field: name of the field, or column, that holds the text.
      output: prefix of the output, whose files are skipped in directories.
      skip_bad_lines: whether lines may lack `field`. If not, the .json files of a directory whose
        first line does are refused here, all at once.

    Raises:
      ConfigError: a path is missing, empty, unreadable or of an unsupported type.
    """
    planner = _Planner(field)
    for argument in inputs:
        path = Path(argument).expanduser()
        if path.is_dir():
            files = _files_of_directory(path, argument, output)
            formats.require_all_readable(files, "" if skip_bad_lines else field)
            for file in files:
                planner.add(file)
        else:
            _require_file(path, argument)
            planner.add(path)
    return planner.plan()


def _files_of_directory(directory: Path, argument: str, output: str) -> list[Path]:
    """Returns the files below an input that are not empty, without those of the output."""
    files = []
    for name in sources.below(directory):
        file = directory / name
        if file.stat().st_size and not written.is_of_prefix(output, file):
            files.append(file)
    if not files:
        raise ConfigError(
            f"--input={argument} has no files, or only hidden or empty ones; give one with text"
        )
    return files


def _require_file(path: Path, argument: str) -> None:
    """Raises ConfigError unless an input is a file of a known type that has text."""
    if not path.is_file():
        raise ConfigError(
            f"--input={argument}: no such input file or directory; give {formats.suffixes()} "
            "files, or directories"
        )
    if path.stat().st_size == 0:
        raise ConfigError(f"--input={argument} is an empty file; leave it out")
    if formats.detect(path) is None:
        formats.require_readable(path)
        raise ConfigError(
            f"--input={argument}: files of type {path.suffix or '(none)'} are not read; give "
            f"{formats.suffixes()} files, or a directory of text"
        )


class _Planner:
    """Divides files into units: large ones into ranges, and small ones together."""

    def __init__(self, field: str) -> None:
        self._field = field
        self._units: list[ReadUnit] = []
        self._files: list[InputFile] = []
        self._n_not_text = 0
        # The next unit of small files: its segments, and the sums of their text and of their bytes
        # on disk.
        self._segments: list[FileRange] = []
        self._text_size = 0
        self._disk_size = 0

    def add(self, file: Path) -> None:
        """Adds a file, unless it is of an unknown type and not UTF-8."""
        path = str(file.absolute())
        stat = file.stat()
        size = stat.st_size
        compressed = formats.is_compressed(file)
        format = formats.detect(file)
        if format is None and not _is_text(file, size):
            self._n_not_text += 1
            return
        if format is not None:
            format = format.resolve(file)
        elif compressed:
            format = formats.PlainText()  # its start is text, so the rest has to be

        self._files.append(InputFile(path, size, stat.st_mtime_ns))
        if compressed or isinstance(format, formats.Items):
            self._flush()
            self._units.append(ReadUnit((FileRange(path, format),), size))
        elif isinstance(format, formats.Table):
            self._add_table(format, file, path, size)
        elif size <= SHARD:
            self._add_small(FileRange(path, format, 0, size), size, size)
        else:
            self._flush()
            for start in range(0, size, SHARD):
                stop = min(start + SHARD, size)
                segment = FileRange(path, format, start, stop, entire_file=False)
                ends = isinstance(format, formats.Lines) or stop == size
                self._units.append(ReadUnit((segment,), stop - start, ends))

    def plan(self) -> ReadPlan:
        """Returns the plan of all files that were added."""
        self._flush()
        return ReadPlan(tuple(self._units), tuple(self._files), self._n_not_text)

    def _add_table(self, table: formats.Table, file: Path, path: str, disk_size: int) -> None:
        groups = table.row_groups(file, self._field)
        text_size = sum(size for _, size in groups) or 1
        for group, (n_rows, size) in enumerate(groups):
            n_parts = -(-size // (_SHARDS_PER_PART * SHARD))
            n_parts = max(1, min(n_rows, n_parts))
            for part in range(n_parts):
                start = n_rows * part // n_parts
                stop = n_rows * (part + 1) // n_parts
                segment = FileRange(path, table, start, stop, group)
                self._add_small(segment, size // n_parts, disk_size * size // text_size // n_parts)

    def _add_small(self, segment: FileRange, text_size: int, disk_size: int) -> None:
        self._segments.append(segment)
        self._text_size += text_size
        self._disk_size += disk_size
        if self._text_size >= SHARD:
            self._flush()

    def _flush(self) -> None:
        """Ends the unit of small files."""
        if self._segments:
            self._units.append(ReadUnit(tuple(self._segments), self._disk_size))
        self._segments = []
        self._text_size = 0
        self._disk_size = 0


def _is_text(file: Path, size: int) -> bool:
    """Whether a file is UTF-8.

    Only the start of a small file is checked, since it can still be skipped later. A range of a
    large one cannot.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    check_entirely = size > SHARD and not formats.is_compressed(file)
    try:
        with formats.opened(file) as (opened, _):
            decoder.decode(opened.read(_SNIFFED_BYTES))
            while check_entirely:
                data = opened.read(_READ_BYTES)
                if not data:
                    break
                decoder.decode(data)
        return True
    except UnicodeDecodeError:
        return False


def _shards(number: int, unit: ReadUnit, first_chunk: int) -> Iterator[TextShard]:
    """Yields the shards of a unit from `first_chunk` on."""
    segment = unit.segments[0]
    if isinstance(segment.format, formats.Items) or not formats.is_compressed(segment.path):
        yield TextShard(number, 0, unit.segments, unit.size, unit.ends)
        return
    with formats.opened(Path(segment.path)) as (file, raw):
        chunk = 0
        first_line = 1
        disk_start = 0
        data = file.read(SHARD) + file.readline()
        while True:
            disk_end = raw.tell()
            # Read ahead by a chunk, because only the end of the file tells which chunk is the last.
            next_data = file.read(SHARD) + file.readline()
            last = not next_data
            if last:
                disk_end = unit.size
            if chunk >= first_chunk:
                yield TextShard(
                    unit=number,
                    chunk=chunk,
                    segments=unit.segments,
                    size=disk_end - disk_start,
                    ends=last or isinstance(segment.format, formats.Lines),
                    last=last,
                    data=data,
                    first_line=first_line,
                )
            if last:
                return
            chunk += 1
            first_line += data.count(b"\n")
            disk_start = disk_end
            data = next_data
