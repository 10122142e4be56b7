"""One dialect for all commands: --field=value, or --field value. The only file that knows tyro; it
needs no JAX.

A command is a dataclass: each field is an option, its docstring the help. tyro
(https://brentyi.github.io/tyro) turns text into the type of a field, prints the help and writes the
completion of shells. What a mistake looks like is decided here: every problem at once, in plain
lines that stay readable in the log of 128 hosts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from mesh_lm.commands.field_docs import field_docs, first_sentence
from mesh_lm.errors import ConfigError, did_you_mean

T = TypeVar("T")
HELP = frozenset({"--help", "--h"})
_BOOLEANS = ("true", "false")
_METAVARS = {str: "STR", int: "INT", float: "FLOAT"}


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How a type that tyro does not know is written on a command line, in one word."""

    form: str
    """The form of the word, for help and errors."""
    read: Callable[[str], Any]
    """Word -> value. Raises ValueError."""
    show: Callable[[Any], str]
    has_fields: bool = False
    """Whether the fields of the value are options, too."""


Spellings = Mapping[type, Spelling]


class Option(NamedTuple):
    """An option on a command line."""

    name: str
    """--name, with underscores."""
    text: str | None
    """None for an option that stands alone."""


class ForeignOption(NamedTuple):
    """An option of another program, and what it is in the command."""

    field: str
    """The field of the command that is meant; empty: none."""
    hint: str
    """The end of the error."""


ForeignOptions = Callable[[str, "str | None", Mapping[str, str]], "ForeignOption | None"]
"""(name, value, all values by name) -> an option of another program; None: unknown."""


def subcommand(argv: Sequence[str], prog: str, names: Collection[str], description: str) -> str:
    """Returns the first word of a command line, which is one of these names.

    Args:
      prog: what the user typed to get here.
      description: the help of all of them.

    Raises:
      ConfigError: the first word is none of them, or missing.
      SystemExit: with status 0, after printing the help, if the first word asks for it.
    """
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(description)
        raise SystemExit(0)
    if name not in names:
        similar = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(
            f"{prog} needs one of its commands: {', '.join(names)}, not {name or 'nothing'}"
            f"{did_you_mean(similar)}"
        )
    return name


def command(
    cls: type[T],
    argv: Sequence[str],
    description: str,
    prog: str = "",
    foreign_options: ForeignOptions | None = None,
) -> T:
    """Returns the arguments of a command: a dataclass of plain types, filled from `argv`.

    A tuple field (tuple[T, ...]) takes one value an option, or several words after it (--input a
    b), and may be repeated. A bool field stands alone for true. Words that follow no option fill
    the fields that `cls.POSITIONAL` names, in order; a tuple takes all that are left.

    Args:
      cls: the dataclass. The docstrings of its fields, and `description`, are the help.
      prog: what the user typed to get here.
      foreign_options: knows the options of another program, to which all words after them belong.

    Raises:
      ConfigError: every mistake in `argv`, required fields that are missing among them.
      SystemExit: with status 0, after printing the help, if `argv` has --help or -h.
    """
    types = option_types(cls)
    element_types = {
        name: get_args(hint)[0] for name, hint in types.items() if get_origin(hint) is tuple
    }
    typed_names = names_as_typed(argv)
    foreign = set()
    if foreign_options:
        for name in typed_names:
            if name not in types and foreign_options(name.removeprefix("--"), None, {}):
                foreign.add(name)
    booleans = {name: is_boolean for name, hint in types.items() if hint is bool}
    options, strays = split(argv, {*element_types, *foreign}, booleans)
    if HELP & {option.name for option in options}:
        print_help(cls, description, prog)
    options, strays = _fill_positionals(cls, options, strays, element_types)

    problems: list[str] = []
    supplied = {option.name for option in options}
    if foreign_options:
        texts = _joined_texts(options)
        for name in dict.fromkeys(option.name for option in options if option.name in foreign):
            key = name.removeprefix("--")
            foreign_option = foreign_options(key, texts[key], texts)
            if foreign_option:
                supplied.add(f"--{foreign_option.field}")
                problem = _no_such_option(name, foreign_option.hint)
                problems.append(as_typed(problem, name, typed_names))

    values: dict[str, Any] = {}
    for name, text in options:
        if name in foreign:
            continue
        try:
            value = _convert_option(name, text, types | element_types)
        except ValueError as error:
            problems.append(as_typed(str(error), name, typed_names))
            continue
        if name in element_types:
            value = (*values.get(name, ()), value)
        values[name] = value
    problems += [_stray_problem(word, types) for word in strays]

    docs = field_docs(cls)
    for name in _required(cls):
        if name not in supplied:
            meaning = first_sentence(docs.get(name.removeprefix("--"), ""))
            if not meaning:
                meaning = expected(element_types.get(name, types[name]), "")
            problems.append(f"{spelled(name)}: missing; {meaning}")
    refuse(problems)
    try:
        return cls(**{name.removeprefix("--"): value for name, value in values.items()})
    except ConfigError:
        raise
    except ValueError as error:  # from __post_init__
        raise ConfigError(f"bad command line\n  - {error}") from error


