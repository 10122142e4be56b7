"""Tokenises text: mesh-lm prepare books.jsonl.zst --output=data/books --tokenizer=tokenizer.json"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import ClassVar

from mesh_lm.commands.meanings import foreign_options
from mesh_lm.commands.options import command
from mesh_lm.commands.other_names import PREPROCESS
from mesh_lm.data import formats, lost_bytes
from mesh_lm.data.indexed import seal
from mesh_lm.data.prepare.run import prepare
from mesh_lm.network.exit_status import EXIT_INTERRUPTED

DESCRIPTION = (
    "Tokenizes text into Megatron's .bin/.idx files: one sequence per document, followed by the "
    "end-of-document token. If it is killed, the same command continues from there."
)
SEAL = (
    "Writes PREFIX.digests for .bin/.idx files of any origin, with which every run verifies what "
    "it reads of them. Where there is one already, it compares all of the files with it."
)


@dataclasses.dataclass(frozen=True)
class Seal:
    """The files to seal."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("prefixes",)

    prefixes: tuple[str, ...]
    """Prefixes of .bin/.idx files, as in data.blend."""


@dataclasses.dataclass(frozen=True)
class Prepare:
    """What to tokenize, how, and where to write it."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("input",)

    input: tuple[str, ...]
    """Files (.txt, .jsonl, .json, each also as .gz, .zst, .bz2 or .xz, .parquet) and directories of
    such or other text, in this order."""
    output: str
    """Prefix of the output: PREFIX.bin, .idx, .digests, .json and .tokenizer/, and .parts/ until
    everything is done."""
    tokenizer: str
    """A tokenizer.json, a directory that has one, a SentencePiece .model, a .tiktoken, `bytes`, or
    train:N to train one with N entries."""
    workers: int = 0
    """Number of processes; 0: one per core."""
    text_field: str = "text"
    """The field of .jsonl lines, or the column of .parquet files, that holds the text."""
    skip_bad_lines: bool = False
    """Skip and count the lines of a .jsonl that hold no text, instead of stopping at the first."""
    max_lost_bytes: float = lost_bytes.TOLERATED
    """Fraction of the text's bytes that the tokens may fail to spell, because the tokenizer drops
    or rewrites characters."""


def parse(argv: Sequence[str], prog: str = "") -> Prepare | Seal:
    """Returns the options of `mesh-lm prepare [seal]`. Raises ConfigError."""
    if argv[:1] == ["seal"]:
        return command(Seal, argv[1:], SEAL, f"{prog} seal")
    return command(Prepare, argv, DESCRIPTION, prog, foreign_options(PREPROCESS))


def main(argv: Sequence[str]) -> int:
    """Runs `mesh-lm prepare` with these arguments. Returns the exit status; raises ConfigError."""
    return run(parse(argv))


def run(options: Prepare | Seal) -> int:
    """Prepares the corpus, or seals one. Returns 0, or 130 after Ctrl-C. Raises ConfigError."""
    if isinstance(options, Seal):
        for prefix in options.prefixes:
            print(seal(prefix), flush=True)
        return 0
    try:
        with formats.field_option("--text-field"):
            prepare(
                options.input,
                options.output,
                options.tokenizer,
                workers=options.workers,
                text_field=options.text_field,
                skip_bad_lines=options.skip_bad_lines,
                max_lost_bytes=options.max_lost_bytes,
            )
    except KeyboardInterrupt:
        print(
            f"\nstopped; {options.output}.parts keeps what is done, and the same command continues "
            "from there",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED
    return 0
