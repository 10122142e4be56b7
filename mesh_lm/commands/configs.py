"""`mesh-lm configs`: the configs that come with mesh_lm, a line each."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence

from mesh_lm.commands.options import command
from mesh_lm.config.files import shipped


@dataclasses.dataclass(frozen=True)
class Configs:
    """The options of `configs`: none."""


def parse(argv: Sequence[str], prog: str = "") -> Configs:
    """Raises ConfigError: the command has no options."""
    return command(
        Configs,
        argv,
        "Lists the configs that come with mesh_lm. Train one: mesh-lm train NAME.",
        prog,
    )


def run(_: Configs) -> int:
    """Prints them, and returns 0."""
    about = {
        name: _first_line(path.read_text(encoding="utf-8")) for name, path in shipped().items()
    }
    width = max(map(len, about))
    for name, line in about.items():
        print(f"{name.ljust(width)}  {line}")
    return 0


def _first_line(source: str) -> str:
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