def _fill_positionals(
    cls: type, options: list[Option], strays: list[str], element_types: Collection[str]
) -> tuple[list[Option], list[str]]:
    """Gives the words that belong to no option to the positional options, in order.

    Returns the options and the words left over.
    """
    supplied = {option.name for option in options}
    for name in positional(cls):
        if name in element_types:
            words = strays
        elif name not in supplied:
            words = strays[:1]
        else:
            continue
        options = options + [Option(name, word) for word in words]
        strays = strays[len(words) :]
    return options, strays


def _joined_texts(options: Sequence[Option]) -> dict[str, str]:
    """Returns the name of each option, without dashes -> its texts, joined by spaces."""
    texts: dict[str, str] = {}
    for name, text in options:
        key = name.removeprefix("--")
        texts[key] = f"{texts[key]} {text}" if key in texts else text or ""
    return texts


def _convert_option(name: str, text: str | None, types: Mapping[str, Any]) -> Any:
    if name not in types:
        similar = suggestion(spelled(name), map(spelled, types))
        raise ValueError(_no_such_option(spelled(name), similar))
    return convert(spelled(name), text, _optional_type(types[name]) or types[name], {})


def _no_such_option(name: str, hint: str) -> str:
    return f"{name}: there is no such option{hint}"


def _stray_problem(word: str, option_names: Collection[str]) -> str:
    """Returns the problem with a word that belongs to no option."""
    name, equals, value = word.partition("=")
    name = f"--{name.replace('-', '_')}"
    guesses = [f"{spelled(name)}={value}"] if equals and name in option_names else []
    return f"{word}: belongs to no option{did_you_mean(guesses)}"


def _required(cls: Any) -> list[str]:
    """Returns the options without a default."""
    names = []
    for field in dataclasses.fields(cls):
        has_default = (
            field.default is not dataclasses.MISSING
            or field.default_factory is not dataclasses.MISSING
        )
        if field.init and not has_default:
            names.append(f"--{field.name}")
    return names


def option_types(cls: type) -> dict[str, Any]:
    """Returns --field -> its type, for every field of a dataclass that can be set."""
    types = get_type_hints(cls)
    return {f"--{field.name}": types[field.name] for field in dataclasses.fields(cls) if field.init}


def spelled(name: str) -> str:
    """Returns an option's name as help and errors show it.

    Fields of a config have underscores instead, as in Python.
    """
    return name.replace("_", "-")


def positional(cls: type) -> tuple[str, ...]:
    """Returns the options whose values may stand without their names."""
    return tuple(f"--{name}" for name in getattr(cls, "POSITIONAL", ()))


def refuse(problems: Sequence[str]) -> None:
    """Raises ConfigError that lists the problems, if there are any."""
    if problems:
        raise ConfigError("\n  - ".join(["bad command line", *problems]))


def names_as_typed(argv: Sequence[str]) -> dict[str, str]:
    """Returns each option's name in our spelling -> as it was typed."""
    typed = [word.partition("=")[0] for word in argv if word.startswith("-")]
    return {_option_name(word): word for word in typed}


def as_typed(problem: str, name: str, typed_names: Mapping[str, str]) -> str:
    """Returns a problem that begins with an option's name, with that name as it was typed."""
    for shown in (name, spelled(name)):
        if problem.startswith(shown):
            return typed_names.get(name, shown) + problem.removeprefix(shown)
    return problem


def is_boolean(word: str) -> bool:
    """Returns whether the command line reads a word as a boolean."""
    return word.lower() in _BOOLEANS


def split(
    argv: Sequence[str],
    many: Collection[str] = (),
    optional: Mapping[str, Callable[[str], bool]] | None = None,
) -> tuple[list[Option], list[str]]:
    """Returns the options in `argv`, and the words that belong to no option.

    `-` and `_` in a name are the same.

    Args:
      many: options that take all words after them.
      optional: options that may stand alone, and take the next word only if the function says that
        it can be their value.
    """
    options: list[Option] = []
    strays: list[str] = []
    optional = optional or {}
    needs_value = False  # whether the next word may be the value of the last option
    for word in argv:
        if needs_value and _can_be_value(word, optional.get(options[-1].name)):
            options[-1] = options[-1]._replace(text=word)
            needs_value = False
        elif word.startswith("-") and word != "-":
            name, equals, value = word.partition("=")
            options.append(Option(_option_name(name), value if equals else None))
            needs_value = not equals
        elif options and options[-1].name in many:
            options.append(Option(options[-1].name, word))
        else:
            strays.append(word)
            needs_value = False
    return options, strays


