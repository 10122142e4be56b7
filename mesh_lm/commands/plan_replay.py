"""`mesh-lm plan replay REPORT.json --hw=...`: a saved report on other hardware, without a compile.

The lab is imported when the command runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from mesh_lm.commands.options import command
from mesh_lm.errors import ConfigError
from sharding_rules.lab.machine import Machine
from sharding_rules.lab.report import LabError, Report

COMMAND = "replay"
"""The word after `mesh-lm plan` that chooses this."""
PICTURE = ".png"
_DESCRIPTION = (
    "Predicts the times of a saved report on other hardware, from the program in it. Nothing is "
    "compiled: constants that XLA reads (the device, node, memory, bandwidth) need a plan of the "
    "config."
)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The options of `mesh-lm plan replay`."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("report",)

    report: tuple[str, ...]
    """The .json that `mesh-lm plan FILE --output=REPORT.json` has written; several with
    --measured."""
    hw: str = ""
    """The hardware: changes of the report's target, nvlink=off,nic=25, or FILE.json, a profile that
    `mesh-lm bench comm` has measured (docs/hardware.md)."""
    what_if: bool = False
    """List what each constant does to the predicted step, instead of the report; --output=FILE.png
    draws it."""
    measured: tuple[float, ...] = ()
    """Measured seconds of a step, one for each report: list which constant of the hardware, changed
    alone, would explain them."""
    tokens: float = 0.0
    """Tokens of the whole run, as 2e12: also say how many days it takes, and the energy."""
    gpu_hour: float = 0.0
    """Price of one GPU for an hour, in any currency: also say what the run costs."""
    output: str = ""
    """Write the report to this .html or .json, or the what-if to this .png; empty: the screen."""

    def __post_init__(self) -> None:
        endings = (PICTURE,) if self.what_if else (".html", ".json")
        if self.output and Path(self.output).suffix not in endings:
            words = " or ".join(endings)
            raise ConfigError(f"--output={self.output}: the replay is a file that ends in {words}")
        if self.measured and len(self.measured) != len(self.report):
            raise ConfigError(
                "give each report its own measured step: there are "
                f"{len(self.measured)} for {len(self.report)} reports"
            )
        if not all(0 < seconds < math.inf for seconds in self.measured):
            raise ConfigError("--measured: expected seconds of a step, above 0")
        if len(self.report) > 1 and not self.measured:
            raise ConfigError("several reports go with --measured; give one report")
        require_cost(self.tokens, self.gpu_hour)
        costs = {"--tokens": self.tokens, "--gpu-hour": self.gpu_hour}
        if self.measured:
            require_none(
                "--measured", {"--output": self.output, "--what-if": self.what_if, **costs}
            )
        if self.what_if:
            require_none("--what-if", costs)


def require_none(option: str, others: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that another one would leave without effect.

    others: options -> their values.
    """
    for other, value in others.items():
        if value:
            raise ConfigError(f"{other} would change nothing beside {option}: give one of them")


def require_cost(tokens: float, gpu_hour: float) -> None:
    """Raises ConfigError for less than no tokens, or a price below 0."""
    for option, value in (("tokens", tokens), ("gpu-hour", gpu_hour)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"--{option}={value:g}: expected a number of at least 0")


def parse(argv: Sequence[str], prog: str) -> Replayed:
    """Returns the options on the command line. Raises ConfigError."""
    return command(Replayed, argv, _DESCRIPTION, prog)


def show(options: Replayed) -> int:
    """Prints the report on the other hardware, or writes it to a file. Returns the status 0.

    Raises ConfigError for a file that holds no report with a program, and for hardware that needs
    another program.
    """
    # Imported here, so that a mistake in the arguments is answered first.
    from rich.console import Console

    from mesh_lm.commands.what_if import show_suspects, show_what_if
    from sharding_rules.lab.replayed import Replay
    from sharding_rules.lab.saved import content, load, write
    from sharding_rules.lab.summary import headline
    from sharding_rules.lab.text import screen

    try:
        all_saved = [load(file) for file in options.report]
        saved = all_saved[0]
        machine = Machine.of(options.hw, saved.target)
        if options.measured:
            programs = {
                file: Replay(Replay(one).on(machine))
                for file, one in zip(options.report, all_saved, strict=True)
            }
            measured_us = {
                file: 1e6 * seconds
                for file, seconds in zip(options.report, options.measured, strict=True)
            }
            return show_suspects(measured_us, programs, machine)
        report = Replay(saved).on(machine)
        if options.what_if:
            return show_what_if(report, machine, options.output)
        facts = list(replayed_facts(options, report))
        if not options.output:
            Console().print(screen(report, facts=facts))
            return 0
        text = content(options.output, report, facts=facts)
        if options.output.endswith(".json"):
            data = json.loads(text)
            text = json.dumps({**_saved_data(options.report[0]), **data, "facts": dict(facts)})
        write(options.output, text)
    except LabError as error:
        raise ConfigError(str(error)) from error
    print(f"{report.name} on {report.n_devices:,} x {machine.name}: {headline(report)}")
    print(f"wrote {options.output}")
    return 0


def replayed_facts(options: Replayed, report: Report) -> Iterator[tuple[str, str]]:
    """Yields the changed constants, and the speed and cost of the run that the report is of."""
    from mesh_lm.planning.run_cost import RunSize, facts_of, hardware_facts

    yield from hardware_facts(report)
    run = _saved_data(options.report[0]).get("run")
    if run:
        yield from facts_of(RunSize(**run), report, options.tokens, options.gpu_hour)


_OF_THE_RUN = ("run", "state")
"""Keys of a saved plan that other hardware does not change."""


def _saved_data(file: str) -> dict[str, Any]:
    data = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    return {key: data[key] for key in _OF_THE_RUN if key in data}
