"""python -m mesh_lm.data.prepare --input=books.jsonl.zst --output=data/books --tokenizer=tokenizer.json"""

from __future__ import annotations

import dataclasses
import sys

from mesh_lm.commands.command_line import command
from mesh_lm.data.prepare.run import prepare

DESCRIPTION = (
    "Turns text into Megatron's .bin/.idx: one sequence per document, each followed by the end-of-document token. Killed, it continues "
    "where it was when it is given the same again."
)


@dataclasses.dataclass(frozen=True)
class Prepare:
    """What is prepared."""

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


def main(argv: list[str]) -> int:
    options = command(Prepare, argv, DESCRIPTION)
    try:
        prepare(
            options.input, options.output, options.tokenizer, workers=options.workers, text_field=options.text_field,
            skip_bad_lines=options.skip_bad_lines,
        )  # fmt: skip
    except KeyboardInterrupt:
        print(f"\nstopped; {options.output}.parts keeps what is done, and the same command continues from there", file=sys.stderr)
        return 130
    return 0
