"""`python -m sharding_rules diff --config=FILE --rules=A --against=B`: what changes in the compiled program."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib.metadata import entry_points

import jax

from sharding_rules.lab import LabError, Report
from sharding_rules.lab.diff import diff
from sharding_rules.lab.targets import TARGETS
from sharding_rules.presets import preset
from sharding_rules.rules import Rules

PROGRAMS = "sharding_rules.programs"
"""Entry points of this group know a kind of config: (--config=FILE and its like, rules, target, number of devices) -> Report."""

Program = Callable[[list[str], Rules, str, int], Report]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("python -m sharding_rules", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("diff", help="compile a config under two sets of rules, and say what changed", allow_abbrev=False)
    command.add_argument("--config", required=True, help="the run; its fields can be changed as in train.py: --config.model.n_layers=2")
    command.add_argument("--rules", required=True, help="a preset, or a product such as hsdp+megatron_sp")
    command.add_argument("--against", required=True, help="the rules that it is compared with")
    command.add_argument("--target", default="h100", choices=list(TARGETS))
    command.add_argument("--devices", type=int, default=0, help="0: as many as the config's mesh says")
    arguments, changes = parser.parse_known_args(argv)
    jax.config.update("jax_platforms", "cpu")  # XLA would take a GPU that is here, and its memory, to compile for those that are not
    try:
        if arguments.devices < 0:
            raise LabError(f"--devices={arguments.devices} must be at least 1")
        both = [preset(name) for name in (arguments.against, arguments.rules)]
        program, words = _program(), [f"--config={arguments.config}", *changes]
        before, after = (program(words, rules, arguments.target, arguments.devices) for rules in both)
    except ValueError as error:  # of this package, and of the program's own: they are all messages for the user
        if type(error) is ValueError:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(diff(before, after))
    return 0


def _program() -> Program:
    found = list(entry_points(group=PROGRAMS))
    if not found:
        raise LabError(f"no installed package can read a config (entry points {PROGRAMS}); run: pip install -e .")
    return found[0].load()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
