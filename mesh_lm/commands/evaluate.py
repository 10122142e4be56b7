"""Perplexity of a trained model on a text, and its scores on tasks of lm-evaluation-harness.

mesh-lm evaluate runs/gpt_tiny --text=FILE, or --tasks=NAME,... (see docs/evaluation.md)
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mesh_lm.commands.model_arguments import ModelArguments
from mesh_lm.commands.options import command
from mesh_lm.data import formats, lost_bytes
from mesh_lm.data.atomic import atomic_write
from mesh_lm.errors import ConfigError

_PROGRESS_SECONDS = 10.0
"""The time between two lines of progress."""


@dataclasses.dataclass(frozen=True)
class Arguments(ModelArguments):
    """Either a text, or tasks of lm-evaluation-harness."""

    text: str = ""
    """A text file, a .jsonl, a .parquet or a directory, on which perplexity and bits per byte are
    measured."""
    text_field: str = "text"
    """The field of .jsonl lines, or the column of .parquet files, that holds the text."""
    stride: int = 0
    """New tokens per window after the first; each is predicted from at least seq_len - stride
    tokens. 0: half of seq_len."""
    start: str = ""
    """Special token to put before each text, and before each context and prompt of a task, such as
    <|begin_of_text|>; empty: the end-of-document token, before texts and in place of an empty
    context."""
    max_lost_bytes: float = lost_bytes.TOLERATED
    """Fraction of the text's bytes that the tokens may fail to spell; bits per byte do not count
    them."""
    tasks: str = ""
    """Tasks of lm-evaluation-harness (pip install -e '.[eval]'), separated by commas."""
    include_path: str = ""
    """Directory of your own task .yaml files; the tasks that come with the harness are then not
    read."""
    limit: int = 0
    """Documents per task; 0: all."""
    batch: int = 8
    """Batch size: sequences per forward pass."""
    json: str = ""
    """Write all results to this file, as JSON."""


def parse(argv: Sequence[str], prog: str = "") -> Arguments:
    """Raises ConfigError for every mistake that can be seen without the model."""
    arguments = command(
        Arguments,
        argv,
        "Measures a trained model on a text, or on tasks of lm-evaluation-harness.",
        prog,
    )
    if bool(arguments.text) == bool(arguments.tasks):
        raise ConfigError(
            "give either --text=FILE, for perplexity and bits per byte, or --tasks=NAME,... of "
            "lm-evaluation-harness"
        )
    if arguments.batch < 1 or arguments.stride < 0 or arguments.limit < 0:
        raise ConfigError(
            f"--batch={arguments.batch} must be at least 1, --stride={arguments.stride} and "
            f"--limit={arguments.limit} at least 0"
        )
    lost_bytes.require_fraction(arguments.max_lost_bytes, "--max-lost-bytes")
    return arguments


def main(argv: Sequence[str]) -> int:
    """Runs `mesh-lm evaluate` with these arguments. Returns the exit status; raises ConfigError."""
    return run(parse(argv))


def run(arguments: Arguments) -> int:
    """Prints the results, writes them to --json and returns 0. Raises ConfigError."""
    import jax  # here, so that --help needs no JAX

    with formats.field_option("--text-field"):
        result = _measure_text(arguments) if arguments.text else _measure_tasks(arguments)
    if arguments.json and jax.process_index() == 0:
        path = Path(arguments.json).expanduser()
        try:
            with atomic_write(path) as (file,):
                file.write(json.dumps(result, indent=1, default=str).encode() + b"\n")
        except OSError as error:
            raise ConfigError(
                f"--json={path}: the result cannot be written ({error.strerror})"
            ) from error
    return 0


def _measure_text(arguments: Arguments) -> dict[str, Any]:
    """Prints perplexity and bits per byte, and returns them for --json."""
    import jax

    from mesh_lm import distributed
    from mesh_lm.inference import Scorer
    from mesh_lm.inference.perplexity import (
        compressed_bits_per_byte,
        measure_perplexity,
        read_texts,
    )
    from mesh_lm.inference.text import document_start

    texts = functools.partial(read_texts, arguments.text, arguments.text_field)
    next(texts(), None)  # before the model is loaded, for mistakes in the text
    trained = arguments.load()
    seq_len = trained.config.model.seq_len
    if arguments.stride > seq_len:
        raise ConfigError(
            f"--stride={arguments.stride} is more than the model's seq_len={seq_len}: tokens "
            "between windows would be left out"
        )
    stride = arguments.stride or max(1, seq_len // 2)
    measured = measure_perplexity(
        Scorer(trained.layout, trained.params, arguments.batch),
        trained.tokenizer,
        texts(),
        stride=stride,
        start=document_start(trained.tokenizer, arguments.start),
        max_lost_bytes=arguments.max_lost_bytes,
        progress=_Progress(is_reporter=jax.process_index() == 0),
    )
    summary = measured.summary()
    # Process 0 alone reports them.
    compressors = compressed_bits_per_byte(texts()) if jax.process_index() == 0 else {}

    comparison = ", ".join(f"{name} {value:.4f}" for name, value in compressors.items())
    lines = [
        f"{summary['bits_per_byte']:.4f} bits per byte ({comparison})",
        f"{summary['nats_per_token']:.4f} nats per token, perplexity {summary['perplexity']:.4g}",
        f"{_texts(measured.texts)}, {measured.tokens:,} tokens, {measured.n_bytes:,} bytes; "
        f"windows of {seq_len} tokens, stride {stride}",
    ]
    lost = lost_bytes.described(measured.lost_bytes, measured.n_bytes + measured.lost_bytes)
    if lost:
        lines.append(f"warning: {lost}; they are not counted")
    distributed.print_on_process0("\n".join(lines))
    return {
        "checkpoint": arguments.checkpoint,
        "step": trained.step,
        "text": arguments.text,
        "seq_len": seq_len,
        "stride": stride,
        **summary,
        **{f"{name} bits_per_byte": value for name, value in compressors.items()},
        "texts": measured.texts,
        "tokens": measured.tokens,
        "bytes": measured.n_bytes,
        "lost_bytes": measured.lost_bytes,
    }


def _texts(n: int) -> str:
    return f"{n:,} text" if n == 1 else f"{n:,} texts"


class _Progress:
    """Prints on stderr how far an evaluation is, every ten seconds: stdout has the result alone."""

    def __init__(self, is_reporter: bool) -> None:
        self._is_reporter = is_reporter
        self._printed_at = time.monotonic()

    def __call__(self, measured: Any) -> None:
        if not self._is_reporter or time.monotonic() < self._printed_at + _PROGRESS_SECONDS:
            return
        self._printed_at = time.monotonic()
        bits = measured.summary()["bits_per_byte"]
        print(
            f"{_texts(measured.texts)}, {measured.tokens:,} tokens so far: {bits:.4f} bits per "
            "byte",
            file=sys.stderr,
            flush=True,
        )


def _measure_tasks(arguments: Arguments) -> dict[str, Any]:
    """Prints the scores of tasks, and returns them for --json."""
    from mesh_lm import distributed
    from mesh_lm.inference import harness
    from mesh_lm.inference.text import document_start

    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    # Before the model is loaded, for mistakes in the names.
    tasks = harness.find_tasks(names, arguments.include_path)
    trained = arguments.load()
    model = harness.adapter(
        trained,
        batch=arguments.batch,
        start=document_start(trained.tokenizer, arguments.start),
        starts_context=bool(arguments.start),
    )
    results, table = harness.run(model, tasks, names, limit=arguments.limit)
    distributed.print_on_process0(table)
    return {
        "checkpoint": arguments.checkpoint,
        "step": trained.step,
        **results,
        "joined_continuations": model.requests.n_joined,
    }
