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
from typing import BinaryIO, NamedTuple

import numpy as np

from mesh_lm.data import formats
from mesh_lm.data.encoding import encode
from mesh_lm.data.indexed import dtype_of
from mesh_lm.data.prepare.plan import FileRange, TextShard
from mesh_lm.data.tokenizer import Tokenizer, load_tokenizer
from mesh_lm.errors import ConfigError

PIECE = 2**20
"""Characters per encoding task; longer documents are split at line ends."""
_READ_BYTES = 2**20
_BYTE_ORDER_MARK = "\ufeff"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that all workers share."""

    tokenizer: str
    text_field: str
    skip_bad_lines: bool


@dataclasses.dataclass
class Encoded:
    """The documents of a shard."""

    tokens: np.ndarray
    """Tokens of all documents, concatenated, in the dtype of the .bin."""
    lengths: np.ndarray
    """Tokens per document, int64 [documents]. The last document may continue in the next shard."""
    text_bytes: int = 0
    """UTF-8 bytes of the documents."""
    lost_bytes: int = 0
    """How many of `text_bytes` the tokens do not spell."""
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


class _Line(NamedTuple):
    offset: int | None
    """Position in the file; None in the text of a compressed one."""
    data: bytes


def start() -> None:
    """Sets up a worker process: one thread; it ignores Ctrl-C (the parent terminates it) and exits
    if the parent does.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RAYON_NUM_THREADS"] = "1"
    parent = multiprocessing.parent_process()
    if parent:
        threading.Thread(target=_exit_after, args=[parent.sentinel], daemon=True).start()


def _exit_after(sentinel: int) -> None:
    """Ends this process as soon as the process of the sentinel has ended."""
    wait([sentinel])
    os._exit(1)


def run(settings: Settings, shard: TextShard) -> Encoded:
    """Encodes a shard as a pool task; each process loads the tokenizer once."""
    return _encoder(settings)(shard)


@functools.cache
def _encoder(settings: Settings) -> Encoder:
    return Encoder(settings)


class Encoder:
    """Encodes shards one after another."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer | None = None) -> None:
        """tokenizer: None to load that of the settings."""
        self._settings = settings
        self._tokenizer = tokenizer or load_tokenizer(settings.tokenizer)

    def __call__(self, shard: TextShard) -> Encoded:
        """Returns the encoded shard. Raises ConfigError for an unreadable file or, unless they are
        skipped, a bad line.
        """
        encoded = Encoded.empty()
        # Each batch has one text, because the tokenizer's own threads would compete with the other
        # workers.
        texts = self.texts(shard, encoded)
        documents = list(encode(self._tokenizer, texts, batch=1, piece=PIECE, lost=encoded.lose))
        # A range inside a long line has no text, but the document may end with it.
        if not documents and _is_part_of_document(shard.segments[0]):
            documents = [np.array([self._tokenizer.eod], np.int32)]
        if not shard.ends:
            documents[-1] = documents[-1][:-1]  # without the EOD

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
        path = Path(segment.path)
        format = segment.format
        if isinstance(format, formats.Table):
            yield from format.rows(
                path, self._settings.text_field, segment.group, segment.start, segment.stop
            )
            return
        if isinstance(format, formats.Items):
            yield from self._items(format, path, counts)
            return
        try:
            with open(path, "rb") if shard.data is None else io.BytesIO(shard.data) as file:
                if shard.data is None:
                    lines = _lines(file, segment)
                else:
                    lines = (_Line(None, line) for line in file)
                if isinstance(format, formats.Lines):
                    yield from self._records(format, lines, path, shard.first_line, counts)
                    return
                text = self._plain_text(list(lines), segment, counts)
                if segment.start == 0 and shard.chunk == 0:
                    text = text.removeprefix(_BYTE_ORDER_MARK)
                yield text
        except OSError as error:
            raise formats.unreadable(path, error) from error

    def _records(
        self,
        format: formats.Lines,
        lines: Iterable[_Line],
        path: Path,
        first_line: int,
        counts: Encoded,
    ) -> Iterator[str]:
        for number, line in enumerate(lines, first_line):
            if formats.is_blank(line.data):
                continue
            try:
                yield format.text(line.data, self._settings.text_field, str(path))
            except ConfigError:
                if not self._settings.skip_bad_lines:
                    # Raises again, with the line number, which takes reading the file.
                    if line.offset is not None:
                        number = _line_number(path, line.offset)
                    format.text(line.data, self._settings.text_field, f"{path}, line {number}")
                counts.bad_lines += 1

    def _items(self, format: formats.Items, path: Path, counts: Encoded) -> Iterator[str]:
        for number, item in enumerate(format.items(path), 1):
            try:
                yield format.text(item, self._settings.text_field, f"{path}, item {number}")
            except ConfigError:
                if not self._settings.skip_bad_lines:
                    raise
                counts.bad_lines += 1

    def _plain_text(self, lines: list[_Line], segment: FileRange, counts: Encoded) -> str:
        """Returns the text of the lines; "" for a file of a directory that is not UTF-8."""
        try:
            return b"".join(line.data for line in lines).decode()
        except UnicodeDecodeError as error:
            if segment.format is None and segment.entire_file:
                counts.bad_files += 1
                return ""
            offset = lines[0].offset
            position = "" if offset is None else f" (byte {offset + error.start})"
            raise ConfigError(
                f"{segment.path} is not UTF-8{position}; convert it, or leave it out of --input"
            ) from error


def _is_part_of_document(segment: FileRange) -> bool:
    return not isinstance(segment.format, formats.Records) and not segment.entire_file


def _lines(file: BinaryIO, segment: FileRange) -> Iterator[_Line]:
    """Yields the lines that start in the range."""
    # Skips the rest of the line before. It begins a byte earlier: a line that starts at
    # `segment.start` belongs to the range.
    if segment.start:
        file.seek(segment.start - 1)
        # bounded, because a line may be longer than many ranges
        file.readline(segment.stop - segment.start + 1)
    offset = file.tell()
    while offset < segment.stop:
        line = file.readline()
        if not line:
            return
        yield _Line(offset, line)
        offset += len(line)


def _line_number(path: Path, offset: int) -> int:
    """Returns the number, from 1, of the line that starts at the offset."""
    number = 1
    with open(path, "rb") as file:
        while offset > 0:
            data = file.read(min(_READ_BYTES, offset))
            if not data:
                break
            number += data.count(b"\n")
            offset -= len(data)
    return number
