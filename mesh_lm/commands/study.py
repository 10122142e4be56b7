"""The figures of a paper on parallel training, without a cluster.

mesh-lm study bytes gpt_1_3b   what data parallelism sends over 1 to 256 GPUs; closed forms

--output=DIR writes CSV, pictures and one page; without it there is a table on the screen. Every
time is predicted, never measured.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mesh_lm.commands.options import command
from mesh_lm.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mesh_lm.planning.studies.output import Study


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What each GPU sends in a step of data parallelism, over numbers of GPUs, under each preset.

    By closed forms, to which compiled programs are held; nothing is compiled.
    """

    POSITIONAL: ClassVar[tuple[str, ...]] = ("config",)

    config: str = "gpt_1_3b"
    """Config whose model it is: a name, or a path."""
    gpus: str = "1..256"
    """Numbers of GPUs: a range, doubled from its first, or a list as 8,24,64."""
    microbatches: int = 1
    """Microbatches of a step: ZeRO-3 and FSDP gather their weights in each."""
    output: str = ""
    """Directory for the CSV, the picture and the page."""

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ConfigError(f"--microbatches={self.microbatches}: a step has at least 1")


Options = Bytes
COMMANDS: dict[str, type[Options]] = {"bytes": Bytes}


def parse(argv: Sequence[str], prog: str = "mesh-lm study") -> Options:
    """Raises ConfigError, and SystemExit after printing the help."""
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(__doc__)
        raise SystemExit(0)
    if name not in COMMANDS:
        similar = difflib.get_close_matches(name, COMMANDS, n=1)
        raise ConfigError(
            f"{prog} needs one of its studies: {', '.join(COMMANDS)}, not {name or 'nothing'}"
            f"{did_you_mean(similar)}"
        )
    cls = COMMANDS[name]
    return command(cls, argv[1:], cls.__doc__ or "", f"{prog} {name}")


def run(options: Options) -> int:
    """Makes the study, prints its table, writes its files and returns 0. Raises ConfigError."""
    _bytes(options)
    return 0


def _bytes(options: Bytes) -> None:
    # Imported here, so that a mistake in the arguments is answered first.
    from mesh_lm.config import load
    from mesh_lm.planning.studies import figures, screen
    from mesh_lm.planning.studies.ranges import gpu_counts
    from mesh_lm.planning.studies.replica_bytes import replica_bytes

    counts = gpu_counts(options.gpus, "--gpus")
    rows = replica_bytes(load(options.config), counts, options.microbatches)
    name = Path(options.config).stem
    _show(
        screen.replica_bytes_table(rows),
        figures.of_replica_bytes(rows, name, _typed(options)),
        options.output,
    )


def _show(table: RenderableType, study: Study, output: str) -> None:
    """Prints a table, and writes the files of its study if there is a directory for them."""
    from rich.console import Console

    from mesh_lm.planning.studies.output import write

    Console().print(table)
    if not output:
        return
    for line in write(study, output):
        print(line)


def _typed(options: Options) -> str:
    """Returns the command line of these options, without the directory and with what is not the
    default.
    """
    name = next(word for word, cls in COMMANDS.items() if isinstance(options, cls))
    words = ["mesh-lm study", name]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name == "output" or value == field.default:
            continue
        option = f"--{field.name.replace('_', '-')}"
        words.append(option if value is True else f"{option}={value}")
    return " ".join(words)
