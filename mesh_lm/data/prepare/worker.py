"""A shard to its tokens, in a process of its own."""

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
"""Characters that are encoded whole; longer documents are cut, at line ends."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all workers are told at their start."""

    tokenizer: str
    text_field: str
    skip_bad_lines: bool


@dataclasses.dataclass
class Encoded:
    """The documents of one shard."""

    tokens: np.ndarray
    """All back to back, [total], in the type of the .bin."""
    lengths: np.ndarray
    """int64 [documents]. Where the shard does not end its last document, the rest of that one is in the next shard."""
    text_bytes: int = 0
    """UTF-8 bytes of the documents."""
    bad_lines: int = 0
    """Skipped."""
    bad_files: int = 0
    """Skipped: files of a directory that are not UTF-8."""

    @classmethod
    def empty(cls) -> Encoded:
        return cls(np.empty(0, np.int32), np.empty(0, np.int64))


def start() -> None:
    """Readies a worker process: one thread, deaf to Ctrl-C (the parent ends it), and gone when the parent is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = "1"
    if parent := multiprocessing.parent_process():
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()


def run(settings: Settings, shard: TextShard) -> Encoded:
    """The task of a pool; the tokenizer is loaded once in a process."""
    return _encoder(settings)(shard)


@functools.cache
def _encoder(settings: Settings) -> Encoder:
    return Encoder(settings)


class Encoder:
    """Encodes shards one after another."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer | None = None) -> None:
        self._settings, self._tokenizer = settings, tokenizer or load_tokenizer(settings.tokenizer)

    def __call__(self, shard: TextShard) -> Encoded:
        """Raises ConfigError for a file that cannot be read and, where they are not skipped, for a bad line, with its number."""
        found = Encoded.empty()
        # A batch of one text each: the tokenizer's own threads would compete with the other workers.
        documents = list(encode(self._tokenizer, self.texts(shard, found), batch=1, piece=PIECE))
        if not documents and _is_part_of_a_document(shard.segments[0]):  # no line starts here
            documents = [np.array([self._tokenizer.eod], np.int32)]
        if not shard.ends:
            documents[-1] = documents[-1][:-1]
        found.lengths = np.array([len(ids) for ids in documents], np.int64)
        found.tokens = np.concatenate([found.tokens, *documents], dtype=dtype_of(self._tokenizer.vocab_size), casting="unsafe")
        return found

    def texts(self, shard: TextShard, found: Encoded) -> Iterator[str]:
        """The documents that are not empty, counted in `found`."""
        for segment in shard.segments:
            for text in self._read(shard, segment, found):
                if text:
                    found.text_bytes += len(text.encode())
                    yield text

    def _read(self, shard: TextShard, segment: FileRange, found: Encoded) -> Iterator[str]:
        path, field = Path(segment.path), self._settings.text_field
        if segment.kind == "parquet":
            yield from formats.rows(path, field, segment.group, segment.start, segment.stop)
            return
        try:
            with open(path, "rb") if shard.data is None else io.BytesIO(shard.data) as file:
                lines = _lines(file, segment) if shard.data is None else ((-1, line) for line in file)
                if segment.kind == "jsonl":
                    yield from self._rows(lines, path, shard.first_line, found)
                else:
                    yield self._text(list(lines), segment, found)
        except OSError as error:
            raise formats.unreadable(path, error) from error

    def _rows(self, lines: Iterable[tuple[int, bytes]], path: Path, first_line: int, found: Encoded) -> Iterator[str]:
        for number, (place, line) in enumerate(lines, first_line):
            if not line.strip():
                continue
            try:
                yield formats.text_of(line, self._settings.text_field, str(path))
            except ConfigError:
                if not self._settings.skip_bad_lines:
                    where = f"{path}, line {number if place < 0 else _line_number(path, place)}"
                    formats.text_of(line, self._settings.text_field, where)  # raises again, with a number
                found.bad_lines += 1

    def _text(self, lines: list[tuple[int, bytes]], segment: FileRange, found: Encoded) -> str:
        try:
            return b"".join(line for _, line in lines).decode()
        except UnicodeDecodeError as error:
            if segment.kind == "other" and segment.whole:
                found.bad_files += 1
                return ""
            where = f" (byte {lines[0][0] + error.start})" if lines[0][0] >= 0 else ""
            raise ConfigError(f"{segment.path} is not UTF-8{where}; convert it, or leave it out") from error


def _is_part_of_a_document(segment: FileRange) -> bool:
    return segment.kind in ("txt", "other") and not segment.whole


def _lines(file: BinaryIO, segment: FileRange) -> Iterator[tuple[int, bytes]]:
    """(its place, a line) for the lines that start in the segment."""
    if segment.start:
        file.seek(segment.start - 1)
        file.readline(segment.stop - segment.start + 1)  # no further: a line may be longer than many segments
    place = file.tell()
    while place < segment.stop and (line := file.readline()):
        yield place, line
        place += len(line)


def _line_number(path: Path, offset: int) -> int:
    """Of the line that starts at the offset, from 1."""
    number = 1
    with open(path, "rb") as file:
        while offset > 0 and (data := file.read(min(2**20, offset))):
            number, offset = number + data.count(b"\n"), offset - len(data)
    return number
