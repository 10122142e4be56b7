"""`<prefix>.parts/`: what is done so far, and the step from there to the finished files.

plan.json      what it is made from: a resumed run must be given the same
tokenizer/     a copy of it; becomes <prefix>.tokenizer/
tokens.bin     tokens of the shards done, in order; becomes <prefix>.bin by a rename, so that no token is written twice
lengths.i32    of the documents that are complete
journal.jsonl  a line per shard: which, and the totals up to its end; what follows them in the other two files is cut off at a resume
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

from mesh_lm.data.atomic import atomic_write, sibling
from mesh_lm.data.indexed import bin_path, idx_path, write_index
from mesh_lm.data.prepare.plan import TextShard
from mesh_lm.data.prepare.worker import Encoded
from mesh_lm.data.tokenizer import Tokenizer
from mesh_lm.errors import ConfigError

_SYNC_SECONDS = 1.0
"""Between two syncs: what a killed process loses beside the shards under way."""


@dataclasses.dataclass(frozen=True)
class Totals:
    """A line of the journal: the first shard that is still to do, and the sums over those before it."""

    unit: int = 0
    chunk: int = 0
    documents: int = 0
    """Complete ones."""
    tokens: int = 0
    pending: int = 0
    """Tokens of the document that goes on in the next shard."""
    bytes: int = 0
    bad_lines: int = 0
    bad_files: int = 0
    size: int = 0
    """Bytes on disk that were read."""


class Unfinished:
    """The files of a preparation under way. Used as a context, which holds a lock against a second process."""

    def __init__(self, prefix: str) -> None:
        self.prefix, self.directory = prefix, Path(f"{prefix}.parts")
        self._final_tokenizer = Path(f"{prefix}.tokenizer")
        self._files = {name: self.directory / name for name in ("tokens.bin", "lengths.i32", "journal.jsonl")}

    def __enter__(self) -> Unfinished:
        with self._writing():
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.directory / "lock", os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno == errno.EWOULDBLOCK:  # other errors: a file system without locks
                os.close(self._lock)
                raise ConfigError(f"another process is writing {self.directory}; wait for it, or choose another --output") from error
        return self

    def __exit__(self, *exception: object) -> None:
        if not (self.directory / "plan.json").exists():  # nothing was begun
            with contextlib.suppress(OSError):  # not empty: somebody else's
                (self.directory / "lock").unlink(missing_ok=True)
                self.directory.rmdir()
        os.close(self._lock)

    def claim(self, made_from: dict[str, Any]) -> None:
        """Notes what is being made, or compares it with what was noted. Raises ConfigError where they differ."""
        noted_in = self.directory / "plan.json"
        if not noted_in.exists():
            for path in (bin_path(self.prefix), idx_path(self.prefix), self._final_tokenizer, *self._files.values()):
                if path.exists():
                    raise ConfigError(f"{path} exists and was not made by this command; remove it, or choose another --output")
            with self._writing(), atomic_write(noted_in) as (file,):
                file.write(json.dumps(made_from).encode())
            return
        try:
            noted = json.loads(noted_in.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {noted_in} ({error}); remove {self.directory} to start anew") from error
        if changed := list(_differences(noted, made_from)):
            raise ConfigError(
                f"{self.directory} was begun with something else: {'; '.join(changed)}. Give the same as then to continue, or remove "
                f"{self.directory} to start anew"
            )

    @property
    def tokenizer(self) -> Path | None:
        """The directory of the tokenizer that `keep` was given."""
        found = [path for path in (self.directory / "tokenizer", self._final_tokenizer) if path.exists()]
        return found[0] if found else None

    def keep(self, tokenizer: Tokenizer) -> None:
        copy = sibling(self.directory / "tokenizer")
        with self._writing():
            copy.mkdir()
            tokenizer.save(copy)
            os.rename(copy, self.directory / "tokenizer")

    def totals(self) -> Totals:
        """The last line of the journal."""
        try:
            lines = self._files["journal.jsonl"].read_bytes().split(b"\n")[:-1]  # a last line without its end was cut short
            return Totals(**json.loads(lines[-1])) if lines else Totals()
        except FileNotFoundError:
            return Totals()
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"cannot read {self._files['journal.jsonl']} ({error}); remove {self.directory} to start anew") from error

    @contextlib.contextmanager
    def appending(self, dtype: np.dtype) -> Iterator[Appender]:
        """Appends behind `totals`. What was appended counts from the next sync on; one is made at the end, also after an exception."""
        totals = self.totals()
        with self._writing(), contextlib.ExitStack() as stack:
            tokens, lengths, journal = (stack.enter_context(open(path, "ab")) for path in self._files.values())
            tokens.truncate(totals.tokens * dtype.itemsize)
            lengths.truncate(totals.documents * 4)
            journal.truncate(self._files["journal.jsonl"].read_bytes().rfind(b"\n") + 1)
            appender = Appender(tokens, lengths, journal, totals)
            try:
                yield appender
            except OSError:
                raise  # what was written last may be incomplete, so it must not be in the journal
            except BaseException:
                appender.sync()
                raise
            appender.sync()

    def finish(self, facts: dict[str, Any], dtype: np.dtype) -> None:
        """Writes the index and the facts and moves all to their names, <prefix>.json last; killed here, it can be called again."""
        tokens, tokenizer = self._files["tokens.bin"], self.directory / "tokenizer"
        with self._writing():
            if tokenizer.exists():
                os.rename(tokenizer, self._final_tokenizer)
            if tokens.exists():
                lengths = self._files["lengths.i32"]
                sizes = np.memmap(lengths, "<i4", "r") if facts["documents"] else np.empty(0, np.int32)
                with atomic_write(self.directory / "index.idx") as (file,):
                    write_index(file, sizes, dtype)
                os.replace(self.directory / "index.idx", idx_path(self.prefix))
                os.replace(tokens, bin_path(self.prefix))
            with atomic_write(Path(f"{self.prefix}.json")) as (file,):
                file.write(json.dumps(facts, indent=1).encode())
        self.remove()

    def remove(self) -> None:
        """Removes the directory, under another name, so that a process killed here leaves nothing that looks begun."""
        if (self.directory / "plan.json").exists():
            os.rename(self.directory, gone := sibling(self.directory))
            shutil.rmtree(gone, ignore_errors=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"cannot write {error.filename or self.directory}: {error.strerror}; what is done so far is kept in {self.directory}, and "
                "the same command continues once it can"
            ) from error


class Appender:
    """Takes the shards in order."""

    def __init__(self, tokens: Any, lengths: Any, journal: Any, totals: Totals) -> None:
        self._tokens, self._lengths, self._journal = tokens, lengths, journal
        self.totals = self._synced = totals
        self._time = time.monotonic()

    def append(self, shard: TextShard, encoded: Encoded) -> Totals:
        """Adds the documents of a shard. Raises ConfigError for a document longer than the format's 2^31 - 1 tokens."""
        before, lengths = self.totals, encoded.lengths.copy()
        if len(lengths):
            lengths[0] += before.pending
            if lengths.max() >= 2**31:
                name = shard.segments[0].path
                raise ConfigError(f"{name} has a document of {lengths.max()} tokens; the .idx format holds up to 2^31 - 1: split it")
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
            bad_lines=before.bad_lines + encoded.bad_lines,
            bad_files=before.bad_files + encoded.bad_files,
            size=before.size + shard.size,
        )
        if time.monotonic() - self._time > _SYNC_SECONDS:
            self.sync()
        return self.totals

    def sync(self) -> None:
        """Brings the data to the disk, then the line that counts it."""
        if self.totals == self._synced:
            return
        for file in (self._tokens, self._lengths):
            file.flush()
            os.fsync(file.fileno())
        self._journal.write(json.dumps(dataclasses.asdict(self.totals)).encode() + b"\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())
        self._synced, self._time = self.totals, time.monotonic()


def _differences(noted: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """In words, at most one about the files."""
    for key in now:
        if key != "files" and noted.get(key) != now[key]:
            yield f"{key} was {noted.get(key)}, now {now[key]}"
    before, after = ({path: stamp for path, *stamp in each.get("files", [])} for each in (noted, now))
    changed = [f"{path} is another file than then" for path in before if path in after and before[path] != after[path]]
    gone = [f"{path} is no longer among the inputs" for path in before if path not in after]
    new = [f"{path} was not among the inputs" for path in after if path not in before]
    if listed := [*changed, *gone, *new]:
        yield listed[0] + (f", and {len(listed) - 1} more such" if len(listed) > 1 else "")
    elif list(before) != list(after):
        yield "the inputs come in another order"
