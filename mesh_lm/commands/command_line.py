"""The command line of a run: `--config=FILE.py` chooses it, `--section.field=value` (or
--config.section.field=value) changes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, get_type_hints

from mesh_lm.commands import other_names
from mesh_lm.commands.meanings import Context, answer
from mesh_lm.commands.options import (
    HELP,
    Option,
    Spelling,
    as_typed,
    convert,
    is_boolean,
    names_as_typed,
    option_types,
    print_help,
    refuse,
    spelled,
    split,
    suggestion,
)
from mesh_lm.commands.options import command as command
from mesh_lm.config import TrainConfig
from mesh_lm.config.files import DEFAULT, is_config, load_apart
from mesh_lm.config.layout import with_layout
from mesh_lm.config.moved import todays
from mesh_lm.config.typed import TypedRun
from mesh_lm.errors import ConfigError, did_you_mean
from mesh_lm.model import DecoderConfig, SegmentConfig
from mesh_lm.optim import RULES, Rule, make_rule, rule_name
from sharding_rules import PRESETS, Rules, preset

T = TypeVar("T")
_SEGMENT = "NAME:LAYERS[:KIND[:REMAT[:DTYPE]]]"
_CONFIG_PREFIX = "--config."
_RULE = "optimizer.rule"
_LAYOUTS = ("--mesh", "--config.mesh")
_LIST_OPTIONS = other_names.LIST_OPTIONS | {
    "--data.blend",
    "--data.valid_blend",
    "--pipeline.layers",
}
"""Options whose values may be words of their own."""
_NUMBER = re.compile(r"-?\d[\d.,]*(?:e-?\d+)?")
"""A word that is a value, and neither an option nor a config."""
HELP_ALL = frozenset({"--help_all"})
"""The option that shows expert fields as well; --help=all is the same."""


def _read_rules(text: str) -> Rules:
    """Raises ValueError, which says what else the name may mean."""
    try:
        return preset(text)
    except ValueError:
        name = text.lower()
        parts = name.split("+")
        if not {*parts, name} & other_names.RULES.keys():
            raise
        guess = other_names.RULES.get(name)
        if guess is None:
            guess = "+".join(other_names.RULES.get(part, part) for part in parts)
        raise ValueError(f"there is no such rules preset{did_you_mean([guess])}") from None


SPELLINGS: Mapping[type, Spelling] = {
    Rule: Spelling(f"{{{','.join(RULES)},MODULE:CLASS}}", make_rule, rule_name, has_fields=True),
    Rules: Spelling(f"{{{','.join(PRESETS)}}}[+...]", _read_rules, lambda rules: rules.name),
    SegmentConfig: Spelling(_SEGMENT, SegmentConfig.parse, str),
}


def parse(argv: Sequence[str], default: str = DEFAULT, prog: str = "train.py") -> TrainConfig:
    """Returns the run that `argv` (without the program's name) describes.

    Values follow `=` or stand alone as the next word; a tuple is written 1024,0, and data.blend
    also as words of its own; `-` and `_` in a name are the same, and so are --config.section.field
    and --section.field. A word that does not start with `--` names the config file, as --config
    does.

    Raises:
      ConfigError: every mistake in `argv`, or the one that keeps the config file from loading.
      SystemExit: with status 0, after printing the help, if `argv` has --help, -h or --help-all.
    """
    return parse_with(None, argv, default, prog)[0]


def parse_with(
    beside: type[T] | None,
    argv: Sequence[str],
    default: str = DEFAULT,
    prog: str = "train.py",
    alone: Mapping[str, str] | None = None,
) -> tuple[TrainConfig, dict[str, Any]]:
    """Returns the run of `parse`, and field -> value of the options that are fields of `beside`.

    Arguments are those of `parse_words`.
    """
    parsed = parse_words(beside, argv, default, prog, alone)
    return parsed.config, parsed.values


class Parsed(NamedTuple):
    """A command line of a run."""

    config: TrainConfig
    values: dict[str, Any]
    """field -> value of the options that are not the run's."""
    typed: TypedRun


def parse_words(
    beside: type[T] | None,
    argv: Sequence[str],
    default: str = DEFAULT,
    prog: str = "train.py",
    alone: Mapping[str, str] | None = None,
) -> Parsed:
    """Returns the run of `parse`, the other options, and the words of the run.

    Args:
      beside: a dataclass whose fields are options as well. They win over the config's fields of the
        same name.
      alone: option -> the value that it stands for if it has none.
    """
    extra = option_types(beside) if beside else {}
    alone = alone or {}
    # Which words follow an unknown option depends on the config's fields, and which config it is on
    # those words: our decoder's fields do.
    decoder = TrainConfig(DecoderConfig(), "")
    file = _config_file(*_split_words(argv, field_types(decoder), extra, alone))
    config, layout_of_config = load_apart(file or default)
    options, strays = _split_words(argv, field_types(config), extra, alone)
    # First of all, because the fields below it are those of the rule.
    config = _with_rule(config, options)
    layouts = [option.text or "" for option in options if _names_layout(option)]
    layouts = layouts or list(filter(None, [layout_of_config]))
    options = [option for option in options if not _names_layout(option)]
    known_options = _KnownOptions(field_types(config), extra)
    if (HELP | HELP_ALL) & {option.name for option in options}:
        everything = any(name in HELP_ALL or text == "all" for name, text in options)
        _print_help(config, file or default, prog, everything=everything)

    @functools.cache  # only a mistake needs it
    def context() -> Context:
        return _context(config, [*options, *_stray_options(strays)], known_options.fields)

    problems: list[str] = []
    files = [text for name, text in options if name == "--config" and text]
    if len(files) > 1:
        problems.append(f"--config is given {len(files)} times: {', '.join(files)}")
    changes: dict[str, Any] = {}
    extra_values: dict[str, Any] = {}
    typed_names = names_as_typed(argv)
    for name, text in options:
        if name == "--config" and text:
            continue
        try:
            if name in extra:
                if text is None:
                    text = alone.get(name)
                value = convert(spelled(name), text, extra[name], SPELLINGS)
                extra_values[name.removeprefix("--")] = value
            else:
                changes[_path(name)] = _field_value(name, text, known_options, context)
        except ValueError as error:
            problems.append(as_typed(str(error), name, typed_names))
    for word in strays:
        if files or word != file:
            problems.append(_stray_problem(word, known_options, context))
    refuse(problems)
    try:
        config = with_values(config, changes)
        # A search replaces the layout that a config names, which may be stale.
        for layout in layouts if not extra_values.get("best") else ():
            # What is typed beside a layout changes a part of it.
            config = with_values(with_layout(config, layout), changes)
    except ValueError as error:  # from a __post_init__ of the user's own config class
        raise ConfigError(f"{file or default}: {error}") from error
    typed = TypedRun(
        config=(f"--config={file}",) if files else tuple(strays),
        options=_typed_fields(options, extra),
        has_layout=bool(layout_of_config),
    )
    return Parsed(config, extra_values, typed)


def _typed_fields(options: Sequence[Option], extra: Collection[str]) -> dict[str, str]:
    """Returns section.field -> its word, of the options that set a field of the run."""
    words = {}
    for name, text in options:
        if name != "--config" and name not in extra:
            words[_path(name)] = name if text is None else f"{name}={text}"
    return words


def _names_layout(option: Option) -> bool:
    """Whether an option is the file of a layout: --mesh=plan.json."""
    return option.name in _LAYOUTS and (option.text or "").endswith(".json")


@dataclasses.dataclass(frozen=True)
class _KnownOptions:
    """The options that a command line may have."""

    fields: Mapping[str, Any]
    """section.field of the config -> its type."""
    extra: Mapping[str, Any]
    """--option -> its type, of those that are no fields of the config."""


def _split_words(
    argv: Sequence[str],
    fields: Mapping[str, Any],
    extra: Mapping[str, Any],
    alone: Mapping[str, str],
) -> tuple[list[Option], list[str]]:
    """Returns the options in `argv`, and the words that belong to no option."""
    option_names = {*extra, *HELP, *HELP_ALL, *_LAYOUTS, "--config"}
    optional: dict[str, Callable[[str], bool]] = {}
    for name, hint in extra.items():
        if hint is bool:
            optional[name] = is_boolean
    for name in alone:
        optional[name] = _is_report
    for path, hint in fields.items():
        names = (f"{_CONFIG_PREFIX}{path}", f"--{path}")
        option_names.update(names)
        if hint is bool:
            optional |= dict.fromkeys(names, is_boolean)
    return split(_join_values(argv, option_names), optional=optional)


@dataclasses.dataclass
class _ValueList:
    """An option, and the words after it that are its values."""

    option: str
    values: list[str]
    separator: str
    """A comma; a space for an option that we do not know."""

    def word(self) -> str:
        """Returns the option and its values as one word."""
        if not self.values:
            return self.option
        return f"{self.option}={self.separator.join(self.values)}"


def _join_values(argv: Sequence[str], option_names: Collection[str]) -> list[str]:
    """Returns the words, with those after an option of several values as one word.

    Commas join those of --data.blend, or an option of its kind. All words after an option that is
    not in `option_names` are its values, as far as the next option or config, so that none of them
    counts as a word of its own.
    """
    words: list[str] = []
    configs: list[str] = []
    current: _ValueList | None = None
    for word in argv:
        is_value = not word.startswith("-") or word == "-" or bool(_NUMBER.fullmatch(word))
        if current is not None:
            if is_value:
                # A config among the values of an unknown option is the run's, unless it is a .json
                # right after the option.
                is_file = is_config(word) and (current.values or not word.endswith(".json"))
                if current.separator == " " and is_file:
                    configs.append(word)
                    continue
                if not current.values or not is_config(word):
                    current.values.append(word.strip(",") if current.separator == "," else word)
                    continue
            words.append(current.word())
            current = None
        if is_value:
            words.append(word)
            continue
        option, equals, value = word.partition("=")
        name = f"--{option.lstrip('-').replace('-', '_')}"
        if f"--{_path(name)}" in _LIST_OPTIONS:
            if equals:
                words.append(word)
            else:
                current = _ValueList(word, [], ",")
        elif name in option_names:
            words.append(word)
        else:
            current = _ValueList(option, [value] if value else [], " ")
    if current is not None:
        words.append(current.word())
    return [*configs, *words]


def _context(config: TrainConfig, options: Sequence[Option], fields: Mapping[str, Any]) -> Context:
    """Returns the config with every option that can be read, for the numbers in an answer.

    Options may have the names of other trainers, too. Those whose values need numbers of the config
    itself, such as steps that are given as samples, are read last.
    """
    typed = {_path(name).rpartition(".")[2]: text for name, text in options if text}
    context = Context(config, typed)
    for needs_config in (False, True):
        changes: dict[str, Any] = {}
        for name, text in options:
            path = _path(name)
            is_field = path in fields
            meaning = None if is_field else other_names.look_up(path)
            if needs_config != bool(meaning and meaning.convert):
                continue
            with contextlib.suppress(ValueError, ZeroDivisionError):
                if not is_field:
                    path, text = other_names.field_and_value(path, text or "", context)
                if path not in fields:  # a model of the user's own may lack it
                    continue
                changes[path] = convert(name, text, fields[path], SPELLINGS)
        with contextlib.suppress(ValueError):
            context = Context(with_values(context.config, changes), typed)
    return context


def _stray_options(strays: Sequence[str]) -> list[Option]:
    """Returns the words of the form name=value as the options that were probably meant."""
    options = []
    for word in strays:
        name, equals, value = word.partition("=")
        if equals:
            options.append(Option(f"--{name.replace('-', '_')}", value))
    return options


def _is_report(word: str) -> bool:
    return word.endswith((".html", ".json", ".pdf"))


def _with_rule(config: TrainConfig, options: Sequence[Option]) -> TrainConfig:
    """Returns the config with the optimizer's rule that the options choose, with its default
    hyperparameters. A rule that cannot be made is reported later, with the other mistakes.
    """
    for name, text in options:
        if _path(name) == _RULE and text:
            with contextlib.suppress(ValueError):
                config = with_values(config, {_RULE: make_rule(text)})
    return config


def _config_file(options: Sequence[Option], strays: Sequence[str]) -> str:
    """Returns the config file that is named first, by --config or by itself; empty: none is."""
    for name, text in options:
        if name == "--config" and text:
            return text
    for word in strays:
        if "=" not in word and not _NUMBER.fullmatch(word):
            return word
    return ""


def _path(name: str) -> str:
    """Returns section.field of an option's name, which may begin with --config. or not."""
    if name.startswith(_CONFIG_PREFIX):
        return name.removeprefix(_CONFIG_PREFIX)
    return name.removeprefix("--")


def _field_value(
    name: str, text: str | None, known_options: _KnownOptions, context: Callable[[], Context]
) -> Any:
    """Returns `text` as the type of the field that an option names.

    Raises ValueError with the line to show.
    """
    if name == "--config":
        raise ValueError(f"--config: needs a file, as in --config={DEFAULT}")
    path = _path(name)
    if path in known_options.fields:
        return convert(name, text, known_options.fields[path], SPELLINGS)

    prefix = _CONFIG_PREFIX if name.startswith(_CONFIG_PREFIX) else "--"
    leaf = path.rpartition(".")[2]
    meaning = other_names.look_up(path)
    section = [field for field in known_options.fields if field.startswith(f"{path}.")]
    if section:
        if meaning and (text or not meaning.field):
            hint = answer(meaning, text, context(), prefix)
        else:
            hint = f"; set its fields, as in {prefix}{section[0]}"
        raise ValueError(f"{name}: this is a section, not a field{hint}")

    moved = todays(path, text)
    if moved and moved[0] in known_options.fields:
        field, value = moved
        hint = "; its value is now the default, leave it out"
        if value is not None:
            hint = did_you_mean([f"{prefix}{field}={value}"])
        raise ValueError(f"{name}: this field has another name now{hint}")
    if path.startswith(f"{_RULE}.") or (moved and moved[0].startswith(f"{_RULE}.")):
        rule = context().config.optimizer.rule
        fields = (
            [f.name for f in dataclasses.fields(rule)] if dataclasses.is_dataclass(rule) else []
        )
        raise ValueError(
            f"{name}: not a hyperparameter of {_RULE}={rule_name(rule)}, which has "
            f"{', '.join(fields) or 'none'}"
        )

    same_leaf = [field for field in known_options.fields if field.rpartition(".")[2] == leaf]
    if meaning and (meaning.field in known_options.fields or not meaning.field) and not same_leaf:
        hint = answer(meaning, text, context(), prefix)
    elif len(same_leaf) == 1 and text and " " not in text:
        hint = did_you_mean([f"{prefix}{same_leaf[0]}={text}"])
    else:
        names = [f"{prefix}{field}" for field in known_options.fields]
        names += ["--config", "--help", *map(spelled, known_options.extra)]
        hint = suggestion(name, names)
    raise ValueError(f"{name}: the config has no such field{hint}")


def _stray_problem(word: str, known_options: _KnownOptions, context: Callable[[], Context]) -> str:
    """Returns the problem with a word that belongs to no option, and what may have been meant."""
    problem = f"{word}: belongs to no option"
    name, equals, value = word.partition("=")
    if not equals:
        return problem + did_you_mean([f"--config={word}"] if word.endswith(".py") else [])
    name = name.replace("-", "_").removeprefix("config.")
    if name in (*known_options.fields, "config") or f"--{name}" in known_options.extra:
        return problem + did_you_mean([f"--{name}={value}"])
    meaning = other_names.look_up(name)
    if meaning is None:
        return problem
    return problem + answer(meaning, value, context())


def field_types(config: Any) -> dict[str, Any]:
    """Returns section.field -> its type, for every field of a config that can be set."""
    return dict(_iter_field_types(config, ""))


def _iter_field_types(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    # The types of the value's class, such as a model's own, not of the declared one, ModelConfig.
    try:
        types = get_type_hints(type(section))
    except NameError as error:
        raise ConfigError(
            f"{type(section).__name__}: {error}; the types of its fields must be imported at run "
            "time"
        ) from error
    for field in dataclasses.fields(section):
        path = f"{prefix}{field.name}"
        value = getattr(section, field.name)
        spelling = SPELLINGS.get(types[field.name])
        is_section = dataclasses.is_dataclass(value) and (not spelling or spelling.has_fields)
        if field.init and (not is_section or spelling):
            yield path, types[field.name]
        if is_section:
            yield from _iter_field_types(value, f"{path}.")


def with_values(section: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Returns `section` with the fields that `values` names.

    Each dataclass is rebuilt once, from the leaves up.
    """
    changes = {}
    for field in dataclasses.fields(section):
        path = f"{prefix}{field.name}"
        value = values.get(path, getattr(section, field.name))
        if any(changed.startswith(f"{path}.") for changed in values):
            value = with_values(value, values, f"{path}.")
        if value is not getattr(section, field.name):
            changes[field.name] = value
    return dataclasses.replace(section, **changes) if changes else section


def _print_help(config: TrainConfig, file: str, prog: str, *, everything: bool) -> NoReturn:
    """Prints the fields with their values in `config`. Raises SystemExit(0).

    everything: print expert fields, types and the complete docstrings, too.
    """
    description = (
        "FILE is a config, or the name of one that `mesh-lm configs` lists; the values below are "
        f"those of {file}. Lists are written 1024,0. `mesh-lm plan FILE` shows memory, "
        "communication and time on GPUs that you do not have."
    )
    if everything:
        print_help(type(config), description, f"{prog} [FILE]", config, SPELLINGS, is_config=True)
    # Imported here: nothing but the help needs rich.
    from mesh_lm.commands.run_help import print_fields

    description += " --help-all shows everything: more fields, and more about each."
    print_fields(config, f"{prog} [FILE] [--section.field=VALUE ...]", description, SPELLINGS)
    raise SystemExit(0)
