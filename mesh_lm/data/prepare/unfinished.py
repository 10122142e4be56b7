"""The directory `<prefix>.parts/` with unfinished work, and how it becomes the final files.

plan.json      inputs and settings; a resumed run must use the same
tokenizer/     a copy of the tokenizer; becomes <prefix>.tokenizer/
tokens.bin     tokens of the finished shards, in order; renamed to <prefix>.bin, so that no token is
               written twice
lengths.i32    lengths of the complete documents
journal.jsonl  totals up to a shard, one line per sync; a resume truncates the other two files to
               the last line
lock           locked by the process that works here
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mesh_lm import strict_json
from mesh_lm.data.atomic import atomic_write, sibling
from mesh_lm.data.digests import digests_path
from mesh_lm.data.indexed import Documents, bin_path, idx_path, write_index
from mesh_lm.data.prepare.plan import TextShard
from mesh_lm.data.prepare.worker import Encoded
from mesh_lm.data.tokenizer import Tokenizer
from mesh_lm.errors import ConfigError

_SYNC_SECONDS = 1.0
"""Interval between syncs: a killed process loses this much work, plus the shards being encoded."""
_LENGTH_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Totals:
    """A line of the journal: the next shard, and sums over all earlier shards."""

    unit: int = 0
    chunk: int = 0
    documents: int = 0
    """Complete documents."""
    tokens: int = 0
    pending: int = 0
    """Tokens of a document that continues in the next shard."""
    bytes: int = 0
    lost_bytes: int | None = 0
    """Bytes of text that the tokens do not spell; None if an older version, which did not count
    them, encoded some of the shards."""
    bad_lines: int = 0
    bad_files: int = 0
    size: int = 0
    """Bytes on disk that have been read."""


class Unfinished:
    """The files of an unfinished preparation. A context manager, which holds a lock against a
    second process.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.directory = Path(f"{prefix}.parts")
        self._plan = self.directory / "plan.json"
        self._lock_file = self.directory / "lock"
        self._tokenizer = self.directory / "tokenizer"
        self._tokens = self.directory / "tokens.bin"
        self._lengths = self.directory / "lengths.i32"
        self._journal = self.directory / "journal.jsonl"
        self._final_tokenizer = Path(f"{prefix}.tokenizer")

    def __enter__(self) -> Unfinished:
        with self._write_errors():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._lock_file, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:  # other errors: a file system without locks
                os.close(self._lock)
                raise ConfigError(
                    f"another process is writing {self.directory}; wait for it, or choose another "
                    "--output"
                ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._plan.exists():  # nothing was started
            with contextlib.suppress(OSError):  # not empty: it has files of others
                self._lock_file.unlink(missing_ok=True)
                self.directory.rmdir()
        os.close(self._lock)

    def claim(self, recipe: dict[str, Any]) -> None:
        """Records the inputs and settings. Raises ConfigError if different ones are already
        recorded.
        """
        if not self._plan.exists():
            self._require_unused()
            with self._write_errors(), atomic_write(self._plan) as (file,):
                file.write(json.dumps(recipe).encode())
            return
        try:
            recorded = strict_json.read(self._plan, size=strict_json.LARGE_FILE)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read the recipe in {self._plan} ({error}); "
                f"remove {self.directory} to start from scratch"
            ) from error
        differences = list(_differences(recorded, recipe))
        if differences:
            raise ConfigError(
                f"{self.directory} was started with different inputs or settings: "
                f"{'; '.join(differences)}. Give the original ones to continue, or remove "
                f"{self.directory} to start from scratch"
            )

    @property
    def tokenizer(self) -> Path | None:
        """The directory of the tokenizer that `keep` has stored; None before that."""
        for path in (self._tokenizer, self._final_tokenizer):
            if path.exists():
                return path
        return None

    def keep(self, tokenizer: Tokenizer) -> None:
        """Stores a copy of the tokenizer."""
        copy = sibling(self._tokenizer)
        with self._write_errors():
            copy.mkdir()
            tokenizer.save(copy)
            os.rename(copy, self._tokenizer)

    def totals(self) -> Totals:
        """Returns the last line of the journal."""
        try:
            # A crash can leave an incomplete last line, which does not count.
            lines = self._journal.read_bytes().split(b"\n")[:-1]
            if not lines:
                return Totals()
            fields = strict_json.loads(lines[-1])
            return Totals(**{"lost_bytes": None, **fields})
        except FileNotFoundError:
            return Totals()
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"cannot read the journal in {self._journal} ({error}); "
                f"remove {self.directory} to start from scratch"
            ) from error

    @contextlib.contextmanager
    def appending(self, dtype: np.dtype) -> Iterator[Appender]:
        """Returns an Appender that continues after `totals`. Appended shards count from the next
        sync; leaving the block syncs.
        """
        totals = self.totals()
        with (
            self._write_errors(),
            open(self._tokens, "ab") as tokens,
            open(self._lengths, "ab") as lengths,
            open(self._journal, "ab") as journal,
        ):
            # Nothing counts that a killed process has written since its last sync.
            tokens.truncate(totals.tokens * dtype.itemsize)
            lengths.truncate(totals.documents * _LENGTH_BYTES)
            journal.truncate(self._journal.read_bytes().rfind(b"\n") + 1)
            appender = Appender(tokens, lengths, journal, totals)
            try:
                yield appender
            except OSError:
                raise  # the last write may be incomplete, so the journal must not count it
            except BaseException:
                appender.sync()
                raise
            appender.sync()

    def finish(self, facts: dict[str, Any], dtype: np.dtype) -> None:
        """Writes the index and renames all files to their final names, <prefix>.json last. Can be
        called again if killed.
        """
        with self._write_errors():
            if self._tokenizer.exists():
                os.rename(self._tokenizer, self._final_tokenizer)
            # The tokens are renamed after the index has its name: as long as they are here, both
            # are still to be done.
            if self._tokens.exists():
                if facts["documents"]:
                    sizes = np.memmap(self._lengths, "<i4", "r")
                else:
                    sizes = np.empty(0, np.int32)
                index = self.directory / "index.idx"
                with atomic_write(index) as (file,):
                    write_index(file, sizes, dtype)
                os.replace(index, idx_path(self.prefix))
                os.replace(self._tokens, bin_path(self.prefix))
            description = json.dumps(facts, indent=1).encode()
            digests_path(self.prefix).unlink(missing_ok=True)  # of earlier files of that name
            Documents(self.prefix).seal(description)
            with atomic_write(Path(f"{self.prefix}.json")) as (file,):
                file.write(description)
        self.remove()

    def remove(self) -> None:
        """Renames, then removes the directory, so that a process killed here leaves nothing to
        resume from.
        """
        if self._plan.exists():
            renamed = sibling(self.directory)
            os.rename(self.directory, renamed)
            shutil.rmtree(renamed, ignore_errors=True)

    def _require_unused(self) -> None:
        """Raises ConfigError if there is a file that a new preparation would overwrite."""
        paths = (
            bin_path(self.prefix),
            idx_path(self.prefix),
            self._final_tokenizer,
            self._tokens,
            self._lengths,
            self._journal,
        )
        for path in paths:
            if path.exists():
                raise ConfigError(
                    f"{path} exists and was not made by this command; remove it, or choose "
                    "another --output"
                )

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Raises ConfigError for an OSError of the block."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write {error.filename or self.directory}: {error.strerror}; finished work "
                f"is kept in {self.directory}, and the same command resumes once the disk is "
                "writable"
            ) from error


