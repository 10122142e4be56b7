"""The options of `mesh-lm plan FILE`, and of `python train.py --config=FILE --plan`.

Flax and the lab are imported when the commands run.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

from mesh_lm.commands import command_line, plan_bytes, plan_replay
from mesh_lm.commands.options import HELP, print_help
from mesh_lm.commands.plan_bytes import Bytes
from mesh_lm.commands.plan_replay import PICTURE, Replayed, require_cost, require_none
from mesh_lm.config import TrainConfig
from mesh_lm.config.typed import TypedRun
from mesh_lm.errors import ConfigError
from sharding_rules.lab.flags import FLAG_SETS
from sharding_rules.lab.machine import Machine
from sharding_rules.lab.report import LabError
from sharding_rules.lab.targets import TARGETS

SCREEN = "screen"
_REPORT = "--plan"
_OUTPUT = "--output"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The target of a plan, and where its report goes."""

    plan: str = ""
    """Where the report goes: the screen, or a file: .html (a page with charts), .trace.json (for
    Perfetto) or .json; also --output."""
    target: str = ""
    """The GPU: h100, h200, a100 or b200; empty: that of --hw, else the h100."""
    devices: int = 0
    """Number of GPUs; 0: the size of the mesh; if an axis is -1, the fewest complete nodes that
    hold it."""
    max_microbatch: bool = False
    """Also compile larger and smaller microbatches, to find the most sequences per device that
    fit."""
    against: str = ""
    """Also say in one sentence which is slower, and why: a config, or the .json that a plan has
    written. A config is compiled as well."""
    tokens: float = 0.0
    """Tokens of the whole run, as 2e12: also say how many days it takes, and the energy."""
    gpu_hour: float = 0.0
    """Price of one GPU for an hour, in any currency: also say what the run costs (that of --tokens,
    or the config's steps)."""
    best: bool = False
    """Search for the fastest layout on these devices: mesh, rules, microbatches, chunks and
    rematerialisation. The model, its batch and its optimizer stay."""
    compiles: int = 0
    """Programs that --best compiles at most, besides the config as it is; 0: 6."""
    keep: str = ""
    """What --best leaves alone: mesh.tensor=8,train.microbatches=4."""
    max_tensor: int = 0
    """The most tensor parallelism that --best tries; 0: a node's."""
    save: str = ""
    """Write the layout that --best finds to this .json, which mesh="FILE.json" in a config, or
    --mesh=FILE.json, reads."""
    flags: str = "auto"
    """Set of XLA flags to compile with (sharding_rules/lab/flags.py); auto: the flags of the run
    (launch.xla_flags)."""
    hw: str = ""
    """Other hardware than the target: h100,nvlink=off,nic=25,node=72 changes constants, FILE.json
    is a profile that `mesh-lm bench comm` has measured (docs/hardware.md)."""
    what_if: bool = False
    """Move each constant of the hardware alone through its range, and list what that does to the
    predicted step, instead of the report; --output=FILE.png draws it."""

    def __post_init__(self) -> None:
        flag_sets = ("auto", *FLAG_SETS)
        if self.target:
            require_target(self.target)
        self._require_hardware()
        if self.flags not in flag_sets:
            raise ConfigError(
                f"--flags={self.flags}: expected one of the sets of flags {', '.join(flag_sets)}"
            )
        require_cost(self.tokens, self.gpu_hour)
        if self.compiles < 0:
            raise ConfigError(f"--compiles={self.compiles}: a search compiles at least 1 program")
        if self.max_tensor < 0:
            raise ConfigError(f"--max-tensor={self.max_tensor}: expected a number of devices")
        for name in ("compiles", "keep", "save", "max_tensor"):
            if getattr(self, name) and not self.best:
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} is an option of a search: add --best")
        if self.best:
            self._require_search()
        if self.save and not self.save.endswith(".json"):
            raise ConfigError(f"--save={self.save}: the layout is a file that ends in .json")
        if self.devices < 0:
            raise ConfigError(f"--devices={self.devices}: a plan is for at least 1 device")
        if self.what_if:
            require_none(
                "--what-if",
                {
                    "--against": self.against,
                    "--max-microbatch": self.max_microbatch,
                    "--tokens": self.tokens,
                    "--gpu-hour": self.gpu_hour,
                },
            )
            if self.plan != SCREEN and Path(self.plan).suffix != PICTURE:
                raise ConfigError(f"{self.plan}: a what-if is drawn to a file that ends in .png")
        elif self.plan != SCREEN and Path(self.plan).suffix not in (".html", ".json"):
            raise ConfigError(
                f"{self.plan}: the report is a file that ends in .html or .json; without a file it "
                "goes to the screen"
            )

    @functools.cached_property
    def machine(self) -> Machine:
        """The target with the changes of --hw. Raises ConfigError for a profile that cannot be
        read, or is of other hardware.
        """
        return _machine(self.hw, self.target)

    @functools.cached_property
    def typed_run(self) -> TypedRun:
        """The words of the run that stood beside the options; none if nothing was typed."""
        return TypedRun()

    def _require_hardware(self) -> None:
        """Raises ConfigError for words of --hw that nobody knows. Profiles are read later."""
        words = [word for word in self.hw.split(",") if not word.endswith(".json")]
        machine = _machine(",".join(words), self.target)
        if self.target and machine.target.name != self.target:
            raise ConfigError(
                f"--target={self.target} and --hw={self.hw} name two devices: leave --target out"
            )

    def _require_search(self) -> None:
        """Raises ConfigError for options of a plan that a search has no use for."""
        others = {
            "--output": self.plan != SCREEN,
            "--against": bool(self.against),
            "--max-microbatch": self.max_microbatch,
            "--flags": self.flags != "auto",
            "--what-if": self.what_if,
        }
        for option, is_given in others.items():
            if is_given:
                raise ConfigError(
                    f"{option} does not go with --best: plan the layout that it finds"
                )


