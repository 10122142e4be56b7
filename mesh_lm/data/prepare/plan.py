"""Splits input files into shards of text. The same files give the same shards for any number of
workers.
"""

from __future__ import annotations

import codecs
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from mesh_lm.data import formats, sources, written
from mesh_lm.errors import ConfigError

SHARD = 2 * 2**20
"""Approximate bytes of text in a shard: a few seconds of work."""
_SLICE = 16
"""Shards' worth of text in a part of a large row group; each part decodes the earlier ones
again."""


@dataclasses.dataclass(frozen=True)
class FileRange:
    """A range of one file."""

    path: str
    format: formats.Format | None
    """None: a file of a directory with an unknown suffix; it is one document if it is UTF-8."""
    start: int = 0
    stop: int = 0
    """In bytes: lines that start in [start, stop) belong to the range. In rows for a table."""
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
    """Whether its last document ends here; False inside a large .txt file."""


@dataclasses.dataclass(frozen=True)
class TextShard:
    """One task of a worker: a unit, or a chunk of a compressed unit's text."""

    unit: int
    chunk: int
    segments: tuple[FileRange, ...]
    size: int
    """Bytes on disk that it accounts for."""
    ends: bool = True
    """Whether its last document ends here."""
    last: bool = True
    """Whether this is the unit's last shard."""
    data: bytes | None = None
    """The decompressed text of a chunk."""
    first_line: int = 1
    """The line number at which `data` starts."""


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """All input, in the order in which it is read."""

    units: tuple[ReadUnit, ...]
    files: tuple[tuple[str, int, int], ...]
    """Absolute path, bytes and modification time (ns) of every file."""
    not_text: int
    """Number of files in directories that are skipped because they are not UTF-8."""

    @property
    def size(self) -> int:
        """Bytes on disk of all input."""
        return sum(unit.size for unit in self.units)

    @property
    def tasks(self) -> int:
        """An upper bound on the number of shards."""
        return sum(
            2**10 if formats.is_compressed(unit.segments[0].path) else 1 for unit in self.units
        )

    def shards(self, unit: int = 0, chunk: int = 0) -> Iterator[TextShard]:
        """Yields the shards in order, starting at a chunk of a unit."""
        for number in range(unit, len(self.units)):
            yield from _shards(number, self.units[number], chunk if number == unit else 0)


def make(
    inputs: Sequence[str], field: str, output: str = "", skip_bad_lines: bool = False
) -> ReadPlan:
    """Returns the plan for files and directories in the given order; in directories, files of the
    prefix `output` are skipped.

    skip_bad_lines: whether lines may lack `field`; else the .json files of a directory whose first
    line does are refused here, all at once.

    Raises:
      ConfigError: a path is missing, empty, unreadable or of an unsupported type.
    """
    planner = _Planner(field)
    for given in inputs:
        path = Path(given).expanduser()
        if path.is_dir():
            names = [
                name
                for name in sources.below(path)
                if (path / name).stat().st_size and not written.is_of_prefix(output, path / name)
            ]
            if not names:
                raise ConfigError(
                    f"--input={given} has no files, or only hidden or empty ones; give one with "
                    "text"
                )
            formats.require_all_readable(
                (path / name for name in names), "" if skip_bad_lines else field
            )
            for name in names:
                planner.add(path / name)
        elif not path.is_file():
            raise ConfigError(
                f"--input={given}: no such file or directory; give {formats.SUFFIXES} files, or "
                "directories"
            )
        elif path.stat().st_size == 0:
            raise ConfigError(f"--input={given} is empty; leave it out")
        elif formats.detect(path) is None:
            formats.require_readable(path)
            raise ConfigError(
                f"--input={given}: files of type {path.suffix or '(none)'} are not read; give "
                f"{formats.SUFFIXES} files, or a directory of text"
            )
        else:
            planner.add(path)
    return planner.plan()


