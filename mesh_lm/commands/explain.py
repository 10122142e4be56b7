"""`mesh-lm explain NAME`: what a collective is whose name is in a log, such as the one at which a
run hangs: all-gather-start.12.

The compiler gives the names, so the report must be of the same config and jax as the run.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mesh_lm.commands import command_line
from mesh_lm.commands.options import HELP, print_help
from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError, did_you_mean, number_ranges
from sharding_rules.lab.report import Collective, LabError, Report
from sharding_rules.lab.saved import load
from sharding_rules.lab.summary import size
from sharding_rules.lab.targets import TARGETS

_DESCRIPTION = (
    "Says what a collective is whose name is in a log of XLA or NCCL: the line of the source, the "
    "layer, the phase, the mesh axes, and the ranks of its groups. NAME is the name, such as "
    "all-gather-start.12. With --report it reads what mesh-lm plan --output=FILE.json has written, "
    "of the same config and jax as the run; else it compiles CONFIG. The options of CONFIG are "
    "those of `mesh-lm train --help`."
)
_SHOWN_GROUPS = 4
"""Groups that are listed without --rank."""
_NAME = re.compile(r"[\w.-]+")


@dataclasses.dataclass(frozen=True)
class Explain:
    """Where the collective is looked up."""

    report: str = ""
    """The .json that `mesh-lm plan --output=FILE.json` has written; empty: compile the config."""
    rank: int = -1
    """The device whose group is shown, counted along the mesh, its last axis fastest; -1: the first
    groups."""
    target: str = "h100"
    """The GPU to compile for: h100, h200, a100 or b200."""
    devices: int = 0
    """Number of GPUs to compile for; 0: the size of the mesh."""

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise ConfigError(
                f"--target={self.target}: a collective is compiled for one of {', '.join(TARGETS)}"
            )
        if self.rank < -1:
            raise ConfigError(f"--rank={self.rank}: devices are counted from 0")


class Question(NamedTuple):
    """The command line of `mesh-lm explain`."""

    name: str
    options: Explain
    config: TrainConfig | None
    """None: the report has the program."""


def parse(argv: Sequence[str], prog: str) -> Question:
    """Returns the question. Raises ConfigError, and SystemExit after printing the help."""
    if HELP & {f"--{word.lstrip('-')}" for word in argv}:
        print_help(Explain, _DESCRIPTION, f"{prog} NAME [CONFIG]")
    if not argv or argv[0].startswith("-"):
        raise ConfigError(f"name the collective first, as in {prog} all-gather-start.12")
    name = instruction_name(argv[0])
    config, values = command_line.parse_with(Explain, argv[1:], prog=prog)
    options = Explain(**values)
    if options.report:
        return Question(name, options, None)
    if len(argv) == 1:
        raise ConfigError(
            f"{name} is a name of one compiled program: add --report=FILE.json of mesh-lm plan, or "
            "--config=CONFIG"
        )
    return Question(name, options, config)


def instruction_name(word: str) -> str:
    """Returns the name of an instruction in a word of a log, as in %all-reduce.3, or
    jit_step/all-reduce.3. Raises ConfigError for a word without one.
    """
    name = word.strip("'\" ").rpartition("/")[2].removeprefix("%")
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{word!r} is not the name of an instruction, such as all-reduce.3")
    return name


def run(question: Question) -> int:
    """Prints what the collective is, and returns 0.

    Raises ConfigError for a name that the program does not have, a report that cannot be read or is
    of another version of jax, and if the compiler is missing or fails.
    """
    report = _report(question)
    found = named(report, question.name)
    if not found:
        raise ConfigError(_no_such_collective(report, question.name))
    if question.options.rank >= report.n_devices:
        raise ConfigError(
            f"--rank={question.options.rank}: counted from 0, the last device of the program is "
            f"{report.n_devices - 1}"
        )
    for collective in found:
        for line in lines(report, collective, question.options.rank):
            print(line)
    return 0


def _report(question: Question) -> Report:
    options = question.options
    try:
        if question.config is None:
            report = load(options.report)
            _require_this_jax(report, options.report)
            return report
        import jax  # here, so that a mistake in the arguments is answered first

        from mesh_lm.planning.program import compile_config, devices_for, flags_of
        from sharding_rules.lab.flags import options as flag_options

        # XLA would take a GPU that is here to compile for those that are absent.
        jax.config.update("jax_platforms", "cpu")
        config = question.config
        flags = flag_options(flags_of(config, options.target))
        return compile_config(config, options.target, devices_for(config, options.devices), flags)
    except LabError as error:
        raise ConfigError(str(error)) from error


def _require_this_jax(report: Report, file: str) -> None:
    """Raises ConfigError for a report of another jax, whose compiler gives other names."""
    installed = importlib.metadata.version("jax")
    made_with = report.versions.get("jax", installed)
    if made_with != installed:
        raise ConfigError(
            f"{file} was made with jax {made_with}, and this is jax {installed}, whose names "
            "differ; make it again with mesh-lm plan"
        )


def named(report: Report, name: str) -> list[Collective]:
    """Returns the collectives of a name, one for each place that they run from. The end of an
    asynchronous one (all-gather-done.12) stands for its start.
    """
    names = {name, name.replace("-done", "-start"), f"{name}.0"}
    return [collective for collective in report.collectives if collective.name in names]


def _no_such_collective(report: Report, name: str) -> str:
    names = list(dict.fromkeys(collective.name for collective in report.collectives))
    kind = re.sub(r"(?:-start|-done)?(?:\.\d+)*$", "", name)
    alike = [other for other in names if other.startswith(kind)]
    similar = difflib.get_close_matches(name, alike or names, n=3, cutoff=0.6)
    if not names:
        return f"{report.name} has no collectives at all, and so none of the name {name}"
    return (
        f"{report.name} has no collective of the name {name}, but {len(names)} others"
        f"{did_you_mean(similar)}"
    )


def lines(report: Report, collective: Collective, rank: int = -1) -> Iterator[str]:
    """Yields what there is to know about a collective, a line each."""
    over = " x ".join(f"{axis}={report.mesh[axis]}" for axis in collective.axes) or "no mesh axis"
    yield f"{collective.name}: {collective.kind} over {over}"
    where = collective.where
    facts = {
        "source": where.source,
        "part": where.part,
        "phase": where.phase,
        "operation": where.op,
        "made by": "the program itself" if collective.by_hand else "XLA, from the sharding rules",
        "arrays": f"{', '.join(collective.shapes)} ({size(collective.payload)})",
        "runs": f"{collective.times:g} times in a step{_loops(collective)}",
        "spans": f"{collective.nodes} NVLink domains" if collective.nodes > 1 else "",
        "ranks": _ranks(report, collective, rank),
    }
    for label, text in facts.items():
        if text:
            yield f"  {label.ljust(9)}  {text}"


def _loops(collective: Collective) -> str:
    taken = ", in a branch that not every device takes" if collective.conditional else ""
    if not collective.loops:
        return taken
    trips = " x ".join(f"{trips:g}" for trips in collective.loops)
    return f": loops of {trips}, outermost first{taken}"


def _ranks(report: Report, collective: Collective, rank: int) -> str:
    if collective.partial:
        return f"groups of {collective.group}, each a part of its axes"
    members = groups(report.mesh, collective.axes)
    if rank >= 0:
        (group,) = [group for group in members if rank in group]
        return f"{number_ranges(group, 'device', 'devices')}, with device {rank}"
    shown = "; ".join(
        number_ranges(group, "device", "devices") for group in members[:_SHOWN_GROUPS]
    )
    more = f"; and {len(members) - _SHOWN_GROUPS} more" if len(members) > _SHOWN_GROUPS else ""
    return f"{len(members)} groups of {collective.group}: {shown}{more}"


def groups(mesh: dict[str, int], axes: Sequence[str]) -> list[list[int]]:
    """Returns the devices of each group along these axes, counted along the mesh."""
    sizes = tuple(mesh.values())
    numbers = np.arange(int(np.prod(sizes))).reshape(sizes)
    positions = [position for position, axis in enumerate(mesh) if axis in axes]
    last = np.moveaxis(numbers, positions, range(-len(positions), 0))
    n_members = int(np.prod([sizes[position] for position in positions]))
    return last.reshape(-1, n_members).tolist()
