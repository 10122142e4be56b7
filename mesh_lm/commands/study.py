"""The figures of a paper on parallel training, without a cluster.

mesh-lm study bytes gpt_1_3b    what data parallelism sends over 1 to 256 GPUs; closed forms
mesh-lm study strategies        all strategies side by side, for models of 1b to 1t parameters
mesh-lm study scaling --weak    throughput over GPUs, compiled, beside published points

--output=DIR writes CSV, pictures and one page; without it there is a table on the screen. Every
time is predicted, never measured.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from mesh_lm.commands.options import command, subcommand
from mesh_lm.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mesh_lm.config import TrainConfig
    from mesh_lm.planning.studies.output import Study
    from mesh_lm.planning.studies.scaling import Point
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
            raise ConfigError(
                f"--microbatches={self.microbatches}: expected a number of microbatches of a step"
            )


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


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Throughput over numbers of GPUs, each point compiled with the layout that the planner finds.

    One model with one batch; with --weak its batch grows with the GPUs; with --weak and no config
    Megatron-LM's nine models grow with them. Published points stand beside. Ctrl-C shows what is
    finished, and the same command continues. Times are predicted, never measured.
    """

    POSITIONAL: ClassVar[tuple[str, ...]] = ("config",)

    config: str = ""
    """The config to scale: a name, or a path."""
    gpus: str = ""
    """Numbers of GPUs: a range, or a list. A range has the published numbers if there are some,
    else it doubles from its first; empty: all that are published."""
    weak: bool = False
    """Whether the batch grows with the GPUs, or without a config the models."""
    target: str = "h100"
    """The GPU: h100, h200, a100 or b200."""
    compiles: int = 3
    """Programs that the search compiles at each point at most, besides the config as it is."""
    keep: str = ""
    """What the search leaves alone: mesh.tensor=8,mesh.pipeline=6."""
    output: str = ""
    """Directory for the CSV, the pictures and the page, and for finished points."""

    def __post_init__(self) -> None:
        if self.compiles < 1:
            raise ConfigError(
                f"--compiles={self.compiles}: each point of a study needs at least 1 program"
            )
        if not self.config and not self.weak:
            raise ConfigError(
                "name a config, as mesh-lm study scaling megatron_177b, or add --weak for "
                "Megatron-LM's models"
            )
        if not self.config and self.keep:
            raise ConfigError("--keep needs a config: what the models keep is not the same")


Options = Bytes | Strategies | Scaling
COMMANDS: dict[str, type[Bytes] | type[Strategies] | type[Scaling]] = {
    "bytes": Bytes,
    "strategies": Strategies,
    "scaling": Scaling,
}


def parse(argv: Sequence[str], prog: str = "mesh-lm study") -> Options:
    """Raises ConfigError, and SystemExit after printing the help."""
    name = subcommand(argv, prog, COMMANDS, __doc__ or "")
    cls = COMMANDS[name]
    return command(cls, argv[1:], cls.__doc__ or "", f"{prog} {name}")


def run(options: Options) -> int:
    """Makes the study, prints its table, writes its files and returns 0. Raises ConfigError."""
    if isinstance(options, Bytes):
        _bytes(options)
    elif isinstance(options, Strategies):
        _strategies(options)
    else:
        _scaling(options)
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

    from mesh_lm.commands.plan_options import require_target
    from mesh_lm.planning.studies import figures, screen, strategies
    from mesh_lm.planning.studies.output import require_folder
    from mesh_lm.planning.studies.ranges import gpu_counts, model_sizes
    from sharding_rules.lab import LabError

    sizes = model_sizes(options.sizes, "--sizes")
    counts = gpu_counts(options.gpus, "--gpus")
    require_target(options.target)
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
        detail = figures.point_of(rows, f"{detail[0].size}@{detail[0].gpus}")
    Console().print(screen.strategies_table(detail))
    print()
    study = figures.of_strategies(
        *(rows, detail, options.target), options.seq_len, options.batch, _typed(options)
    )
    _show(screen.winners_table(rows), study, options.output)
    print(f"\n{figures.ERROR_WORDS}")


def _scaling(options: Scaling) -> None:
    from mesh_lm.commands.plan_options import require_target
    from mesh_lm.planning.best import parse_kept
    from mesh_lm.planning.studies import figures, scaling, screen
    from mesh_lm.planning.studies.output import require_folder
    from sharding_rules.lab import LabError

    points = _points(options)
    require_target(options.target)
    parse_kept(options.keep)
    if options.output:
        require_folder(options.output)
    kept = scaling.Kept(str(Path(options.output, "points.json")) if options.output else "")
    rows = []
    shares = []
    try:
        compile_one = _compiler(options.target)
        search = scaling.Search(options.target, options.compiles, options.keep, compile_one)
        for result in scaling.scaled(points, search, kept, _log):
            rows.append(result.row)
            shares += result.shares
    except LabError as error:
        raise ConfigError(str(error)) from error
    if not rows:
        raise ConfigError("interrupted before a point was finished; the same command continues")
    study = figures.of_scaling(
        *(rows, shares, _title(options), options.target, _typed(options)),
        grows=options.weak,
        n_points=len(points),
    )
    _show(screen.scaling_table(rows), study, options.output)
    print()
    for line in (*screen.layout_lines(rows), *study.sentences):
        print(line)


def _points(options: Scaling) -> list[Point]:
    """Returns the points that the options ask for. Raises ConfigError."""
    from mesh_lm.config import load
    from mesh_lm.config.files import shipped
    from mesh_lm.planning.studies import scaling
    from mesh_lm.planning.studies.published import STRONG, WEAK
    from mesh_lm.planning.studies.ranges import gpu_counts

    if not options.config:
        table_counts = [row.gpus for row in WEAK.values()]
        counts = table_counts
        if options.gpus:
            counts = gpu_counts(options.gpus, "--gpus", table_counts)
        table_points = scaling.published_points(options.target)
        points = [point for point in table_points if point.gpus in counts]
        if not points:
            numbers = ", ".join(f"{n:,}" for n in table_counts)
            raise ConfigError(
                f"--gpus={options.gpus}: none of Megatron-LM's models is published for these; "
                f"they are for {numbers}"
            )
        return points

    config = load(options.config)
    # A file of the user's own may have the name of a published model.
    name = options.config if options.config in shipped() else Path(options.config).name
    known = list(STRONG.get(name, {}))
    if not options.gpus and not known:
        raise ConfigError("--gpus: missing; a range of GPUs, as 8..64, or numbers, as 96,144,288")
    counts = gpu_counts(options.gpus, "--gpus", known) if options.gpus else known
    if not options.weak:
        return scaling.strong_points(name, config, counts, options.target)
    own_gpus = WEAK[name].gpus if name in WEAK else _mesh_size(config, options.config)
    return scaling.weak_points(name, config, own_gpus, counts, options.target)


def _mesh_size(config: TrainConfig, name: str) -> int:
    """Returns the number of GPUs for which a config's batch is. Raises ConfigError if its mesh does
    not say so.
    """
    sizes = config.mesh.sizes().values()
    if -1 in sizes:
        raise ConfigError(
            f"--weak: the mesh of {name} has an axis of -1, so that its batch is for no number of "
            "GPUs; set the axis in a config of your own"
        )
    return math.prod(sizes)


def _title(options: Scaling) -> str:
    if not options.config:
        return "Models that grow with the GPUs"
    name = Path(options.config).stem
    return f"{name}, its batch growing with the GPUs" if options.weak else f"{name}, one batch"


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
