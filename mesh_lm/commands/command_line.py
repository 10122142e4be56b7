"""The command line of a run: `--config=FILE.py` chooses it, `--section.field=value` (or --config.section.field=value) changes it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_type_hints

from mesh_lm.commands import other_names
from mesh_lm.commands.options import HELP, Given, Spelling, convert, hints_of, is_boolean, near, print_help, refuse, spelled, split
from mesh_lm.commands.options import command as command
from mesh_lm.config import TrainConfig
from mesh_lm.config.files import DEFAULT, is_config, load
from mesh_lm.errors import ConfigError, did_you_mean
from mesh_lm.model import SegmentConfig
from sharding_rules import PRESETS, Rules, preset

T = TypeVar("T")
_SEGMENT = "NAME:LAYERS[:KIND[:REMAT[:DTYPE]]]"
_OWN = "--config."
_SEVERAL = frozenset({"--data.blend", "--data.valid_blend", "--pipeline.layers"}) | other_names.SEVERAL
"""Options whose values may be words of their own."""
ALL = frozenset({"--help_all"})
"""The option that shows expert fields as well; --help=all is the same."""


def _rules(text: str) -> Rules:
    """Raises ValueError, which says what else the name may mean."""
    try:
        return preset(text)
    except ValueError:
        parts = text.lower().split("+")
        if not {*parts, text.lower()} & other_names.RULES.keys():
            raise
        guess = other_names.RULES.get(text.lower()) or "+".join(other_names.RULES.get(part, part) for part in parts)
        raise ValueError(f"no such rules preset{did_you_mean([guess])}") from None


SPELLINGS: Mapping[type, Spelling] = {
    Rules: Spelling(f"{{{','.join(PRESETS)}}}[+...]", _rules, lambda rules: rules.name),
    SegmentConfig: Spelling(_SEGMENT, SegmentConfig.parse, str),
}


def parse(argv: Sequence[str], default: str = DEFAULT, prog: str = "train.py") -> TrainConfig:
    """The run that `argv` (without the program's name) asks for.

    Values follow `=` or stand alone as the next word; a tuple is written 1024,0, and data.blend also as words of its own; `-` and `_` in a
    name are the same, and so are --config.section.field and --section.field. A word that does not start with `--` names the config file,
    as --config does.

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
    alone, argv = alone or {}, _joined(argv)
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
    problems = [f"--config is given {len(files)} times: {', '.join(files)}"] if len(files) > 1 else []
    asked = functools.partial(_as_asked, config, options, fields)
    changes: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, text in options:
        if name == "--config" and text:
            continue
        try:
            if name in extra:
                others[name.removeprefix("--")] = convert(spelled(name), alone.get(name) if text is None else text, extra[name], SPELLINGS)
            else:
                changes[_path(name, fields)] = _value(name, text, fields, extra, asked)
        except ValueError as error:
            problems.append(str(error))
    problems += [_stray(word, fields, extra, asked) for word in strays if files or word != file]
    refuse(problems)
    try:
        return _replace(config, changes, ""), others
    except ValueError as error:  # from a __post_init__ of the user's own config class
        raise ConfigError(f"{file or default}: {error}") from error


def _joined(argv: Sequence[str]) -> list[str]:
    """Returns the words, with those after --data.blend, or an option of its kind, as one word with commas between."""
    words: list[str] = []
    values: list[str] | None = None
    for word in argv:
        if values is not None and not word.startswith("-") and not (values and is_config(word)):
            values.append(word.strip(","))
            continue
        if values:
            words.append(",".join(values))
        words.append(word)
        values = [] if "--" + word.lstrip("-").replace("-", "_").removeprefix("config.") in _SEVERAL else None
    return [*words, ",".join(values)] if values else words


def _as_asked(config: TrainConfig, options: Given, fields: Mapping[str, Any]) -> TrainConfig:
    """Returns the config with every option that can be read, by the names of other trainers too, for the numbers in an answer."""
    changes: dict[str, Any] = {}
    for name, text in options:
        path = _path(name, fields)
        if path not in fields:
            path = other_names.same_field(path.rpartition(".")[2])
        if path in fields:
            with contextlib.suppress(ValueError):
                changes[path] = convert(name, text, fields[path], SPELLINGS)
    try:
        return _replace(config, changes, "")
    except ValueError:
        return config


def _is_report(word: str) -> bool:
    return word.endswith((".html", ".json", ".pdf"))


def _file(options: Given, strays: Sequence[str]) -> str:
    """The config file that is named first, by --config or by itself; empty where there is none."""
    named = [text for name, text in options if name == "--config" and text]
    return next(iter([*named, *(word for word in strays if "=" not in word)]), "")


def _path(name: str, fields: Mapping[str, Any]) -> str:
    """section.field of an option's name, which may begin with --config. or not."""
    return name.removeprefix(_OWN) if name.startswith(_OWN) else name.removeprefix("--")


def _value(name: str, text: str | None, fields: Mapping[str, Any], extra: Mapping[str, Any], asked: Callable[[], TrainConfig]) -> Any:
    """Returns `text` as the type of the field `name`. Raises ValueError with the line to show, with numbers of what `asked` returns."""
    if name == "--config":
        raise ValueError(f"--config: needs a file, as in --config={DEFAULT}")
    path, prefix = _path(name, fields), _OWN if name.startswith(_OWN) else "--"
    if path in fields:
        return convert(name, text, fields[path], SPELLINGS)
    if inside := [field for field in fields if field.startswith(f"{path}.")]:
        raise ValueError(f"{name}: a section, not a field; set its fields, as in {prefix}{inside[0]}")
    known = [*(prefix + field for field in fields), "--config", "--help", *map(spelled, extra)]
    leaf = path.rpartition(".")[2]
    meaning = other_names.meaning_of(leaf)
    if meaning and (meaning.field in fields or not meaning.field) and leaf not in {field.rpartition(".")[2] for field in fields}:
        raise ValueError(f"{name}: no such field{other_names.answer(meaning, text, asked(), prefix)}")
    raise ValueError(f"{name}: no such field{near(name, known)}")


def _stray(word: str, fields: Mapping[str, Any], extra: Mapping[str, Any], asked: Callable[[], TrainConfig]) -> str:
    """Returns the problem with a word that belongs to no option, and the option that may have been meant."""
    problem = f"{word}: belongs to no option"
    name, equals, value = word.partition("=")
    if not equals:
        return problem + did_you_mean([f"--config={word}"] if word.endswith(".py") else [])
    name = name.replace("-", "_").removeprefix("config.")
    if name in (*fields, "config") or f"--{name}" in extra:
        return problem + did_you_mean([f"--{name}={value}"])
    meaning = other_names.meaning_of(name)
    if meaning is None:
        return problem
    if field := other_names.same_field(name):
        return problem + did_you_mean([f"--{field}={value}"])
    return problem + other_names.answer(meaning, value, asked())


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


def _print_help(config: TrainConfig, file: str, prog: str, *, everything: bool) -> NoReturn:
    """Prints the fields with their values in `config`; with `everything` expert fields, types and all that is known of them, too.

    Ends in SystemExit(0).
    """
    description = (
        f"FILE is a config, or the name of one that `mesh-lm configs` lists; the values below are those of {file}. Lists are written "
        "1024,0. `mesh-lm plan FILE` shows memory, communication and time on GPUs that you do not have."
    )
    if everything:
        print_help(type(config), description, f"{prog} [FILE]", config, SPELLINGS, of_config=True)
    from mesh_lm.commands.run_help import print_fields

    description += " --help-all shows everything: more fields, and more about each."
    print_fields(config, f"{prog} [FILE] [--section.field=VALUE ...]", description, SPELLINGS)
    raise SystemExit(0)
