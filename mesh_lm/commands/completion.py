"""The completion of `mesh-lm` in a shell: subcommands, their options, and options' choices."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

from mesh_lm.commands import (
    checkpoint,
    configs,
    convert,
    evaluate,
    explain,
    generate,
    huggingface,
    pipeline,
    prepare,
    study,
)
from mesh_lm.commands.command_line import SPELLINGS
from mesh_lm.commands.options import Group, completion_script, spelled
from mesh_lm.commands.plan_bytes import COMMAND, Bytes
from mesh_lm.commands.plan_options import Plan
from mesh_lm.config.files import DEFAULT, load
from mesh_lm.launch.job import Options

_SPEC = re.compile(r"(?<=^COMPLETION_SPEC = ).*", re.MULTILINE)
"""The commands and their options in a script, of any shell: a Python dict."""


class _Field(NamedTuple):
    """A field of a dataclass that is made for a command."""

    name: str
    type: Any
    default: Any


def shell_script(shell: str, prog: str, abouts: Mapping[str, str]) -> str:
    """Returns a script for bash, zsh or fish.

    In the first: eval "$(mesh-lm --print-completion=bash)".

    prog: the command. abouts: what each of its subcommands does.
    """
    run = [_Field("config", str, DEFAULT), *_config_fields(load(DEFAULT))]
    plan = _fields(Plan)
    # `plan` has the fields of a run, but --output and --plan name its report.
    plan_run = [field for field in run if field.name != "output"]
    plan_run += [_Field("output", str, ""), *plan[1:]]
    bytes_run = [field for field in run if field.name != "output"] + _fields(Bytes)
    checkpoint_group: Group = {}
    for name, cls in checkpoint.COMMANDS.items():
        checkpoint_group[name] = (cls, (cls.__doc__ or "").partition("\n")[0])
    convert_group: Group = {}
    for name, cls in convert.COMMANDS.items():
        convert_group[name] = (cls, (cls.__doc__ or "").partition("\n")[0])
    study_group: Group = {}
    for name, cls in study.COMMANDS.items():
        study_group[name] = (cls, (cls.__doc__ or "").partition("\n")[0])
    classes: dict[str, type | Group] = {
        "train": _dataclass("Train", [*run, *plan]),
        "plan": _dataclass("PlanRun", plan_run),
        "study": study_group,
        "configs": configs.Configs,
        "explain": _dataclass("ExplainRun", [*run, *_fields(explain.Explain)]),
        "prepare": prepare.Prepare,
        "generate": generate.Arguments,
        "evaluate": evaluate.Arguments,
        "import": huggingface.Import,
        "export": huggingface.Export,
        "convert": convert_group,
        "checkpoint": checkpoint_group,
        "launch": Options,
        "pipeline": pipeline.Arguments,
        "bench": _dataclass("Bench", []),
    }
    commands = {name: (cls, abouts[name]) for name, cls in classes.items()}
    about_bytes = "what one step sends, without a compiler"
    commands[COMMAND] = (_dataclass("BytesRun", bytes_run), about_bytes)
    script = completion_script(shell, prog, commands, SPELLINGS)
    script = _SPEC.sub(lambda spec: _with_plan_bytes(spec[0]), script)

    # tyro writes all options with underscores, which only those of a run have.
    hyphenated = {name for cls in (Plan, *classes.values()) for name in _option_names(cls)}
    hyphenated -= {field.name for field in run}

    def respell(match: re.Match[str]) -> str:
        return spelled(match[0]) if match[1] in hyphenated else match[0]

    return re.sub(r"(?<![\w.])--(\w+)(?![\w.])", respell, script)


def _with_plan_bytes(text: str) -> str:
    """Returns the commands of a script with `bytes` as a word after `plan`.

    tyro has no command that goes with and without a subcommand.
    """
    spec = ast.literal_eval(text)
    commands = spec["subcommands"]
    commands["plan"]["subcommands"][COMMAND] = commands.pop(COMMAND)
    return repr(spec)


def _option_names(cls: type | Group) -> Iterator[str]:
    """Yields the options of a command, or those of the commands in a group."""
    if isinstance(cls, dict):
        for member, _ in cls.values():
            yield from _option_names(member)
    else:
        for field in dataclasses.fields(cls):
            yield field.name


def _fields(cls: type) -> list[_Field]:
    types = get_type_hints(cls)
    return [
        _Field(field.name, types[field.name], field.default) for field in dataclasses.fields(cls)
    ]


def _config_fields(config: Any) -> list[_Field]:
    """Returns the fields of a config, each section with the class that it has in this config."""
    fields = []
    for field in _fields(type(config)):
        value = getattr(config, field.name)
        kind = type(value) if dataclasses.is_dataclass(value) else field.type
        fields.append(_Field(field.name, kind, value))
    return fields


def _dataclass(name: str, fields: Sequence[_Field]) -> type:
    return dataclasses.make_dataclass(
        name,
        [(field.name, field.type, dataclasses.field(default=field.default)) for field in fields],
    )
