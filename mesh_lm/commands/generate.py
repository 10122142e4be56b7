"""Text from a trained model: mesh-lm generate runs/gpt_tiny "def " (see docs/generation.md)."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mesh_lm import strict_json
from mesh_lm.commands.model_arguments import ModelArguments
from mesh_lm.commands.options import command
from mesh_lm.data.atomic import atomic_write
from mesh_lm.errors import ConfigError

if TYPE_CHECKING:
    from mesh_lm.inference import Completion, Generator

_DEFAULT_TOKENS = 200


@dataclasses.dataclass(frozen=True)
class Arguments(ModelArguments):
    """Prompts, sampling and output. A single prompt is streamed; several are generated together."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("checkpoint", "prompt")

    prompt: tuple[str, ...] = ()
    """Text to continue; repeat it for several. Without one, or with an empty one, the model begins
    a new document."""
    prompts_file: str = ""
    """File with more prompts: a .jsonl of objects with a "prompt", or a text file with one prompt
    per line."""
    start: str = ""
    """Special token to put before each prompt, such as <|begin_of_text|> for Llama 3; empty:
    none."""
    tokens: int = 0
    """Maximum number of new tokens per text; 0: 200, or fewer if the model's seq_len is reached."""
    temperature: float = 0.8
    """Sampling temperature; 0: greedy."""
    top_k: int = 50
    """Sample from the k most likely tokens only; 0: from all."""
    top_p: float = 1.0
    """Nucleus sampling: of those, sample from the fewest tokens that together have this
    probability; 1: from all."""
    stop: tuple[str, ...] = ()
    """End a text before this string; repeat it for several."""
    ignore_eod: bool = False
    """Continue after the end-of-document token."""
    seed: int = 0
    """The same seed gives the same text, on any mesh."""
    batch: int = 16
    """Batch size: texts generated at once."""
    stream: bool = True
    """Print a single text while it is generated."""
    output: str = ""
    """Write a .jsonl to this file, with one object per prompt: prompt, text, tokens, logprobs,
    reason."""


def parse(argv: Sequence[str], prog: str = "") -> Arguments:
    """Raises ConfigError for every mistake that can be seen without the model."""
    arguments = command(Arguments, argv, "Continues texts with a trained model.", prog)
    if arguments.tokens < 0 or arguments.batch < 1:
        raise ConfigError(
            f"--tokens={arguments.tokens} must be at least 0 and --batch={arguments.batch} at "
            "least 1"
        )
    return arguments


def main(argv: Sequence[str]) -> int:
    """Runs `mesh-lm generate` with these arguments. Returns the exit status; raises ConfigError."""
    return run(parse(argv))


def run(arguments: Arguments) -> int:
    """Writes the texts and returns 0. Raises ConfigError."""
    from mesh_lm import distributed  # here, so that --help needs no JAX
    from mesh_lm.inference import Generator, Sampling
    from mesh_lm.inference.text import as_typed, document_start

    prompts = [*map(as_typed, arguments.prompt), *_from_file(arguments.prompts_file)] or [""]
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
    trained = arguments.load()
    start = document_start(trained.tokenizer, arguments.start) if arguments.start else None
    generator = Generator(
        trained.layout, trained.params, trained.tokenizer, sampling, arguments.batch, start
    )
    tokens = arguments.tokens or _default_tokens(generator, prompts)
    options = {
        "seed": arguments.seed,
        "stop": tuple(map(as_typed, arguments.stop)),
        "stop_at_eod": not arguments.ignore_eod,
    }

    if len(prompts) == 1 and arguments.stream and not arguments.output:
        # The prompt is printed with the first piece, so only if it can be continued.
        text = prompts[0]
        for piece in generator.stream(prompts[0], tokens, **options):
            _print_piece(text + piece)
            text = ""
        _print_piece("\n")
        return 0

    completions = generator.complete(prompts, tokens, **options)
    if arguments.output:
        _save(Path(arguments.output).expanduser(), prompts, completions)
        texts = "text" if len(prompts) == 1 else "texts"
        distributed.print_on_process0(f"{len(prompts)} {texts}: {arguments.output}")
        return 0
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        if len(prompts) > 1:
            n_tokens = len(completion.tokens)
            distributed.print_on_process0(f"--- {i} ({n_tokens} tokens, {completion.reason})")
        distributed.print_on_process0(f"{prompt}{completion.text}")
    return 0


def _default_tokens(generator: Generator, prompts: list[str]) -> int:
    longest = max(len(generator.prompt(prompt)) for prompt in prompts)
    return max(1, min(_DEFAULT_TOKENS, generator.engine.seq_len - longest))


def _from_file(name: str) -> Iterator[str]:
    """Yields the prompts in a file, none for an empty name. Raises ConfigError."""
    if not name:
        return
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--prompts-file={name}: cannot be read ({error}); give a text file in UTF-8, or a "
            ".jsonl"
        ) from error
    # Not splitlines: JSON may hold U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if path.suffix != ".jsonl":
            yield line
        elif line.strip():
            try:
                prompt = strict_json.loads(line, size=strict_json.FILE)["prompt"]
            except (ValueError, TypeError, KeyError):
                prompt = None
            if not isinstance(prompt, str):
                raise ConfigError(
                    f'{name}, line {number}: expected a JSON object with a string "prompt", got '
                    f"{line[:60]!r}"
                )
            yield prompt


def _save(path: Path, prompts: list[str], completions: list[Completion]) -> None:
    import jax

    if jax.process_index() > 0:
        return
    try:
        with atomic_write(path) as (file,):
            for prompt, completion in zip(prompts, completions, strict=True):
                record = {"prompt": prompt, **dataclasses.asdict(completion)}
                file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
    except OSError as error:
        raise ConfigError(
            f"--output={path}: the completions cannot be written ({error.strerror})"
        ) from error


def _print_piece(text: str) -> None:
    import jax

    if jax.process_index() == 0:
        sys.stdout.write(text)
        sys.stdout.flush()
