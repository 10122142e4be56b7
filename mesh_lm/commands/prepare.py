"""mesh-lm prepare books.jsonl.zst --output=data/books --tokenizer=tokenizer.json"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import ClassVar

from mesh_lm.commands.options import command
from mesh_lm.data.prepare.run import prepare

DESCRIPTION = (
    "Turns text into Megatron's .bin/.idx: one sequence per document, each followed by the end-of-document token. Killed, it continues "
    "where it was when it is given the same again."
)


@dataclasses.dataclass(frozen=True)
class Prepare:
    """What is prepared."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("input",)

    input: tuple[str, ...]
    """Files (.txt, .jsonl, each also .gz or .zst, .parquet) and directories of these and of text files, in this order."""
    output: str
    """Prefix of what is written: .bin, .idx, .json and .tokenizer/; .parts/ until all is done."""
    tokenizer: str
    """A tokenizer.json, a directory with one, a SentencePiece .model, a .tiktoken, `bytes`; or train:N, a new one of N entries."""
    workers: int = 0
    """Processes; 0: one for each core."""
    text_field: str = "text"
    """Field of a .jsonl line, or column of a .parquet, that holds the text."""
    skip_bad_lines: bool = False
    """Leave out lines of a .jsonl that hold no text, and count them, instead of stopping."""


def parse(argv: Sequence[str], prog: str = "") -> Prepare:
    return command(Prepare, argv, DESCRIPTION, prog)


def main(argv: Sequence[str]) -> int:
    return run(parse(argv))


def run(options: Prepare) -> int:
    """Prepares the corpus. Returns 0, or 130 after Ctrl-C. Raises ConfigError."""
    try:
        prepare(
            options.input, options.output, options.tokenizer, workers=options.workers, text_field=options.text_field,
            skip_bad_lines=options.skip_bad_lines,
        )  # fmt: skip
    except KeyboardInterrupt:
        print(f"\nstopped; {options.output}.parts keeps what is done, and the same command continues from there", file=sys.stderr)
        return 130
    return 0
