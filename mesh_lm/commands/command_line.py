"""The command line of a run: `--config=FILE.py` chooses it, `--section.field=value` (or
--config.section.field=value) changes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, get_type_hints

from mesh_lm.commands import other_names
from mesh_lm.commands.meanings import Asked, answer
from mesh_lm.commands.options import (
    HELP,
    Given,
    Spelling,
    as_typed,
    convert,
    hints_of,
    is_boolean,
    near,
    print_help,
    refuse,
    spelled,
    spellings_of,
    split,
)
from mesh_lm.commands.options import command as command
from mesh_lm.config import TrainConfig
from mesh_lm.config.files import DEFAULT, is_config, load
from mesh_lm.errors import ConfigError, did_you_mean
from mesh_lm.model import DecoderConfig, SegmentConfig
from sharding_rules import PRESETS, Rules, preset

T = TypeVar("T")
_SEGMENT = "NAME:LAYERS[:KIND[:REMAT[:DTYPE]]]"
_OWN = "--config."
_SEVERAL = (
    frozenset({"--data.blend", "--data.valid_blend", "--pipeline.layers"}) | other_names.SEVERAL
)
"""Options whose values may be words of their own."""
_NUMBER = re.compile(r"-?\d[\d.,]*(?:e-?\d+)?")
"""A word that is a value, and neither an option nor a config."""
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
        guess = other_names.RULES.get(text.lower()) or "+".join(
            other_names.RULES.get(part, part) for part in parts
        )
        raise ValueError(f"no such rules preset{did_you_mean([guess])}") from None


SPELLINGS: Mapping[type, Spelling] = {
    Rules: Spelling(f"{{{','.join(PRESETS)}}}[+...]", _rules, lambda rules: rules.name),
    SegmentConfig: Spelling(_SEGMENT, SegmentConfig.parse, str),
}


def parse(argv: Sequence[str], default: str = DEFAULT, prog: str = "train.py") -> TrainConfig:
    """The run that `argv` (without the program's name) asks for.

    Values follow `=` or stand alone as the next word; a tuple is written 1024,0, and data.blend
    also as words of its own; `-` and `_` in a name are the same, and so are --config.section.field
    and --section.field. A word that does not start with `--` names the config file, as --config
    does.

    Raises:
        ConfigError: every mistake in `argv`, or the one that keeps the config file from loading.
        SystemExit: with status 0, after printing the help, where `argv` has --help, -h or
        --help-all.
    """
    return parse_with(None, argv, default, prog)[0]


def parse_with(
    beside: type[T] | None,
    argv: Sequence[str],
    default: str = DEFAULT,
    prog: str = "train.py",
    alone: Mapping[str, str] | None = None,
) -> tuple[TrainConfig, dict[str, Any]]:
    """As `parse`; and field -> value of the options that are fields of `beside`. They win over the
    config's of that name.

    alone: option -> the value that it stands for where it has none.
    """
    alone = alone or {}
    extra = hints_of(beside) if beside else {}
    optional = {name: is_boolean for name, hint in extra.items() if hint is bool} | dict.fromkeys(
        alone, _is_report
    )

    def words(fields: Mapping[str, Any]) -> tuple[Given, list[str]]:
        known = {*_options_of(fields), *extra, *HELP, *ALL, "--config"}
        booleans = {name for name in _options_of(fields) if fields[_path(name, fields)] is bool}
        return split(_joined(argv, known), optional=optional | dict.fromkeys(booleans, is_boolean))

    # Which words follow an unknown option depends on the config's fields, and which config it is on
    # those words: our decoder's fields do.
    file = _file(*words(dict(_hints(TrainConfig(DecoderConfig(), ""), ""))))
    config = load(file or default)
    fields = dict(_hints(config, ""))
    options, strays = words(fields)
    if (HELP | ALL) & {name for name, _ in options}:
        _print_help(
            config,
            file or default,
            prog,
            everything=any(name in ALL or text == "all" for name, text in options),
        )

    files = [text for name, text in options if name == "--config" and text]
    problems = (
        [f"--config is given {len(files)} times: {', '.join(files)}"] if len(files) > 1 else []
    )
    meant = [
        *options,
        *(
            (f"--{name.replace('-', '_')}", value)
            for name, equals, value in (word.partition("=") for word in strays)
            if equals
        ),
    ]
    asked = functools.cache(lambda: _as_asked(config, meant, fields))
    changes: dict[str, Any] = {}
    others: dict[str, Any] = {}
    typed = spellings_of(argv)
    for name, text in options:
        if name == "--config" and text:
            continue
        try:
            if name in extra:
                others[name.removeprefix("--")] = convert(
                    spelled(name), alone.get(name) if text is None else text, extra[name], SPELLINGS
                )
            else:
                changes[_path(name, fields)] = _value(name, text, fields, extra, asked)
        except ValueError as error:
            problems.append(as_typed(str(error), name, typed))
    problems += [_stray(word, fields, extra, asked) for word in strays if files or word != file]
    refuse(problems)
    try:
        return _replace(config, changes, ""), others
    except ValueError as error:  # from a __post_init__ of the user's own config class
        raise ConfigError(f"{file or default}: {error}") from error


def _options_of(fields: Mapping[str, Any]) -> list[str]:
    """Both spellings of each field's option."""
    return [f"{prefix}{name}" for name in fields for prefix in (_OWN, "--")]


def _joined(argv: Sequence[str], known: Collection[str]) -> list[str]:
    """Returns the words, with those after an option of several values as one word.

    Commas join those of --data.blend, or an option of its kind. All words after an option that is
    not `known` are its values, as far as the next option or config, so that none of them counts as
    a word of its own.
    """
    words: list[str] = []
    values: list[str] | None = None
    between, front = ",", list[str]()
    for word in argv:
        is_value = not word.startswith("-") or word == "-" or bool(_NUMBER.fullmatch(word))
        if values is not None and is_value:
            if between == " " and is_config(word) and (values or not word.endswith(".json")):
                front.append(word)
                continue
            if not (values and is_config(word)):
                values.append(word.strip(",") if between == "," else word)
                continue
        if values:
            words.append(f"{words.pop()}={between.join(values)}")
        words.append(word)
        values = None
        if is_value:
            continue
        name, equals, value = word.partition("=")
        name = "--" + name.lstrip("-").replace("-", "_")
        several = "--" + name.removeprefix(_OWN).removeprefix("--") in _SEVERAL
        if several and not equals:
            values, between = [], ","
        elif not several and name not in known:
            words[-1], values, between = word.partition("=")[0], [value] if value else [], " "
    if values:
        words.append(f"{words.pop()}={between.join(values)}")
    return [*front, *words]


def _as_asked(config: TrainConfig, options: Given, fields: Mapping[str, Any]) -> Asked:
    """Returns the config with every option that can be read, by the names of other trainers too,
    for the numbers in an answer.

    What needs numbers of the config itself, such as steps that are given as samples, is read last.
    """
    typed = {_path(name, fields).rpartition(".")[2]: text for name, text in options if text}
    asked = Asked(config, typed)
    for converted in (False, True):
        changes: dict[str, Any] = {}
        for name, text in options:
            path = _path(name, fields)
            with contextlib.suppress(ValueError, ZeroDivisionError):
                if path not in fields:
                    meaning = other_names.meaning_of(path.rpartition(".")[2])
                    if converted != bool(meaning and meaning.convert):
                        continue
                    path, text = other_names.in_run(path.rpartition(".")[2], text or "", asked)
                elif converted:
                    continue
                changes[path] = convert(name, text, fields[path], SPELLINGS)
        with contextlib.suppress(ValueError):
            asked = Asked(_replace(asked.config, changes, ""), typed)
    return asked


def _is_report(word: str) -> bool:
    return word.endswith((".html", ".json", ".pdf"))


def _file(options: Given, strays: Sequence[str]) -> str:
    """The config file that is named first, by --config or by itself; empty where there is none."""
    named = [text for name, text in options if name == "--config" and text]
    return next(
        iter(
            [*named, *(word for word in strays if "=" not in word and not _NUMBER.fullmatch(word))]
        ),
        "",
    )


def _path(name: str, fields: Mapping[str, Any]) -> str:
    """section.field of an option's name, which may begin with --config. or not."""
    return name.removeprefix(_OWN) if name.startswith(_OWN) else name.removeprefix("--")


def _value(
    name: str,
    text: str | None,
    fields: Mapping[str, Any],
    extra: Mapping[str, Any],
    asked: Callable[[], Asked],
) -> Any:
    """Returns `text` as the type of the field `name`. Raises ValueError with the line to show, with
    numbers of what `asked` returns.
    """
    if name == "--config":
        raise ValueError(f"--config: needs a file, as in --config={DEFAULT}")
    path, prefix = _path(name, fields), _OWN if name.startswith(_OWN) else "--"
    if path in fields:
        return convert(name, text, fields[path], SPELLINGS)
    leaf = path.rpartition(".")[2]
    meaning = other_names.meaning_of(leaf)
    if inside := [field for field in fields if field.startswith(f"{path}.")]:
        if meaning and (text or not meaning.field):
            raise ValueError(
                f"{name}: a section, not a field{answer(meaning, text, asked(), prefix)}"
            )
        raise ValueError(
            f"{name}: a section, not a field; set its fields, as in {prefix}{inside[0]}"
        )
    known = [*(prefix + field for field in fields), "--config", "--help", *map(spelled, extra)]
    of_that_name = [field for field in fields if field.rpartition(".")[2] == leaf]
    if meaning and (meaning.field in fields or not meaning.field) and not of_that_name:
        raise ValueError(f"{name}: no such field{answer(meaning, text, asked(), prefix)}")
    if len(of_that_name) == 1 and text and " " not in text:
        raise ValueError(
            f"{name}: no such field{did_you_mean([f'{prefix}{of_that_name[0]}={text}'])}"
        )
    raise ValueError(f"{name}: no such field{near(name, known)}")


def _stray(
    word: str, fields: Mapping[str, Any], extra: Mapping[str, Any], asked: Callable[[], Asked]
) -> str:
    """Returns the problem with a word that belongs to no option, and the option that may have been
    meant.
    """
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
    return problem + answer(meaning, value, asked())


def _hints(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """(section.field, its type) for every field that can be set, following what is there: a model's
    own class, not ModelConfig.
    """
    try:
        hints = get_type_hints(type(section))
    except NameError as error:
        raise ConfigError(
            f"{type(section).__name__}: {error}; the types of its fields must be imported at run "
            "time"
        ) from error
    for field in dataclasses.fields(section):
        name, value = f"{prefix}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Rules):
            yield from _hints(value, f"{name}.")
        elif field.init:
            yield name, hints[field.name]


def _replace(section: Any, values: Mapping[str, Any], prefix: str) -> Any:
    """`section` with the fields that `values` names, each dataclass rebuilt once, from the leaves
    up.
    """
    changes = {}
    for field in dataclasses.fields(section):
        name, value = f"{prefix}{field.name}", getattr(section, field.name)
        if name in values:
            changes[field.name] = values[name]
        elif any(changed.startswith(f"{name}.") for changed in values):
            changes[field.name] = _replace(value, values, f"{name}.")
    return dataclasses.replace(section, **changes) if changes else section


def _print_help(config: TrainConfig, file: str, prog: str, *, everything: bool) -> NoReturn:
    """Prints the fields with their values in `config`; with `everything` expert fields, types and
    all that is known of them, too.

    Ends in SystemExit(0).
    """
    description = (
        "FILE is a config, or the name of one that `mesh-lm configs` lists; the values below are "
        f"those of {file}. Lists are written 1024,0. `mesh-lm plan FILE` shows memory, "
        "communication and time on GPUs that you do not have."
    )
    if everything:
        print_help(type(config), description, f"{prog} [FILE]", config, SPELLINGS, of_config=True)
    from mesh_lm.commands.run_help import print_fields

    description += " --help-all shows everything: more fields, and more about each."
    print_fields(config, f"{prog} [FILE] [--section.field=VALUE ...]", description, SPELLINGS)
    raise SystemExit(0)
