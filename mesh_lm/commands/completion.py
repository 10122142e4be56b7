"""What a shell completes after `mesh-lm`: the subcommands, their options, and the choices of those
that have few.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, get_type_hints

from mesh_lm.commands import checkpoint, configs, evaluate, generate, huggingface, pipeline, prepare
from mesh_lm.commands.command_line import SPELLINGS
from mesh_lm.commands.main import COMMANDS, PROG
from mesh_lm.commands.options import Group, completion, spelled
from mesh_lm.commands.plan_options import Plan
from mesh_lm.config.files import DEFAULT, load
from mesh_lm.launch.job import Options


def script_for(shell: str) -> str:
    """A script for bash, zsh, tcsh or fish. In the first: eval "$(mesh-lm
    --print-completion=bash)".
    """
    run = [("config", str, DEFAULT), *_fields(load(DEFAULT))]
    plan = [
        (field.name, get_type_hints(Plan)[field.name], field.default)
        for field in dataclasses.fields(Plan)
    ]
    classes: dict[str, type | Group] = {
        "train": _made("Train", [*run, *plan]),
        "plan": _made(
            "PlanRun",
            [*(field for field in run if field[0] != "output"), ("output", str, ""), *plan[1:]],
        ),
        "configs": configs.Configs,
        "prepare": prepare.Prepare,
        "generate": generate.Arguments,
        "evaluate": evaluate.Arguments,
        "import": huggingface.Import,
        "export": huggingface.Export,
        "checkpoint": {
            name: (cls, (cls.__doc__ or "").partition("\n")[0])
            for name, cls in checkpoint.COMMANDS.items()
        },
        "launch": Options,
        "pipeline": pipeline.Arguments,
        "bench": _made("Bench", []),
    }
    script = completion(
        shell, PROG, {name: (cls, COMMANDS[name].about) for name, cls in classes.items()}, SPELLINGS
    )
    own = {name for cls in (Plan, *classes.values()) for name in _options(cls)} - {
        name for name, *_ in run
    }
    return re.sub(
        r"(?<![\w.])--(\w+)(?![\w.])",
        lambda found: spelled(found[0]) if found[1] in own else found[0],
        script,
    )


def _options(cls: type | Group) -> Iterator[str]:
    """The options of a command, or of those of a group."""
    for each in [cls] if isinstance(cls, type) else [member for member, _ in cls.values()]:
        yield from (
            (field.name for field in dataclasses.fields(each))
            if isinstance(each, type)
            else _options(each)
        )


def _fields(config: Any) -> list[tuple[str, Any, Any]]:
    """(name, type, default) of each field, a section of the class that it has in this config."""
    hints = get_type_hints(type(config))
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return [
        (name, type(value) if dataclasses.is_dataclass(value) else hints[name], value)
        for name, value in values.items()
    ]


def _made(name: str, fields: list[tuple[str, Any, Any]]) -> type:
    return dataclasses.make_dataclass(
        name, [(field, hint, dataclasses.field(default=value)) for field, hint, value in fields]
    )
