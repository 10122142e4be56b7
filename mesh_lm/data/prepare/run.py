"""Prepares text: plans the shards, encodes them in worker processes, journals progress and writes
the final files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
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
from mesh_lm.data.tokenizer import (
    MIN_VOCAB,
    Tokenizer,
    load_tokenizer,
    smaller_than_asked,
    train_tokenizer,
)
from mesh_lm.errors import ConfigError

_FORMAT = 1
"""Incremented whenever the same inputs would be prepared differently."""
_AHEAD = 3
"""Shards per worker that are being encoded or waiting to be written."""
_TRAINED_ON = 2**25
"""Characters that `train:` trains a vocabulary on, taken in equal parts from up to 64 positions
spread over the inputs."""
_POSITIONS = 64
_ENOUGH_BYTES = 2**26
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
      inputs: files and directories; see `plan.make`.
      tokenizer: a spec for `load_tokenizer`, or train:N for a byte-level BPE of N entries trained
        on the inputs.
      workers: number of processes; 0: one per core that this process may use.
      text_field: field of a .jsonl line, or column of a .parquet file.
      skip_bad_lines: whether to skip and count .jsonl lines without text.
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
    prefix = str(Path(prefix).expanduser())
    vocab = _vocab_to_train(tokenizer)
    stream = output or sys.stdout
    read_plan = plan.make(inputs, text_field, prefix, skip_bad_lines)
    existing = None if vocab else load_tokenizer(tokenizer)
    recipe = _recipe(read_plan, existing, tokenizer, text_field)
    identity = hashlib.sha256(json.dumps(recipe).encode()).hexdigest()

    with Unfinished(prefix) as unfinished:
        facts = _finished(prefix, identity)
        if facts:
            unfinished.remove()
            print(f"{prefix} is already prepared from these inputs: {_summary(facts)}", file=stream)
            return facts

        unfinished.claim(recipe)
        if unfinished.tokenizer is None:
            if existing is None:
                settings = worker.Settings("", text_field, skip_bad_lines)
                existing = _train(read_plan, vocab, settings, stream)
            unfinished.keep(existing)
        saved_tokenizer = load_tokenizer(str(unfinished.tokenizer))
        dtype = dtype_of(saved_tokenizer.vocab_size)
        settings = worker.Settings(str(unfinished.tokenizer), text_field, skip_bad_lines)
        _encode(
            unfinished, read_plan, settings, dtype, workers or _n_cores(), stream, max_lost_bytes
        )

        totals = unfinished.totals()
        if not totals.documents:
            unfinished.remove()
            raise ConfigError(
                f"the inputs have no text: {len(read_plan.files)} files, {totals.bad_lines} bad "
                "lines, and everything else is empty"
            )
        spec = tokenizer if vocab else Path(tokenizer).name
        facts = _facts(totals, read_plan, saved_tokenizer, spec, text_field, identity)
        unfinished.finish(facts, dtype)
    print(f"{prefix}: {_summary(facts)}", file=stream)
    return facts


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


def _recipe(
    read_plan: ReadPlan, existing: Tokenizer | None, spec: str, text_field: str
) -> dict[str, Any]:
    """Returns all that determines the tokens, as JSON.

    existing: the tokenizer of the spec; None if it is to be trained.
    """
    recipe: dict[str, Any] = {
        "format": [_FORMAT, plan.SHARD, worker.PIECE],
        "tokenizer": existing.fingerprint if existing else spec,
        "text_field": text_field,
        "versions": _versions(existing),
        "files": [list(file) for file in read_plan.files],
    }
    # Older versions read these files differently. For other inputs the keys are absent, so that the
    # output of those versions still counts as prepared.
    if any(formats.newly_read(file.path) for file in read_plan.files):
        recipe["reads"] = "json, bz2 and xz as what they are"
    if any(formats.has_mark(file.path) for file in read_plan.files):
        recipe["marks"] = "byte order marks are dropped"
    return recipe


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
        facts = None
        same = False
    if not same or not (bin_path(prefix).exists() and idx_path(prefix).exists()):
        suffixes = (".bin", ".idx", ".digests", ".json", ".tokenizer")
        names = ", ".join(f"{prefix}{suffix}" for suffix in suffixes)
        raise ConfigError(
            f"{path} exists and was made from other inputs or settings; remove {names}, or choose "
            "another --output"
        )
    return facts


def _train(read_plan: ReadPlan, vocab: int, settings: worker.Settings, output: TextIO) -> Tokenizer:
    """Trains a tokenizer on equal numbers of characters from positions spread evenly over the
    inputs.
    """
    n_units = len(read_plan.units)
    if n_units > _POSITIONS:
        units = [n_units * i // _POSITIONS for i in range(_POSITIONS)]
    else:
        units = range(n_units)
    reader = worker.Encoder(settings, load_tokenizer("bytes"))
    texts: list[str] = []
    for unit in units:
        quota = _TRAINED_ON // len(units)
        for text in _texts_of_unit(read_plan, unit, reader):
            texts += pieces(text[:quota])
            quota -= len(text)
            if quota <= 0:
                break
    n_characters = sum(map(len, texts))
    print(
        f"training a byte-level BPE of {vocab} entries on {n_characters / 1e6:.1f} M characters",
        file=output,
        flush=True,
    )
    tokenizer = train_tokenizer(texts, vocab)
    warning = smaller_than_asked(tokenizer, vocab)
    if warning:
        print(warning, file=output, flush=True)
    return tokenizer


def _texts_of_unit(read_plan: ReadPlan, unit: int, reader: worker.Encoder) -> Iterator[str]:
    for shard in read_plan.shards(unit):
        if shard.unit != unit:
            return
        yield from reader.texts(shard, worker.Encoded.empty())


def _encode(
    unfinished: Unfinished,
    read_plan: ReadPlan,
    settings: worker.Settings,
    dtype: np.dtype,
    workers: int,
    output: TextIO,
    max_lost_bytes: float,
) -> None:
    """Encodes and appends the remaining shards. Raises ConfigError if the tokenizer loses more than
    the fraction `max_lost_bytes` of the text.
    """
    n_units = len(read_plan.units)
    totals = unfinished.totals()
    _refuse_loss(totals, max_lost_bytes, is_end=totals.unit == n_units)
    if totals.unit == n_units:
        return
    with (
        unfinished.appending(dtype) as appender,
        Display(output, read_plan.size, totals) as display,
    ):
        if totals.size:
            display.note(
                f"continuing after {totals.size / read_plan.size:.0%}: {totals.documents:,} "
                "documents are done"
            )
        shards = read_plan.shards(totals.unit, totals.chunk)
        for shard, encoded in _results(shards, settings, min(workers, read_plan.tasks)):
            totals = appender.append(shard, encoded)
            display.show(totals)
            _refuse_loss(totals, max_lost_bytes, is_end=totals.unit == n_units)


def _refuse_loss(totals: Totals, max_lost_bytes: float, is_end: bool) -> None:
    """Raises ConfigError for too many lost bytes, once there is enough text to judge by."""
    if totals.lost_bytes is not None and (is_end or totals.bytes > _ENOUGH_BYTES):
        lost_bytes.refuse(totals.lost_bytes, totals.bytes, max_lost_bytes, "--max-lost-bytes")


def _results(
    shards: Iterator[TextShard], settings: worker.Settings, workers: int
) -> Iterator[tuple[TextShard, worker.Encoded]]:
    """Yields the shards with their encoded text, in order.

    Raises:
      ConfigError: a worker raised it, or has died.
    """
    pending: deque[tuple[TextShard, Future[worker.Encoded]]] = deque()
    with _pool(workers) as pool:
        try:
            for shard in shards:
                future = pool.submit(worker.run, settings, shard)
                pending.append((dataclasses.replace(shard, data=None), future))
                if len(pending) >= _AHEAD * workers:
                    first_shard, first_future = pending.popleft()
                    yield first_shard, first_future.result()
            for shard, future in pending:
                yield shard, future.result()
        except BrokenProcessPool as error:
            raise ConfigError(
                "a worker process died, perhaps out of memory; finished work is kept: run the same "
                "command again with fewer --workers"
            ) from error


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Returns a pool whose processes are terminated immediately if the block raises."""
    earlier_processes = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), worker.start)
    try:
        # Workers inherit the ignored SIGINT, so that Ctrl-C cannot interrupt one that is still
        # importing. The tasks make the pool start all of them here.
        with _ignoring_sigint():
            for _ in range(workers):
                pool.submit(int)
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - earlier_processes:
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
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _facts(
    totals: Totals,
    read_plan: ReadPlan,
    tokenizer: Tokenizer,
    spec: str,
    text_field: str,
    identity: str,
) -> dict[str, Any]:
    """Returns the contents of <prefix>.json."""
    facts: dict[str, Any] = {
        "tokenizer": {"fingerprint": tokenizer.fingerprint, "spec": spec},
        "tokenizer_fingerprint": tokenizer.fingerprint,
        "eod": tokenizer.eod,
        "vocab_size": tokenizer.vocab_size,
        "documents": totals.documents,
        "tokens": totals.tokens,
        "bytes": totals.bytes,
    }
    if totals.lost_bytes is not None:
        facts["lost_bytes"] = totals.lost_bytes
    facts |= {
        "text_field": text_field,
        "skipped_lines": totals.bad_lines,
        "skipped_files": totals.bad_files + read_plan.not_text,
        "inputs": [
            {"path": path, "bytes": size, "modified_ns": modified_ns}
            for path, size, modified_ns in read_plan.files
        ],
        "versions": _versions(tokenizer),
        "identity": identity,
    }
    return facts


def _versions(tokenizer: Tokenizer | None) -> dict[str, str]:
    """Returns the version of the library that determines the ids."""
    library = tokenizer.library if tokenizer else "tokenizers"
    if not library:
        return {}
    return {library: importlib.metadata.version(library)}


def _summary(facts: dict[str, Any]) -> str:
    """Returns the numbers of a preparation, in words."""
    skipped = "".join(
        f", {facts[key]:,} {words} skipped" for key, words in _SKIPPED.items() if facts[key]
    )
    lost = lost_bytes.described(facts.get("lost_bytes", 0), facts["bytes"])
    return (
        f"{facts['documents']:,} documents, {facts['tokens']:,} tokens, "
        f"{facts['bytes'] / 1e6:,.1f} MB ({facts['bytes'] / facts['tokens']:.2f} bytes a token)"
        f"{skipped}{lost and f'; {lost}'}"
    )


def _n_cores() -> int:
    """Returns the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