def _machine(words: str, target: str) -> Machine:
    try:
        return Machine.of(words, target)
    except LabError as error:
        raise ConfigError(str(error)) from error


Request = tuple["Plan | Bytes | Replayed", "TrainConfig | None"]
"""Options, and the run; a saved report needs no run."""


def require_target(target: str) -> None:
    """Raises ConfigError for a GPU of which the lab knows nothing."""
    if target not in TARGETS:
        raise ConfigError(f"--target={target}: expected one of the targets {', '.join(TARGETS)}")


def parse(argv: Sequence[str], prog: str) -> Request:
    """Returns the plan, or the options of `mesh-lm plan bytes`, and the run on the command line of
    `mesh-lm plan`; for `mesh-lm plan replay` its options alone. Raises ConfigError.

    --output=FILE names the report; the run's own directory is --config.output. A config of the name
    bytes or replay is chosen by its path, or by --config.
    """
    if argv and argv[0] == plan_replay.COMMAND:
        return plan_replay.parse(argv[1:], f"{prog} {plan_replay.COMMAND}"), None
    if argv and argv[0] == plan_bytes.COMMAND:
        return plan_bytes.parse(argv[1:], f"{prog} {plan_bytes.COMMAND}")
    words = []
    for word in argv:
        if word.partition("=")[0] == _OUTPUT:
            word = _REPORT + word.removeprefix(_OUTPUT)
        words.append(word)
    plan, config = parse_either(words, prog, Plan(SCREEN))
    return plan or Plan(SCREEN), config


def parse_either(
    argv: Sequence[str], prog: str = "train.py", default: Plan | None = None
) -> tuple[Plan | None, TrainConfig]:
    """Returns the plan on a command line, `default` without --plan, and the run.

    Raises ConfigError for the mistakes in it.
    """
    is_plan = default or any(word.partition("=")[0] == _REPORT for word in argv)
    if is_plan and HELP & {f"--{word.lstrip('-')}" for word in argv}:
        print_help(
            Plan,
            "What a run would do on GPUs, without them. FILE and its options are those of "
            "`mesh-lm train --help`. `mesh-lm plan bytes FILE` compiles nothing, and lists what "
            "one step sends. `mesh-lm plan replay REPORT.json --hw=...` predicts the times of a "
            "saved report on other hardware.",
            prog,
        )
    config, changes, typed = command_line.parse_words(
        Plan, argv, prog=prog, alone={_REPORT: SCREEN}
    )
    if not changes:
        return default, config
    if "plan" not in changes and not default:
        name, value = next(iter(changes.items()))
        word = f"--{name}={value}"
        raise ConfigError(f"{word} goes with --plan: python train.py --config=FILE --plan {word}")
    plan = dataclasses.replace(default or Plan(SCREEN), **changes)
    vars(plan)["typed_run"] = typed  # a field would be an option
    return plan, config


def run(arguments: Request) -> int:
    """Returns the status of `mesh_lm.commands.plan.show`, `plan_bytes.show` or
    `plan_replay.show`.
    """
    options, config = arguments
    if isinstance(options, Replayed) or config is None:
        assert isinstance(options, Replayed)
        return plan_replay.show(options)
    if isinstance(options, Bytes):
        return plan_bytes.show(options, config)
    # Imported here, so that a mistake in the arguments is answered first.
    from mesh_lm.commands.plan import show

    return show(options, config)
