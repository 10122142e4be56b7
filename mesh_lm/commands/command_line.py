"""The command line of a run: `--config=FILE.py` chooses it, `--section.field=value` (or --config.section.field=value) changes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_type_hints

from mesh_lm.commands import guesses
from mesh_lm.commands.options import HELP, Given, Spelling, convert, hints_of, is_boolean, near, print_help, refuse, split
from mesh_lm.commands.options import command as command
from mesh_lm.config import TrainConfig
from mesh_lm.config.files import DEFAULT, load
from mesh_lm.errors import ConfigError, did_you_mean
from mesh_lm.model import SegmentConfig
from sharding_rules import PRESETS, Rules, preset

T = TypeVar("T")
_SEGMENT = "NAME:LAYERS[:KIND[:REMAT[:DTYPE]]]"
_OWN = "--config."
ALL = frozenset({"--help_all"})
"""The option that shows expert fields as well; --help=all is the same."""


def _rules(text: str) -> Rules:
    """Raises ValueError, which says what else the name may mean."""
    try:
        return preset(text)
    except ValueError:
        parts = text.lower().split("+")
        if not {*parts, text.lower()} & guesses.RULES.keys():
            raise
        guess = guesses.RULES.get(text.lower()) or "+".join(guesses.RULES.get(part, part) for part in parts)
        raise ValueError(f"no such rules preset{did_you_mean([guess])}") from None


SPELLINGS: Mapping[type, Spelling] = {
    Rules: Spelling(f"{{{','.join(PRESETS)}}}[+...]", _rules, lambda rules: rules.name),
    SegmentConfig: Spelling(_SEGMENT, SegmentConfig.parse, str),
}


def parse(argv: Sequence[str], default: str = DEFAULT, prog: str = "train.py") -> TrainConfig:
    """The run that `argv` (without the program's name) asks for.

    Values follow `=` or stand alone as the next word; a tuple is written 1024,0; `-` and `_` in a name are the same, and so are
    --config.section.field and --section.field. A word that does not start with `--` names the config file, as --config does.

    Raises:
        ConfigError: every mistake in `argv`, or the one that keeps the config file from loading.
        SystemExit: with status 0, after printing the help, where `argv` has --help, -h or --help-all.
    """
    return parse_with(None, argv, default, prog)[0]


def parse_with(
    beside: type[T] | None, argv: Sequence[str], default: str = DEFAULT, prog: str = "train.py", alone: Mapping[str, str] | None = None
) -> tuple[TrainConfig, dict[str, Any]]:
    """As `parse`; and field -> value of the options that are fields of `beside`. They win over the config's of that name.

    alone: option -> the value that it stands for where it has none.
    """
    alone = alone or {}
    extra = hints_of(beside) if beside else {}
    optional = {name: is_boolean for name, hint in extra.items() if hint is bool} | dict.fromkeys(alone, _is_report)
    file = _file(*split(argv, optional=optional))
    config = load(file or default)
    fields = dict(_hints(config, ""))
    booleans = {f"{prefix}{name}" for name, hint in fields.items() for prefix in (_OWN, "--") if hint is bool}
    options, strays = split(argv, optional=optional | dict.fromkeys(booleans, is_boolean))
    if (HELP | ALL) & {name for name, _ in options}:
        _print_help(config, file or default, prog, everything=any(name in ALL or text == "all" for name, text in options))

    files = [text for name, text in options if name == "--config" and text]
    problems = [_stray(word, fields, extra) for word in strays if files or word != file]
    if len(files) > 1:
        problems.append(f"--config is given {len(files)} times: {', '.join(files)}")
    changes: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, text in options:
        if name == "--config" and text:
            continue
        try:
            if name in extra:
                others[name.removeprefix("--")] = convert(name, alone.get(name) if text is None else text, extra[name], SPELLINGS)
            else:
                changes[_path(name, fields)] = _value(name, text, fields, extra)
        except ValueError as error:
            problems.append(str(error))
    refuse(problems)
    try:
        return _replace(config, changes, ""), others
    except ValueError as error:  # from a __post_init__ of the user's own config class
        raise ConfigError(f"{file or default}: {error}") from error


def _is_report(word: str) -> bool:
    return word.endswith((".html", ".json", ".pdf"))


def _file(options: Given, strays: Sequence[str]) -> str:
    """The config file that is named first, by --config or by itself; empty where there is none."""
    named = [text for name, text in options if name == "--config" and text]
    return next(iter([*named, *(word for word in strays if "=" not in word)]), "")


def _path(name: str, fields: Mapping[str, Any]) -> str:
    """section.field of an option's name, which may begin with --config. or not."""
    return name.removeprefix(_OWN) if name.startswith(_OWN) else name.removeprefix("--")


def _value(name: str, text: str | None, fields: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """`text` as the type of the field `name`. Raises ValueError with the line to show."""
    if name == "--config":
        raise ValueError(f"--config: needs a file, as in --config={DEFAULT}")
    path, prefix = _path(name, fields), _OWN if name.startswith(_OWN) else "--"
    if path in fields:
        return convert(name, text, fields[path], SPELLINGS)
    if inside := [field for field in fields if field.startswith(f"{path}.")]:
        raise ValueError(f"{name}: a section, not a field; set its fields, as in {prefix}{inside[0]}")
    known = [*(prefix + field for field in fields), "--config", "--help", *extra]
    guess = guesses.FIELDS.get(path.rpartition(".")[2].lower(), "")
    if guess in fields and not any(field.rpartition(".")[2] == path.rpartition(".")[2] for field in fields):
        raise ValueError(f"{name}: no such field{did_you_mean([prefix + guess])}")
    raise ValueError(f"{name}: no such field{near(name, known)}")


def _stray(word: str, fields: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """The problem with a word that belongs to no option, and the option that may have been meant."""
    name, equals, _ = word.replace("-", "_").partition("=")
    name = name.removeprefix("config.")
    if word.endswith(".py") and not equals:
        meant = f"--config={word}"
    elif equals and (known := name if name in (*fields, "config") or f"--{name}" in extra else guesses.FIELDS.get(name.lower(), "")):
        meant = f"--{known}={word.partition('=')[2]}"
    else:
        meant = ""
    return f"{word}: belongs to no option{did_you_mean([meant] if meant else [])}"


def _hints(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(section.field, its type) for every field that can be set, following what is there: a model's own class, not ModelConfig."""
    try:
        hints = get_type_hints(type(section))
    except NameError as error:
        raise ConfigError(f"{type(section).__name__}: {error}; the types of its fields must be imported at run time") from error
    for field in dataclasses.fields(section):
        name, value = f"{prefix}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Rules):
            yield from _hints(value, f"{name}.")
        elif field.init:
            yield name, hints[field.name]


def _replace(section: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """`section` with the fields that `values` names, each dataclass rebuilt once, from the leaves up."""
    changes = {}
    for field in dataclasses.fields(section):
        name, value = f"{prefix}{field.name}", getattr(section, field.name)
        if name in values:
            changes[field.name] = values[name]
        elif any(changed.startswith(f"{name}.") for changed in values):
            changes[field.name] = _replace(value, values, f"{name}.")
    return dataclasses.replace(section, **changes) if changes else section


@dataclasses.dataclass(frozen=True)
class _CommandLine:
    config: TrainConfig


def _print_help(config: TrainConfig, file: str, prog: str, *, everything: bool) -> NoReturn:
    """Every field with its docstring and its value in `config`, expert fields only with `everything`. Ends in SystemExit(0)."""
    description = (
        f"--config=FILE.py chooses the run; the defaults below are those of {file}. --config.section.field=VALUE changes it, and so does "
        "--section.field=VALUE. Tuples are written 1024,0. --plan shows what would happen on other GPUs: mesh-lm plan --help."
    )
    if not everything:
        description += " --help-all shows expert fields too."
    print_help(_CommandLine, description, prog, _CommandLine(config), SPELLINGS, folded=not everything)
