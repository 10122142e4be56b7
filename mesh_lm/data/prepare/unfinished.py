"""The directory `<prefix>.parts/` with unfinished work, and how it becomes the final files.

plan.json inputs and settings; a resumed run must use the same tokenizer/ a copy of the tokenizer;
becomes <prefix>.tokenizer/ tokens.bin tokens of the finished shards, in order; renamed to
<prefix>.bin, so that no token is written twice lengths.i32 lengths of the complete documents
journal.jsonl one line per shard, with the totals up to its end; a resume truncates the other two
files to the last line
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
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Totals:
    """A line of the journal: the next shard, and sums over all shards before it."""

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
        self.prefix, self.directory = prefix, Path(f"{prefix}.parts")
        self._final_tokenizer = Path(f"{prefix}.tokenizer")
        self._files = {
            name: self.directory / name for name in ("tokens.bin", "lengths.i32", "journal.jsonl")
        }

    def __enter__(self) -> Unfinished:
        with self._writing():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.directory / "lock", os.O_CREAT | os.O_RDWR)
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
        if not (self.directory / "plan.json").exists():  # nothing was started
            with contextlib.suppress(OSError):  # not empty: it has files of others
                (self.directory / "lock").unlink(missing_ok=True)
                self.directory.rmdir()
        os.close(self._lock)

    def claim(self, made_from: dict[str, Any]) -> None:
        """Records the inputs and settings. Raises ConfigError if different ones are already
        recorded.
        """
        recorded_in = self.directory / "plan.json"
        if not recorded_in.exists():
            for path in (
                bin_path(self.prefix),
                idx_path(self.prefix),
                self._final_tokenizer,
                *self._files.values(),
            ):
                if path.exists():
                    raise ConfigError(
                        f"{path} exists and was not made by this command; remove it, or choose "
                        "another --output"
                    )
            with self._writing(), atomic_write(recorded_in) as (file,):
                file.write(json.dumps(made_from).encode())
            return
        try:
            recorded = strict_json.read(recorded_in, size=strict_json.LARGE_FILE)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {recorded_in} ({error}); remove {self.directory} to start from "
                "scratch"
            ) from error
        if changed := list(_differences(recorded, made_from)):
            raise ConfigError(
                f"{self.directory} was started with different inputs or settings: "
                f"{'; '.join(changed)}. Give the original ones to continue, or remove "
                f"{self.directory} to start from scratch"
            )

    @property
    def tokenizer(self) -> Path | None:
        """The directory of the tokenizer that `keep` has stored; None before that."""
        candidates = (self.directory / "tokenizer", self._final_tokenizer)
        return next((path for path in candidates if path.exists()), None)

    def keep(self, tokenizer: Tokenizer) -> None:
        """Stores a copy of the tokenizer."""
        copy = sibling(self.directory / "tokenizer")
        with self._writing():
            copy.mkdir()
            tokenizer.save(copy)
            os.rename(copy, self.directory / "tokenizer")

    def totals(self) -> Totals:
        """Returns the last line of the journal."""
        try:
            # an incomplete last line was truncated by a crash
            lines = self._files["journal.jsonl"].read_bytes().split(b"\n")[:-1]
            return (
                Totals(**{"lost_bytes": None, **strict_json.loads(lines[-1])})
                if lines
                else Totals()
            )
        except FileNotFoundError:
            return Totals()
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"cannot read {self._files['journal.jsonl']} ({error}); remove {self.directory} to "
                "start from scratch"
            ) from error

    @contextlib.contextmanager
    def appending(self, dtype: np.dtype) -> Iterator[Appender]:
        """Returns an Appender that continues after `totals`. Appended shards count from the next
        sync; leaving the block syncs.
        """
        totals = self.totals()
        with self._writing(), contextlib.ExitStack() as stack:
            tokens, lengths, journal = (
                stack.enter_context(open(path, "ab")) for path in self._files.values()
            )
            tokens.truncate(totals.tokens * dtype.itemsize)
            lengths.truncate(totals.documents * 4)
            journal.truncate(self._files["journal.jsonl"].read_bytes().rfind(b"\n") + 1)
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
        tokens, tokenizer = self._files["tokens.bin"], self.directory / "tokenizer"
        with self._writing():
            if tokenizer.exists():
                os.rename(tokenizer, self._final_tokenizer)
            if tokens.exists():
                lengths = self._files["lengths.i32"]
                sizes = (
                    np.memmap(lengths, "<i4", "r") if facts["documents"] else np.empty(0, np.int32)
                )
                with atomic_write(self.directory / "index.idx") as (file,):
                    write_index(file, sizes, dtype)
                os.replace(self.directory / "index.idx", idx_path(self.prefix))
                os.replace(tokens, bin_path(self.prefix))
            about = json.dumps(facts, indent=1).encode()
            digests_path(self.prefix).unlink(missing_ok=True)  # of earlier files of that name
            Documents(self.prefix).seal(about)
            with atomic_write(Path(f"{self.prefix}.json")) as (file,):
                file.write(about)
        self.remove()

    def remove(self) -> None:
        """Renames, then removes the directory, so that a process killed here leaves nothing to
        resume from.
        """
        if (self.directory / "plan.json").exists():
            os.rename(self.directory, doomed := sibling(self.directory))
            shutil.rmtree(doomed, ignore_errors=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
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

    def __init__(self, tokens: Any, lengths: Any, journal: Any, totals: Totals) -> None:
        self._tokens, self._lengths, self._journal = tokens, lengths, journal
        self.totals = self._synced = totals
        self._time = time.monotonic()

    def append(self, shard: TextShard, encoded: Encoded) -> Totals:
        """Appends a shard and returns the new totals. Raises ConfigError for a document longer than
        the format's 2^31 - 1 tokens.
        """
        before, lengths = self.totals, encoded.lengths.copy()
        if len(lengths):
            lengths[0] += before.pending
            if lengths.max() >= 2**31:
                name = shard.segments[0].path
                raise ConfigError(
                    f"{name} has a document of {lengths.max()} tokens; the .idx format holds up to "
                    "2^31 - 1: split it"
                )
        pending = 0
        if not shard.ends:
            lengths, pending = lengths[:-1], int(lengths[-1])
        self._tokens.write(encoded.tokens.data)
        self._lengths.write(lengths.astype("<i4").data)
        self.totals = Totals(
            unit=shard.unit + shard.last,
            chunk=0 if shard.last else shard.chunk + 1,
            documents=before.documents + len(lengths),
            tokens=before.tokens + len(encoded.tokens),
            pending=pending,
            bytes=before.bytes + encoded.text_bytes,
            lost_bytes=None
            if before.lost_bytes is None
            else before.lost_bytes + encoded.lost_bytes,
            bad_lines=before.bad_lines + encoded.bad_lines,
            bad_files=before.bad_files + encoded.bad_files,
            size=before.size + shard.size,
        )
        if time.monotonic() - self._time > _SYNC_SECONDS:
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
        self._synced, self._time = self.totals, time.monotonic()


def _differences(recorded: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yields messages about changed settings, and at most one about changed files."""
    for key in now:
        if key != "files" and recorded.get(key) != now[key]:
            yield f"{key} was {recorded.get(key)}, now {now[key]}"
    before, after = (
        {path: stamp for path, *stamp in each.get("files", [])} for each in (recorded, now)
    )
    changed = [
        f"{path} has changed" for path in before if path in after and before[path] != after[path]
    ]
    removed = [f"{path} is no longer among the inputs" for path in before if path not in after]
    new = [f"{path} was not among the inputs" for path in after if path not in before]
    if listed := [*changed, *removed, *new]:
        yield listed[0] + (f", and {len(listed) - 1} more such" if len(listed) > 1 else "")
    elif list(before) != list(after):
        yield "the inputs come in another order"