def _can_be_value(word: str, is_value: Callable[[str], bool] | None) -> bool:
    if word.startswith("--"):
        return False
    return is_value is None or is_value(word or " ")


def _option_name(word: str) -> str:
    return f"--{word.lstrip('-').replace('-', '_')}"


def convert(name: str, text: str | None, hint: Any, spellings: Spellings) -> Any:
    """Returns `text` as a value of type `hint`; a bool without a text is true.

    Raises ValueError with the line to show.
    """
    if text is None:
        if hint is not bool:
            raise ValueError(f"{name}: this option needs a value; {expected(hint, '', spellings)}")
        text = "true"
    try:
        if hint in spellings:
            return spellings[hint].read(text)
        return _convert_by_tyro(hint, text, spellings)
    except SystemExit:
        raise ValueError(f"{name}={text}: {expected(hint, text, spellings)}") from None
    except ValueError as error:
        raise ValueError(f"{name}={text}: {error}") from None


def _convert_by_tyro(hint: Any, text: str, spellings: Spellings) -> Any:
    """Returns `text` as a value of type `hint`. tyro raises SystemExit if it is none."""
    import tyro

    is_list = any(get_origin(part) in (tuple, list) for part in (hint, *get_args(hint)))
    words = [word for word in text.split(",") if word] if is_list else [text]
    with contextlib.redirect_stderr(io.StringIO()):
        return tyro.cli(hint, args=["--", *words], registry=_registry(spellings))


def expected(hint: Any, text: str, spellings: Spellings | None = None) -> str:
    """Returns the end of an error: what is right in the place of `text`."""
    if hint is bool:
        return "expected true or false"
    if spellings and hint in spellings:
        return f"expected {spellings[hint].form}"
    arguments = get_args(hint)
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in arguments]
        similar = difflib.get_close_matches(text, choices, n=1)
        return f"expected one of {', '.join(choices)}{did_you_mean(similar)}"
    if get_origin(hint) is tuple and arguments[1:] == (...,):
        spelling = (spellings or {}).get(arguments[0])
        form = spelling.form if spelling else inspect.formatannotation(arguments[0])
        if get_origin(arguments[0]) is Literal:
            form = " or ".join(map(str, get_args(arguments[0])))
        return f"expected {form}, with commas between several and nothing for none"
    return f"expected {inspect.formatannotation(hint)}"


def _optional_type(hint: Any) -> type | None:
    """Returns the plain type of `int | None` and the like; None for other types.

    Their None is a command's default, and never typed.
    """
    types = [part for part in get_args(hint) if part is not type(None)]
    if len(types) == 1 and len(get_args(hint)) == 2 and types[0] in _METAVARS:
        return types[0]
    return None


def suggestion(name: str, names: Iterable[str]) -> str:
    """Returns the end of an error about an unknown name: the names that may be meant.

    They are the nearest one; failing that, fields of the right name in another section, or of
    nearly that name in any. Without such fields it is all of the section.
    """
    names = list(names)
    similar = difflib.get_close_matches(name, names, n=1, cutoff=0.9)
    if not similar:
        similar = [other for other in names if _leaf(other) == _leaf(name)]
    if not similar:
        leaves = difflib.get_close_matches(_leaf(name), map(_leaf, names), n=1, cutoff=0.75)
        similar = [other for other in names if _leaf(other) in leaves]
    if similar:
        return did_you_mean(similar)
    section = name.rpartition(".")[0]
    siblings = [_leaf(other) for other in names if other.rpartition(".")[0] == section]
    if section and siblings:
        return f"; {section} has {', '.join(siblings)}"
    return "; see --help"


def _leaf(name: str) -> str:
    """Returns the name of a field without its section."""
    return name.lstrip("-").rpartition(".")[2]


def print_help(
    cls: type,
    description: str,
    prog: str = "",
    default: Any = None,
    spellings: Spellings | None = None,
    *,
    folded: bool = False,
    is_config: bool = False,
) -> NoReturn:
    """Prints every field of a dataclass with its docstring and its default. Raises SystemExit(0).

    Args:
      default: an instance, whose values are shown instead of the defaults.
      folded: leave out the fields that are marked `expert` (see `mesh_lm.config.run.expert`).
      is_config: the fields are those of a config, which keep their underscores.
    """
    import tyro

    positionals = [name.removeprefix("--") for name in positional(cls)]
    if positionals:
        description += (
            f"\n\n{' and '.join(map(str.upper, positionals))} may also be given by name: "
            f"--{positionals[0]}=VALUE."
        )
    defaults = {} if default is None else {"default": default}
    tyro.cli(
        cls,
        args=["--help"],
        prog=prog or None,
        description=description,
        use_underscores=is_config,
        # A flag pair such as --resume / --no-resume would be a second spelling, and subcommands a
        # second language.
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        registry=_registry(spellings or {}, folded=folded, is_config=is_config),
        **defaults,
    )
    raise SystemExit(0)


