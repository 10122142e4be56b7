"""The command line: `--config=FILE.py` chooses the run, `--config.section.field=value` changes it. The only file that knows tyro.

The other commands (`python -m mesh_lm.data.prepare` and its like) are flat: a dataclass each, read by `command`.

tyro (https://brentyi.github.io/tyro) turns text into the type of a field and prints the help. What a typo looks like is ours: every
problem at once, in plain lines that stay readable in the log of 128 hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro

from mesh_lm.config import TrainConfig
from mesh_lm.config.files import DEFAULT, load
from mesh_lm.errors import ConfigError, did_you_mean
from mesh_lm.model import SegmentConfig
from sharding_rules import PRESETS, Rules, preset

_SEGMENT = "NAME:LAYERS[:KIND[:REMAT[:DTYPE]]]"
T = TypeVar("T")


def parse(argv: list[str], default: str = DEFAULT) -> TrainConfig:
    """The run that `argv` (without the program's name) asks for.

    Values follow `=` or stand alone as the next word; a tuple is written 1024,0; `-` and `_` in a name are the same.

    Raises:
        ConfigError: every mistake in `argv`, or the one that keeps the config file from loading.
        SystemExit: with status 0, after printing the help, where `argv` has --help or -h.
    """
    options, strays = _options(argv)
    problems = [f"{word}: belongs to no option{f'; did you mean --config={word}?' if word.endswith('.py') else ''}" for word in strays]
    files = [value for name, value in options if name == "--config" and value]
    if len(files) > 1:
        problems.append(f"--config is given {len(files)} times: {', '.join(files)}")
    file = files[0] if files else default
    config = load(file)
    hints = dict(_hints(config, "--config"))
    if {"--help", "--h"} & {name for name, _ in options}:
        _print_help(config, file)

    values: dict[str, Any] = {}
    for name, text in options:
        if name == "--config" and text:
            continue
        try:
            values[name] = _value(name, text, hints)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError("\n  - ".join(["bad command line", *problems]))
    try:
        return _replace(config, values, "--config")
    except ValueError as error:  # from a __post_init__ of the user's own config class
        raise ConfigError(f"{file}: {error}") from error


def command(cls: type[T], argv: list[str], description: str) -> T:
    """The arguments of a command: a dataclass with fields of plain types, one option each, filled from `argv`.

    As in `parse`, --field=value and --field value are the same, and so are `-` and `_` in a name. A tuple field (tuple[T, ...]) takes one
    value an option, or several words after it (--input a b), and may be repeated. A bool field stands alone for true. The docstrings of
    the fields, and `description`, are the help.

    Raises:
        ConfigError: every mistake in `argv`, required fields that are missing among them.
        SystemExit: with status 0, after printing the help, where `argv` has --help or -h.
    """
    fields = {f"--{field.name}": field for field in dataclasses.fields(cls) if field.init}  # pyright: ignore[reportArgumentType]
    types = get_type_hints(cls)
    hints = {name: types[field.name] for name, field in fields.items()}
    elements = {name: get_args(hint)[0] for name, hint in hints.items() if get_origin(hint) is tuple}
    options, strays = _options(argv, many=elements)
    if {"--help", "--h"} & {name for name, _ in options}:
        _print_command_help(cls, description)

    values: dict[str, Any] = {}
    problems = [f"{word}: belongs to no option" for word in strays]
    for name, text in options:
        try:
            value = _value(name, "true" if text is None and hints.get(name) is bool else text, hints | elements)
            values[name] = (*values.get(name, ()), value) if name in elements else value
        except ValueError as error:
            problems.append(str(error))
    given = {name for name, _ in options}
    for name, field in fields.items():
        if name not in given and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            problems.append(f"{name}: missing; {_expected(elements.get(name, hints[name]), '')}")
    if problems:
        raise ConfigError("\n  - ".join(["bad command line", *problems]))
    try:
        return cls(**{name.removeprefix("--"): value for name, value in values.items()})
    except ConfigError:
        raise
    except ValueError as error:  # from __post_init__
        raise ConfigError(f"bad command line\n  - {error}") from error


def _options(argv: list[str], many: Collection[str] = ()) -> tuple[list[tuple[str, str | None]], list[str]]:
    """The words of `argv` as (name, value or None), and the words that belong to no option. One in `many` takes all words after it."""
    options: list[tuple[str, str | None]] = []
    strays = []
    waiting = False
    for word in argv:
        if waiting and not word.startswith("--"):
            options[-1] = (options[-1][0], word)
            waiting = False
        elif word.startswith("-"):
            name, equals, value = word.partition("=")
            options.append((f"--{name.lstrip('-').replace('-', '_')}", value if equals else None))
            waiting = not equals
        elif options and options[-1][0] in many:
            options.append((options[-1][0], word))
        else:
            strays.append(word)
            waiting = False
    return options, strays


def _hints(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(--config.section.field, its type) for every field that can be set, following what is there: a model's own class, not ModelConfig."""
    try:
        hints = get_type_hints(type(section))
    except NameError as error:
        raise ConfigError(f"{type(section).__name__}: {error}; the types of its fields must be imported at run time") from error
    for field in dataclasses.fields(section):
        name, value = f"{prefix}.{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Rules):
            yield from _hints(value, name)
        elif field.init:
            yield name, hints[field.name]


def _value(name: str, text: str | None, hints: Mapping[str, Any]) -> Any:
    """`text` as the type of the field `name`. Raises ValueError with the line to show."""
    if inside := [known for known in hints if known.startswith(f"{name}.")]:
        if name == "--config":
            raise ValueError(f"--config: needs a file, as in --config={DEFAULT}")
        raise ValueError(f"{name}: a section, not a field; set its fields, as in {inside[0]}")
    if name not in hints:
        known = dict.fromkeys([*hints, *(known.partition(".")[0] for known in hints)])  # the fields, and --config itself
        raise ValueError(f"{name}: no such {'field' if '--config' in known else 'option'}{_near_fields(name, known)}")
    hint = hints[name]
    if text is None:
        raise ValueError(f"{name}: needs a value; {_expected(hint, '')}")
    try:
        return preset(text) if hint is Rules else _read(hint, text)
    except SystemExit:
        raise ValueError(f"{name}={text}: {_expected(hint, text)}") from None
    except ValueError as error:
        raise ValueError(f"{name}={text}: {error}") from None


def _read(hint: Any, text: str) -> Any:
    """`text` as a value of type `hint`, by tyro, which raises SystemExit where it cannot."""
    many = any(get_origin(each) in (tuple, list) for each in (hint, *get_args(hint)))
    words = [word for word in text.split(",") if word] if many else [text]
    with contextlib.redirect_stderr(io.StringIO()):
        return tyro.cli(hint, args=["--", *words], registry=_registry())


def _expected(hint: Any, text: str) -> str:
    if hint is bool:
        return "expected true or false"
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        return f"expected one of {', '.join(choices)}{did_you_mean(difflib.get_close_matches(text, choices, n=1))}"
    if hint == tuple[SegmentConfig, ...]:
        return f"expected {_SEGMENT}, with commas between several"
    return f"expected {inspect.formatannotation(hint)}"


def _near_fields(name: str, known: Iterable[str]) -> str:
    """The nearest name; failing that, fields of the right name in another section, of nearly that name in any, or all of its section."""

    def last(name: str) -> str:
        return name.lstrip("-").rpartition(".")[2]

    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.9) or [other for other in known if last(other) == last(name)]
    if not near and (leaf := difflib.get_close_matches(last(name), map(last, known), n=1, cutoff=0.75)):
        near = [other for other in known if last(other) == leaf[0]]
    section = name.rpartition(".")[0]
    beside = [last(other) for other in known if section and other.rpartition(".")[0] == section]
    return did_you_mean(near) or (f"; {section} has {', '.join(beside)}" if beside else "; see --help")


