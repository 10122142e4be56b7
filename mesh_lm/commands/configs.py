"""`mesh-lm configs`: the configs that come with mesh_lm, a line each."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Sequence

from mesh_lm.commands.options import command
from mesh_lm.config.files import shipped


@dataclasses.dataclass(frozen=True)
class Configs:
    """`mesh-lm configs` has no options."""


def parse(argv: Sequence[str], prog: str = "") -> Configs:
    """Raises ConfigError for any word: the command has no options."""
    return command(
        Configs,
        argv,
        "Lists the configs that come with mesh_lm. Train one: mesh-lm train NAME.",
        prog,
    )


def run(_: Configs) -> int:
    """Prints the configs, and returns 0."""
    configs = shipped()
    width = max(map(len, configs))
    for name, path in configs.items():
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        first_line = docstring.partition("\n")[0]
        print(f"{name.ljust(width)}  {first_line}")
    return 0