class Appender:
    """Appends encoded shards, which must come in order."""

    def __init__(
        self, tokens: BinaryIO, lengths: BinaryIO, journal: BinaryIO, totals: Totals
    ) -> None:
        self.totals = totals
        self._tokens = tokens
        self._lengths = lengths
        self._journal = journal
        self._synced = totals
        self._synced_at = time.monotonic()

    def append(self, shard: TextShard, encoded: Encoded) -> Totals:
        """Appends a shard and returns the new totals. Raises ConfigError for a document longer than
        the format's 2^31 - 1 tokens.
        """
        # The first document may have begun in an earlier shard, and the last may continue in the
        # next one, which will write its length.
        totals = self.totals
        lengths = encoded.lengths.copy()
        if len(lengths):
            lengths[0] += totals.pending
            if lengths.max() >= 2**31:
                raise ConfigError(
                    f"{shard.segments[0].path} has a document of {lengths.max()} tokens; the .idx "
                    "format holds up to 2^31 - 1: split it"
                )
        pending = 0
        if not shard.ends:
            pending = int(lengths[-1])
            lengths = lengths[:-1]

        lost_bytes = totals.lost_bytes
        if lost_bytes is not None:
            lost_bytes += encoded.lost_bytes
        self._tokens.write(encoded.tokens.data)
        self._lengths.write(lengths.astype("<i4").data)
        self.totals = Totals(
            unit=shard.unit + shard.last,
            chunk=0 if shard.last else shard.chunk + 1,
            documents=totals.documents + len(lengths),
            tokens=totals.tokens + len(encoded.tokens),
            pending=pending,
            bytes=totals.bytes + encoded.text_bytes,
            lost_bytes=lost_bytes,
            bad_lines=totals.bad_lines + encoded.bad_lines,
            bad_files=totals.bad_files + encoded.bad_files,
            size=totals.size + shard.size,
        )
        if time.monotonic() - self._synced_at > _SYNC_SECONDS:
            self.sync()
        return self.totals

    def sync(self) -> None:
        """Syncs the data to disk, then the journal line that counts it."""
        if self.totals == self._synced:
            return
        for file in (self._tokens, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        self._journal.write(json.dumps(dataclasses.asdict(self.totals)).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._synced = self.totals
        self._synced_at = time.monotonic()


def _differences(recorded: dict[str, Any], requested: dict[str, Any]) -> Iterator[str]:
    """Yields messages about changed settings, and at most one about changed files."""
    for key in requested:
        if key != "files" and recorded.get(key) != requested[key]:
            yield f"{key} was {recorded.get(key)}, now {requested[key]}"

    old = {path: stamp for path, *stamp in recorded.get("files", [])}
    new = {path: stamp for path, *stamp in requested.get("files", [])}
    messages = [f"{path} has changed" for path in old if path in new and old[path] != new[path]]
    messages += [f"{path} is no longer among the inputs" for path in old if path not in new]
    messages += [f"{path} was not among the inputs" for path in new if path not in old]
    if len(messages) > 1:
        yield f"{messages[0]}, and {len(messages) - 1} more such"
    elif messages:
        yield messages[0]
    elif list(old) != list(new):
        yield "the inputs come in another order"
