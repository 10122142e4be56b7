"""`python -m sharding_rules report | diff`: what XLA makes of a program for GPUs that you do not
have, and what a change does to that.
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from sharding_rules.lab import LabError, Report, compile_report, lint
from sharding_rules.lab.compare_page import compare_page
from sharding_rules.lab.diff import diff
from sharding_rules.lab.saved import ENDINGS, content, load, write
from sharding_rules.lab.summary import headline
from sharding_rules.lab.targets import TARGETS, devices
from sharding_rules.lab.text import screen
from sharding_rules.presets import preset
from sharding_rules.rules import Rules

PROGRAMS = "sharding_rules.programs"
"""The group of entry points that can compile a config. Each is a ConfigReader."""

ConfigReader = Callable[[list[str], Rules, str, int], Report]
"""(--config=FILE and changes of its fields, rules, target, number of devices) -> Report."""


def main(argv: list[str]) -> int:
    """Runs `python -m sharding_rules` with these arguments and returns the exit status.

    A user's mistake prints one message.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A locale may lack characters of the report.
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments, unknown = _parser().parse_known_args(argv)

    # XLA would take a GPU that is here, and its memory, to compile for those that are not.
    jax.config.update("jax_platforms", "cpu")
    try:
        if arguments.devices < 0:
            raise LabError(f"--devices={arguments.devices}: a report is for at least 1 device")
        if arguments.command == "report":
            return _report(arguments, unknown)
        return _diff(arguments, unknown)
    except ValueError as error:
        # The subclasses, of this package and of the program's own, are messages for the user.
        if type(error) is ValueError:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m sharding_rules", description=__doc__, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True)

    report = commands.add_parser(
        "report",
        help="compile a function of a Python file, and show the report",
        allow_abbrev=False,
    )
    report.add_argument(
        "program",
        metavar="FILE.py:FUNCTION",
        help="FUNCTION(devices) returns (step, arguments, mesh)",
    )
    report.add_argument(
        "--target", default="h100", choices=list(TARGETS), help="the GPU (default: h100)"
    )
    report.add_argument(
        "--devices", type=int, default=8, help="how many of them; whole nodes of 8 (default: 8)"
    )
    report.add_argument(
        "--out",
        default="",
        metavar="FILE",
        help=f"a file instead of the screen; it ends in {ENDINGS}",
    )

    compare = commands.add_parser(
        "diff",
        help="compare two saved reports, or a config under two sets of rules",
        allow_abbrev=False,
    )
    compare.add_argument(
        "reports", nargs="*", metavar="REPORT.json", help="two saved reports, before and after"
    )
    compare.add_argument(
        "--config",
        default="",
        help="or a run; its fields can be changed as in training: --config.model.n_layers=2",
    )
    compare.add_argument(
        "--rules", default="", help="a preset, or a product such as hsdp+megatron_sp"
    )
    compare.add_argument("--against", default="", help="the rules that it is compared with")
    compare.add_argument("--target", default="h100", choices=list(TARGETS))
    compare.add_argument(
        "--devices", type=int, default=0, help="0: as many as the config's mesh says"
    )
    compare.add_argument(
        "--out", default="", metavar="FILE.html", help="a page instead of the screen"
    )
    return parser


def _report(arguments: argparse.Namespace, unknown: list[str]) -> int:
    if unknown:
        raise LabError(
            f"unknown option {unknown[0]}; the options are --target, --devices and --out"
        )
    if arguments.out and not arguments.out.endswith((".html", ".json")):
        raise LabError(f"--out={arguments.out}: expected a report file that ends in {ENDINGS}")

    make_program = _load_function(arguments.program)
    program = make_program(devices(arguments.target, arguments.devices))
    step, args, mesh = _checked(arguments.program, program)
    report = compile_report(step, *args, mesh=mesh, name=arguments.program.rpartition(":")[2])
    findings = lint(report)
    if arguments.out:
        write(arguments.out, content(arguments.out, report, findings))
        print(f"{report.name}: {headline(report)}\nwrote {arguments.out}")
    else:
        Console().print(screen(report, findings))
    return 0 if report.fits else 1


def _load_function(program: str) -> Callable[..., Any]:
    """Returns the function that FILE.py:FUNCTION names.

    What the file raises when it is imported passes through.
    """
    file, _, name = program.rpartition(":")
    if not (file.endswith(".py") and name):
        raise LabError(f"{program!r} is not a program of the form FILE.py:FUNCTION")
    if not Path(file).is_file():
        raise LabError(f"the file {file} does not exist; name an existing one")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    # The file may import its neighbours, as it may if Python runs it.
    sys.path.insert(0, str(Path(file).resolve().parent))
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise LabError(f"{file} has no function of the name {name}")
    return function


def _checked(program: str, result: Any) -> tuple[Any, tuple[Any, ...], jax.sharding.Mesh]:
    """Returns the step, arguments and mesh that the function of this name has returned."""
    match result:
        case (step, tuple() | list() as args, jax.sharding.Mesh() as mesh) if callable(step):
            return step, tuple(args), mesh
    raise LabError(
        f"{program} must return (step, arguments, mesh): a function, a tuple of its arguments, and "
        "a jax.sharding.Mesh of the devices"
    )


def _diff(arguments: argparse.Namespace, changes: list[str]) -> int:
    if arguments.reports:
        if len(arguments.reports) != 2 or arguments.config or changes:
            raise LabError(
                "diff takes two saved reports, BEFORE.json AFTER.json, or --config, --rules and "
                "--against"
            )
        old, new = map(load, arguments.reports)
    else:
        old, new = _compile_under_both_rules(arguments, changes)
    if not arguments.out:
        print(diff(old, new))
        return 0
    write(arguments.out, compare_page(old, new))
    print(f"wrote {arguments.out}")
    return 0


def _compile_under_both_rules(
    arguments: argparse.Namespace, changes: list[str]
) -> tuple[Report, Report]:
    """Returns the reports of a config under the rules of --against and under those of --rules."""
    for option in ("config", "rules", "against"):
        if not getattr(arguments, option):
            raise LabError(
                f"diff needs --{option}: --config=FILE --rules=A --against=B, or two saved "
                "reports, BEFORE.json AFTER.json"
            )
    # Both names are looked up before the first compilation.
    rules = [preset(arguments.against), preset(arguments.rules)]
    compile_config = _config_reader()
    words = [f"--config={arguments.config}", *changes]
    old, new = (compile_config(words, r, arguments.target, arguments.devices) for r in rules)
    return old, new


def _config_reader() -> ConfigReader:
    readers = list(entry_points(group=PROGRAMS))
    if not readers:
        raise LabError(
            f"no installed package can read a config (entry points {PROGRAMS}); run: pip install "
            "-e ."
        )
    return readers[0].load()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