def _replace(section: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """`section` with the fields that `values` names, each dataclass rebuilt once, from the leaves up."""
    changes = {}
    for field in dataclasses.fields(section):
        name, value = f"{prefix}.{field.name}", getattr(section, field.name)
        if name in values:
            changes[field.name] = values[name]
        elif any(changed.startswith(f"{name}.") for changed in values):
            changes[field.name] = _replace(value, values, name)
    return dataclasses.replace(section, **changes) if changes else section


@dataclasses.dataclass(frozen=True)
class _CommandLine:
    config: TrainConfig


def _print_help(config: TrainConfig, file: str) -> None:
    """Every field with its docstring and its value in `config`. Ends in SystemExit(0), as tyro's --help does."""
    tyro.cli(
        _CommandLine,
        args=["--help"],
        default=_CommandLine(config),
        prog="train.py",
        description=f"--config=FILE.py chooses the run; the defaults below are those of {file}. Tuples are written 1024,0. "
        "--plan shows what the run would do on GPUs that are not here (--plan --help).",
        use_underscores=True,
        # A flag pair such as --resume / --no-resume would be a second spelling, and subcommands a second language.
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        registry=_registry(),
    )


def _print_command_help(cls: type, description: str) -> None:
    """Every field of the dataclass with its docstring and default. Ends in SystemExit(0)."""
    spec = getattr(sys.modules[cls.__module__], "__spec__", None)
    tyro.cli(
        cls,
        args=["--help"],
        prog=f"python -m {spec.name.removesuffix('.__main__')}" if spec else None,
        description=description,
        use_underscores=True,
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        registry=_registry(),
    )


def _registry() -> tyro.constructors.ConstructorRegistry:
    """How tyro reads and shows the types that it does not know, or spells in Python."""
    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def _(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec | None:
        if info.type is Rules:
            return _one_word(f"{{{','.join(PRESETS)}}}[+...]", Rules, preset, lambda rules: rules.name)
        if info.type is bool:
            return _one_word("{true,false}", bool, _boolean, lambda value: str(value).lower())
        if info.type is SegmentConfig:
            return _one_word(_SEGMENT, SegmentConfig, SegmentConfig.parse, str)
        return None

    return registry


def _one_word(metavar: str, type_: type, read: Any, show: Any) -> tyro.constructors.PrimitiveConstructorSpec:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, type_),
        str_from_instance=lambda value: [show(value)],
    )


def _boolean(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise ValueError(word)
    return word.lower() == "true"
