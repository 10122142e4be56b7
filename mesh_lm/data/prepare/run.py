"""Prepares text: plans the shards, encodes them in worker processes, journals progress and writes
the final files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from mesh_lm import strict_json
from mesh_lm.data import formats, lost_bytes
from mesh_lm.data.encoding import pieces
from mesh_lm.data.indexed import bin_path, dtype_of, idx_path
from mesh_lm.data.prepare import plan, worker
from mesh_lm.data.prepare.plan import ReadPlan, TextShard
from mesh_lm.data.prepare.progress import Display
from mesh_lm.data.prepare.unfinished import Totals, Unfinished
from mesh_lm.data.tokenizer import MIN_VOCAB, Tokenizer, load_tokenizer, smaller_than_asked
from mesh_lm.errors import ConfigError

_FORMAT = 1
"""Incremented whenever the same inputs would be prepared differently."""
_AHEAD = 3
"""Shards per worker that are being encoded or waiting to be written."""
_TRAINED_ON = 2**25
"""Characters that `train:` trains a vocabulary on, taken in equal parts from up to 64 positions
spread over the inputs."""
_POSITIONS = 64
_ENOUGH = 2**26
"""Bytes of text after which a tokenizer that loses too much of them is refused, rather than at the
end."""
_SKIPPED = {"skipped_lines": "bad lines", "skipped_files": "files that are not UTF-8"}


def prepare(
    inputs: tuple[str, ...],
    prefix: str,
    tokenizer: str,
    *,
    workers: int = 0,
    text_field: str = "text",
    skip_bad_lines: bool = False,
    max_lost_bytes: float = lost_bytes.TOLERATED,
    output: TextIO | None = None,
) -> dict[str, Any]:
    """Writes <prefix>.bin, .idx, .json and .tokenizer/ atomically, resuming from <prefix>.parts/ of
    a killed process if there is one.

    Documents keep the order of the inputs. The files are bit-identical for any number of workers
    and interruptions.

    Args:
      inputs: files and directories; see `plan.make`. tokenizer: a spec for `load_tokenizer`, or
      train:N for a byte-level BPE of N entries trained on the inputs. workers: number of processes;
      0: one per core that this process may use. text_field: field of a .jsonl line, or column of a
      .parquet file. skip_bad_lines: whether to skip and count .jsonl lines without text.
      max_lost_bytes: fraction of the text that the tokens may fail to spell; see `lost_bytes`.
      output: where progress is printed; None: stdout.

    Returns:
      The contents of <prefix>.json.

    Raises:
      ConfigError: something is wrong with the inputs, the tokenizer or the disk; finished work is
      kept.
    """
    if workers < 0:
        raise ConfigError(f"--workers={workers} must be at least 1, or 0 for one per core")
    lost_bytes.require_fraction(max_lost_bytes, "--max-lost-bytes")
    if not prefix or prefix.endswith(os.sep):
        raise ConfigError(
            f"--output={prefix}: expected a prefix of file names, such as {prefix or 'data/'}books"
        )
    prefix, vocab = str(Path(prefix).expanduser()), _vocab_to_train(tokenizer)
    shown = output or sys.stdout
    work = plan.make(inputs, text_field, prefix, skip_bad_lines)
    given = None if vocab else load_tokenizer(tokenizer)
    made_from = _made_from(work, given, tokenizer, text_field)
    identity = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
    with Unfinished(prefix) as unfinished:
        if facts := _finished(prefix, identity):
            unfinished.remove()
            print(f"{prefix} is already prepared from these inputs: {_summary(facts)}", file=shown)
            return facts
        unfinished.claim(made_from)
        if unfinished.tokenizer is None:
            unfinished.keep(
                given or _train(work, vocab, worker.Settings("", text_field, skip_bad_lines), shown)
            )
        used = load_tokenizer(str(unfinished.tokenizer))
        settings = worker.Settings(str(unfinished.tokenizer), text_field, skip_bad_lines)
        _encode(
            unfinished,
            work,
            settings,
            dtype_of(used.vocab_size),
            workers or _cores(),
            shown,
            max_lost_bytes,
        )
        totals = unfinished.totals()
        if not totals.documents:
            unfinished.remove()
            raise ConfigError(
                f"the inputs have no text: {len(work.files)} files, {totals.bad_lines} bad lines, "
                "and everything else is empty"
            )
        facts = _facts(
            totals, work, used, tokenizer if vocab else Path(tokenizer).name, text_field, identity
        )
        unfinished.finish(facts, dtype_of(used.vocab_size))
    print(f"{prefix}: {_summary(facts)}", file=shown)
    return facts


def _made_from(
    work: ReadPlan, given: Tokenizer | None, tokenizer: str, text_field: str
) -> dict[str, Any]:
    """Returns all that determines the tokens, as JSON; given: the tokenizer that `tokenizer` names,
    if none is to be trained.
    """
    made_from = {
        "format": [_FORMAT, plan.SHARD, worker.PIECE],
        "tokenizer": given.fingerprint if given else tokenizer, "text_field": text_field,
        "versions": _versions(given), "files": [list(file) for file in work.files],
    }  # fmt: skip
    # What older versions read in another way.
    if any(formats.newly_read(path) for path, _, _ in work.files):
        made_from["reads"] = "json, bz2 and xz as what they are"
    if any(formats.has_mark(path) for path, _, _ in work.files):
        made_from["marks"] = "byte order marks are dropped"
    return made_from


def _facts(
    totals: Totals, work: ReadPlan, tokenizer: Tokenizer, spec: str, text_field: str, identity: str
) -> dict[str, Any]:
    """Returns the contents of <prefix>.json."""
    return {
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "spec": spec},
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "eod": tokenizer.eod,
        "vocab_size": tokenizer.vocab_size,
        "documents": totals.documents,
        "tokens": totals.tokens,
        "bytes": totals.bytes,
        **({} if totals.lost_bytes is None else {"lost_bytes": totals.lost_bytes}),
        "text_field": text_field,
        "skipped_lines": totals.bad_lines,
        "skipped_files": totals.bad_files + work.not_text,
        "inputs": [
            {"path": path, "bytes": size, "modified_ns": modified}
            for path, size, modified in work.files
        ],
        "versions": _versions(tokenizer),
        "identity": identity,
    }


def _encode(
    unfinished: Unfinished,
    work: ReadPlan,
    settings: worker.Settings,
    dtype: np.dtype,
    workers: int,
    output: TextIO,
    may_lose: float,
) -> None:
    """Encodes and appends the remaining shards. Raises ConfigError if the tokenizer loses more than
    the fraction `may_lose` of the text.
    """
    totals = unfinished.totals()
    _refuse_loss(totals, may_lose, at_the_end=totals.unit == len(work.units))
    if totals.unit == len(work.units):
        return
    with unfinished.appending(dtype) as appender, Display(output, work.size, totals) as display:
        if totals.size:
            display.note(
                f"continuing after {totals.size / work.size:.0%}: {totals.documents:,} documents "
                "are done"
            )
        shards = work.shards(totals.unit, totals.chunk)
        for shard, encoded in _results(shards, settings, min(workers, work.tasks)):
            display.show(totals := appender.append(shard, encoded))
            _refuse_loss(totals, may_lose, at_the_end=totals.unit == len(work.units))


def _refuse_loss(totals: Totals, may_lose: float, at_the_end: bool) -> None:
    """Raises ConfigError for too many lost bytes, once there is enough text to judge by."""
    if totals.lost_bytes is not None and (at_the_end or totals.bytes > _ENOUGH):
        lost_bytes.refuse(totals.lost_bytes, totals.bytes, may_lose, "--max-lost-bytes")


def _results(
    shards: Iterator[TextShard], settings: worker.Settings, workers: int
) -> Iterator[tuple[TextShard, worker.Encoded]]:
    """Yields the shards with their encoded text, in order. Raises ConfigError if a worker does or
    dies.
    """
    waiting: deque[tuple[TextShard, Future[worker.Encoded]]] = deque()
    with _pool(workers) as pool:
        try:
            for shard in shards:
                waiting.append(
                    (
                        dataclasses.replace(shard, data=None),
                        pool.submit(worker.run, settings, shard),
                    )
                )
                if len(waiting) >= _AHEAD * workers:
                    yield waiting[0][0], waiting.popleft()[1].result()
            while waiting:
                yield waiting[0][0], waiting.popleft()[1].result()
        except BrokenProcessPool as error:
            raise ConfigError(
                "a worker process died, perhaps out of memory; finished work is kept: run the same "
                "command again with fewer --workers"
            ) from error


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Returns a pool whose processes are terminated immediately if the block raises."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), worker.start)
    try:
        # Workers inherit the ignored SIGINT, so that Ctrl-C cannot interrupt one that is still
        # importing.
        with _ignoring_sigint():
            for _ in range(workers):
                pool.submit(int)
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _ignoring_sigint() -> Iterator[None]:
    # only the main thread may set signal handlers
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _train(work: ReadPlan, vocab: int, settings: worker.Settings, output: TextIO) -> Tokenizer:
    """Trains a tokenizer on equal numbers of characters from positions spread evenly over the
    inputs.
    """
    units = (
        [len(work.units) * i // _POSITIONS for i in range(_POSITIONS)]
        if len(work.units) > _POSITIONS
        else range(len(work.units))
    )
    reader, texts = worker.Encoder(settings, load_tokenizer("bytes")), []
    for unit in units:
        quota = _TRAINED_ON // len(units)
        for shard in itertools.takewhile(
            lambda shard, unit=unit: shard.unit == unit, work.shards(unit)
        ):
            for text in reader.texts(shard, worker.Encoded.empty()):
                texts += pieces(text[:quota])
                quota -= len(text)
                if quota <= 0:
                    break
            if quota <= 0:
                break
    print(
        (
            f"training a byte-level BPE of {vocab} entries on {sum(map(len, texts)) / 1e6:.1f} M "
            "characters"
        ),
        file=output,
        flush=True,
    )
    tokenizer = Tokenizer.train(texts, vocab)
    if smaller := smaller_than_asked(tokenizer, vocab):
        print(smaller, file=output, flush=True)
    return tokenizer


def _vocab_to_train(tokenizer: str) -> int:
    """Returns N of train:N; 0 for any other tokenizer."""
    word, colon, number = tokenizer.partition(":")
    if not (colon and word == "train"):
        return 0
    if not number.isdecimal() or int(number) < MIN_VOCAB:
        raise ConfigError(
            f"--tokenizer={tokenizer}: expected train:N with a number of entries of at least "
            f"{MIN_VOCAB}"
        )
    return int(number)


def _finished(prefix: str, identity: str) -> dict[str, Any] | None:
    """Returns the contents of <prefix>.json, or None if missing. Raises ConfigError if it was made
    from other inputs.
    """
    path = Path(f"{prefix}.json")
    try:
        facts = strict_json.read(path)
        same = facts["identity"] == identity
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError):
        same, facts = False, None
    if not same or not (bin_path(prefix).exists() and idx_path(prefix).exists()):
        names = ", ".join(
            f"{prefix}{suffix}" for suffix in (".bin", ".idx", ".digests", ".json", ".tokenizer")
        )
        raise ConfigError(
            f"{path} exists and was made from other inputs or settings; remove {names}, or choose "
            "another --output"
        )
    return facts


def _versions(tokenizer: Tokenizer | None) -> dict[str, str]:
    """Returns the version of the library that determines the ids."""
    library = tokenizer.library if tokenizer else "tokenizers"
    return {name: importlib.metadata.version(name) for name in filter(None, [library])}


def _summary(facts: dict[str, Any]) -> str:
    skipped = "".join(
        f", {facts[key]:,} {words} skipped" for key, words in _SKIPPED.items() if facts[key]
    )
    size = f"{facts['bytes'] / 1e6:,.1f} MB ({facts['bytes'] / facts['tokens']:.2f} bytes a token)"
    lost = lost_bytes.described(facts.get("lost_bytes", 0), facts["bytes"])
    return (
        f"{facts['documents']:,} documents, {facts['tokens']:,} tokens, "
        f"{size}{skipped}{lost and f'; {lost}'}"
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
