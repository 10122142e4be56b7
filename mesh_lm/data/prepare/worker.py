"""Encodes shards, in a separate process."""

from __future__ import annotations

import dataclasses
import functools
import io
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import BinaryIO

import numpy as np

from mesh_lm.data import formats
from mesh_lm.data.encoding import encode
from mesh_lm.data.indexed import dtype_of
from mesh_lm.data.prepare.plan import FileRange, TextShard
from mesh_lm.data.tokenizer import Tokenizer, load_tokenizer
from mesh_lm.errors import ConfigError

PIECE = 2**20
"""Characters per encoding task; longer documents are split at line ends."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that all workers share."""

    tokenizer: str
    text_field: str
    skip_bad_lines: bool


@dataclasses.dataclass
class Encoded:
    """The documents of one shard."""

    tokens: np.ndarray
    """Tokens of all documents, concatenated, [total], in the dtype of the .bin."""
    lengths: np.ndarray
    """Tokens per document, int64 [documents]. The last document may continue in the next shard."""
    text_bytes: int = 0
    """UTF-8 bytes of the documents."""
    lost_bytes: int = 0
    """Those of them that the tokens do not spell."""
    bad_lines: int = 0
    """Skipped lines."""
    bad_files: int = 0
    """Skipped files of directories, which are not UTF-8."""

    @classmethod
    def empty(cls) -> Encoded:
        """Returns an instance without documents."""
        return cls(np.empty(0, np.int32), np.empty(0, np.int64))

    def lose(self, n_bytes: int) -> None:
        """Counts bytes that the tokens do not spell."""
        self.lost_bytes += n_bytes


def start() -> None:
    """Sets up a worker process: one thread; it ignores Ctrl-C (the parent terminates it) and exits
    if the parent does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = "1"
    if parent := multiprocessing.parent_process():
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def run(settings: Settings, shard: TextShard) -> Encoded:
    """Encodes a shard as a pool task; each process loads the tokenizer once."""
    return _encoder(settings)(shard)


@functools.cache
def _encoder(settings: Settings) -> Encoder:
    return Encoder(settings)


class Encoder:
    """Encodes shards one after another."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer | None = None) -> None:
        self._settings, self._tokenizer = settings, tokenizer or load_tokenizer(settings.tokenizer)

    def __call__(self, shard: TextShard) -> Encoded:
        """Returns the encoded shard. Raises ConfigError for an unreadable file or, unless they are
        skipped, a bad line.
        """
        encoded = Encoded.empty()
        # Each batch has one text, because the tokenizer's own threads would compete with the other
        # workers.
        documents = list(
            encode(
                self._tokenizer, self.texts(shard, encoded), batch=1, piece=PIECE, lost=encoded.lose
            )
        )
        if not documents and _is_part_of_a_document(shard.segments[0]):  # no line starts here
            documents = [np.array([self._tokenizer.eod], np.int32)]
        if not shard.ends:
            documents[-1] = documents[-1][:-1]
        encoded.lengths = np.array([len(ids) for ids in documents], np.int64)
        encoded.tokens = np.concatenate(
            [encoded.tokens, *documents],
            dtype=dtype_of(self._tokenizer.vocab_size),
            casting="unsafe",
        )
        return encoded

    def texts(self, shard: TextShard, counts: Encoded) -> Iterator[str]:
        """Yields the non-empty documents and counts them in `counts`."""
        for segment in shard.segments:
            for text in self._read(shard, segment, counts):
                if text:
                    counts.text_bytes += len(text.encode())
                    yield text

    def _read(self, shard: TextShard, segment: FileRange, counts: Encoded) -> Iterator[str]:
        path, format = Path(segment.path), segment.format
        if isinstance(format, formats.Table):
            field = self._settings.text_field
            yield from format.rows(path, field, segment.group, segment.start, segment.stop)
            return
        if isinstance(format, formats.Items):
            yield from self._items(format, path, counts)
            return
        try:
            with open(path, "rb") if shard.data is None else io.BytesIO(shard.data) as file:
                lines = (
                    _lines(file, segment) if shard.data is None else ((-1, line) for line in file)
                )
                if isinstance(format, formats.Lines):
                    yield from self._rows(format, lines, path, shard.first_line, counts)
                else:
                    text = self._text(list(lines), segment, counts)
                    is_start = segment.start == 0 and shard.chunk == 0
                    yield text.removeprefix("\ufeff") if is_start else text  # a byte order mark
        except OSError as error:
            raise formats.unreadable(path, error) from error

    def _rows(
        self,
        format: formats.Lines,
        lines: Iterable[tuple[int, bytes]],
        path: Path,
        first_line: int,
        counts: Encoded,
    ) -> Iterator[str]:
        for number, (offset, line) in enumerate(lines, first_line):
            if formats.is_blank(line):
                continue
            try:
                yield format.text(line, self._settings.text_field, str(path))
            except ConfigError:
                if not self._settings.skip_bad_lines:
                    where = f"{path}, line {number if offset < 0 else _line_number(path, offset)}"
                    # raises again, with the line number
                    format.text(line, self._settings.text_field, where)
                counts.bad_lines += 1

    def _items(self, format: formats.Items, path: Path, counts: Encoded) -> Iterator[str]:
        for number, item in enumerate(format.items(path), 1):
            try:
                yield format.text(item, self._settings.text_field, f"{path}, item {number}")
            except ConfigError:
                if not self._settings.skip_bad_lines:
                    raise
                counts.bad_lines += 1

    def _text(self, lines: list[tuple[int, bytes]], segment: FileRange, counts: Encoded) -> str:
        try:
            return b"".join(line for _, line in lines).decode()
        except UnicodeDecodeError as error:
            if segment.format is None and segment.entire_file:
                counts.bad_files += 1
                return ""
            where = f" (byte {lines[0][0] + error.start})" if lines[0][0] >= 0 else ""
            raise ConfigError(
                f"{segment.path} is not UTF-8{where}; convert it, or leave it out"
            ) from error


def _is_part_of_a_document(segment: FileRange) -> bool:
    return not isinstance(segment.format, formats.Records) and not segment.entire_file


def _lines(file: BinaryIO, segment: FileRange) -> Iterator[tuple[int, bytes]]:
    """Yields (offset, line) for the lines that start in the range."""
    if segment.start:
        file.seek(segment.start - 1)
        # bounded, because a line may be longer than many ranges
        file.readline(segment.stop - segment.start + 1)
    offset = file.tell()
    while offset < segment.stop and (line := file.readline()):
        yield offset, line
        offset += len(line)


def _line_number(path: Path, offset: int) -> int:
    """Returns the number, from 1, of the line that starts at the offset."""
    number = 1
    with open(path, "rb") as file:
        while offset > 0 and (data := file.read(min(2**20, offset))):
            number, offset = number + data.count(b"\n"), offset - len(data)
    return number
