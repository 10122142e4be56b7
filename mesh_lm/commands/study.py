"""The figures of a paper on parallel training, without a cluster.

mesh-lm study bytes gpt_1_3b    what data parallelism sends over 1 to 256 GPUs; closed forms
mesh-lm study strategies        all strategies side by side, for models of 1b to 1t parameters

--output=DIR writes CSV, pictures and one page; without it there is a table on the screen. Every
time is predicted, never measured.
"""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mesh_lm.commands.options import command
from mesh_lm.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mesh_lm.config import TrainConfig
    from mesh_lm.planning.studies.output import Study
    from sharding_rules.lab import Report


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


@dataclasses.dataclass(frozen=True)
class Strategies:
    """Every strategy on paper, for models of GPT's shape on numbers of GPUs: memory, bytes by
    network, efficiency; which one to use, and pure data parallelism against hybrids.

    The batch is the same on all numbers of GPUs. Times are predicted, never measured.
    """

    sizes: str = "1b..1t"
    """Parameters of the models: a range, of 1, 3, 10, 30 and so on, or a list as 7b,70b."""
    gpus: str = "8..16384"
    """Numbers of GPUs: a range, doubled from its first, or a list."""
    target: str = "h100"
    """The GPU: h100, h200, a100 or b200."""
    seq_len: int = 4096
    """Tokens of a sequence."""
    batch: int = 2048
    """Sequences of a step."""
    detail: str = ""
    """The point whose strategies are drawn side by side, as 10b@64; empty: where most strategies
    fit and most do not."""
    compile: int = 0
    """Programs to compile, where pure data parallelism and hybrids are nearest on paper."""
    output: str = ""
    """Directory for the CSV, the pictures and the page."""

    def __post_init__(self) -> None:
        if self.seq_len < 1 or self.batch < 1:
            raise ConfigError("--seq-len and --batch: expected at least 1")
        if self.compile < 0:
            raise ConfigError(f"--compile={self.compile}: expected a number of programs")


Options = Bytes | Strategies
COMMANDS: dict[str, type[Bytes] | type[Strategies]] = {"bytes": Bytes, "strategies": Strategies}


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
    if isinstance(options, Bytes):
        _bytes(options)
    else:
        _strategies(options)
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


def _strategies(options: Strategies) -> None:
    from rich.console import Console

    from mesh_lm.planning.studies import figures, screen, strategies
    from mesh_lm.planning.studies.output import require_folder
    from mesh_lm.planning.studies.ranges import gpu_counts, model_sizes
    from sharding_rules.lab import LabError

    sizes = model_sizes(options.sizes, "--sizes")
    counts = gpu_counts(options.gpus, "--gpus")
    _require_target(options.target)
    if options.output:
        require_folder(options.output)
    run = {"seq_len": options.seq_len, "batch": options.batch}
    rows = strategies.side_by_side(sizes, counts, options.target, **run, say=_log)
    detail = figures.point_of(rows, options.detail)
    if options.compile:
        try:
            rows = strategies.compiled(
                *(rows, options.compile, options.target, _compiler(options.target)),
                **run, say=_log,
            )  # fmt: skip
        except LabError as error:
            raise ConfigError(str(error)) from error
    Console().print(screen.strategies_table(detail))
    print()
    study = figures.of_strategies(
        *(rows, detail, options.target), options.seq_len, options.batch, _typed(options)
    )
    _show(screen.winners_table(rows), study, options.output)
    print(f"\n{figures.ERROR_WORDS}")


def _require_target(target: str) -> None:
    from sharding_rules.lab.targets import TARGETS

    if target not in TARGETS:
        raise ConfigError(f"--target={target}: expected one of the targets {', '.join(TARGETS)}")


def _compiler(target: str) -> Callable[[TrainConfig, int], Report]:
    """Returns the function that compiles a config for a number of GPUs, with the flags of a run."""
    import jax

    from mesh_lm.planning.program import compile_config, flags_of, mesh_for
    from sharding_rules import ShardingRuleError
    from sharding_rules.lab import LabError
    from sharding_rules.lab.flags import options as flag_options
    from sharding_rules.lab.targets import TARGETS

    # XLA would take a GPU that is here, and its memory, to compile for those that are not.
    jax.config.update("jax_platforms", "cpu")
    # First, as without a compiler nothing is worth a try.
    mesh_for(target, TARGETS[target].node)

    def compiled(config: TrainConfig, n_devices: int) -> Report:
        try:
            flags = flag_options(flags_of(config, target))
            return compile_config(config, target, n_devices, flags)
        except (ConfigError, ShardingRuleError) as error:
            raise LabError(str(error)) from error

    return compiled


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


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