class _Planner:
    def __init__(self, field: str) -> None:
        self._field = field
        self._units: list[ReadUnit] = []
        self._files: list[tuple[str, int, int]] = []
        self._small: list[tuple[FileRange, int]] = []
        self._small_size = 0
        self._not_text = 0

    def add(self, file: Path) -> None:
        path, stat = str(file.absolute()), file.stat()
        format, compressed = formats.detect(file), formats.is_compressed(file)
        if format is None and not _is_text(file, stat.st_size):
            self._not_text += 1
            return
        if format is not None:
            format = format.resolve(file)
        elif compressed:  # its start is text, so the rest has to be
            format = formats.PlainText()
        self._files.append((path, stat.st_size, stat.st_mtime_ns))
        if compressed or isinstance(format, formats.Items):
            self._flush()
            self._units.append(ReadUnit((FileRange(path, format),), stat.st_size))
        elif isinstance(format, formats.Table):
            self._add_table(format, file, path, stat.st_size)
        elif stat.st_size <= SHARD:
            self._add_small(FileRange(path, format, 0, stat.st_size), stat.st_size, stat.st_size)
        else:
            self._flush()
            for start in range(0, stat.st_size, SHARD):
                stop = min(start + SHARD, stat.st_size)
                ends = isinstance(format, formats.Lines) or stop == stat.st_size
                segment = FileRange(path, format, start, stop, entire_file=False)
                self._units.append(ReadUnit((segment,), stop - start, ends))

    def _add_table(self, table: formats.Table, file: Path, path: str, on_disk: int) -> None:
        groups = table.row_groups(file, self._field)
        total = sum(size for _, size in groups) or 1
        for group, (n_rows, size) in enumerate(groups):
            parts = max(1, min(n_rows, -(-size // (_SLICE * SHARD))))
            for part in range(parts):
                start, stop = n_rows * part // parts, n_rows * (part + 1) // parts
                self._add_small(
                    FileRange(path, table, start, stop, group),
                    size // parts,
                    on_disk * size // total // parts,
                )

    def _add_small(self, segment: FileRange, size: int, on_disk: int) -> None:
        self._small.append((segment, on_disk))
        self._small_size += size
        if self._small_size >= SHARD:
            self._flush()

    def _flush(self) -> None:
        if self._small:
            self._units.append(
                ReadUnit(
                    tuple(segment for segment, _ in self._small),
                    sum(size for _, size in self._small),
                )
            )
            self._small, self._small_size = [], 0

    def plan(self) -> ReadPlan:
        self._flush()
        return ReadPlan(tuple(self._units), tuple(self._files), self._not_text)


def _is_text(file: Path, size: int) -> bool:
    """Whether a file is UTF-8. Only the start of a small file is checked: it can still be skipped
    later, a range of a large one cannot.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with formats.opened(file) as (opened, _):
            decoder.decode(opened.read(4096))
            while size > SHARD and not formats.is_compressed(file) and (data := opened.read(2**20)):
                decoder.decode(data)
        return True
    except UnicodeDecodeError:
        return False


def _shards(number: int, unit: ReadUnit, skip: int) -> Iterator[TextShard]:
    (segment, *_) = unit.segments
    if isinstance(segment.format, formats.Items) or not formats.is_compressed(segment.path):
        yield TextShard(number, 0, unit.segments, unit.size, unit.ends)
        return
    with formats.opened(Path(segment.path)) as (file, raw):
        chunk, line, start = 0, 1, 0
        data = file.read(SHARD) + file.readline()
        while True:
            end = raw.tell()
            following = file.read(SHARD) + file.readline()
            last = not following
            if chunk >= skip:
                ends = last or isinstance(segment.format, formats.Lines)
                yield TextShard(
                    number,
                    chunk,
                    unit.segments,
                    (unit.size if last else end) - start,
                    ends,
                    last,
                    data,
                    line,
                )
            if last:
                return
            chunk, line, start, data = chunk + 1, line + data.count(b"\n"), end, following