Group = dict[str, tuple[Any, str]]
"""Subcommands: name -> (its dataclass, or a group of its own; what it does)."""


def completion_script(shell: str, prog: str, commands: Group, spellings: Spellings) -> str:
    """Returns the script that completes `prog` in a shell: bash, zsh or fish."""
    import tyro

    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        tyro.cli(
            _subcommands(commands),
            args=["--tyro-print-completion", shell],
            prog=prog,
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff, tyro.conf.OmitSubcommandPrefixes),
            registry=_registry(spellings),
        )
    return script.getvalue()


def _subcommands(group: Group) -> Any:
    """Returns the type that tyro reads as these subcommands."""
    import tyro

    members = []
    for name, (cls, description) in group.items():
        if isinstance(cls, dict):
            cls = dataclasses.make_dataclass(name, [("subcommand", _subcommands(cls))])
        members.append(Annotated[cls, tyro.conf.subcommand(name, description=description)])
    return Union[tuple(members)]  # noqa: UP007  # of as many as there are


def _registry(spellings: Spellings, *, folded: bool = False, is_config: bool = False) -> Any:
    """Returns rules for tyro: how types are spelled, and which fields the help shows."""
    import tyro
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
        StructConstructorSpec,
        StructTypeInfo,
    )

    registry = ConstructorRegistry()
    boolean = Spelling("{true,false}", _read_boolean, lambda value: str(value).lower())
    spelling_by_type = {bool: boolean, **spellings}
    entered: set[Any] = set()

    @registry.primitive_rule
    def _(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        kind = info.type
        if not isinstance(kind, type) or kind not in spelling_by_type:
            return None
        spelling = spelling_by_type[kind]
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=spelling.form,
            instance_from_str=lambda words: spelling.read(words[0]),
            is_instance=lambda value: isinstance(value, kind),
            str_from_instance=lambda value: [spelling.show(value)],
        )

    @registry.struct_rule
    def _(info: StructTypeInfo) -> StructConstructorSpec | None:
        """tyro's own rule, with marks on some of the fields."""
        if not dataclasses.is_dataclass(info.type) or info.type in entered:
            return None
        # This call asks all rules again, this one among them.
        entered.add(info.type)
        try:
            spec = ConstructorRegistry.get_struct_spec(info)
        finally:
            entered.discard(info.type)
        if not isinstance(spec, StructConstructorSpec):
            return spec  # pyright: ignore[reportReturnType]

        expert_names = set()
        if folded:
            for field in dataclasses.fields(info.type):
                if field.metadata.get("expert"):
                    expert_names.add(field.name)
        positional_names = getattr(info.type, "POSITIONAL", ())
        fields = []
        for field in spec.fields:
            optional_type = _optional_type(field.type)
            marks: tuple[Any, ...] = ()
            if field.name in expert_names:
                marks = (tyro.conf.Suppress,)
            elif field.name in positional_names:
                marks = (tyro.conf.Positional, tyro.conf.arg(metavar=field.name.upper()))
            elif optional_type and not is_config:
                marks = (tyro.conf.arg(metavar=_METAVARS[optional_type]),)
            if marks:
                field = dataclasses.replace(field, type=Annotated[(field.type, *marks)])
            fields.append(field)
            spelling = spellings.get(field.type)
            if spelling and spelling.has_fields and dataclasses.is_dataclass(field.default):
                fields += _below(field)
        return dataclasses.replace(spec, fields=tuple(fields))

    return registry


def _below(field: Any) -> list[Any]:
    """Returns tyro's description of the fields of a dataclass that is itself written as one word:
    for rule=adamw those of AdamW, as rule.beta1.
    """
    cls = type(field.default)
    types = get_type_hints(cls)
    docs = field_docs(cls)
    return [
        dataclasses.replace(
            field,
            name=f"{field.name}.{below.name}",
            type=types[below.name],
            default=getattr(field.default, below.name),
            helptext=docs.get(below.name, ""),
        )
        for below in dataclasses.fields(cls)
    ]


def _read_boolean(word: str) -> bool:
    if not is_boolean(word):
        raise ValueError(word)
    return word.lower() == "true"
