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


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How a type that tyro does not know is written on a command line, in one word."""

    form: str
    """The form of the word, for help and errors."""
    read: Callable[[str], Any]
    """Word -> value. Raises ValueError."""
    show: Callable[[Any], str]


Spellings = Mapping[type, Spelling]


Elsewhere = Callable[[str, "str | None", Mapping[str, str]], "tuple[str, str] | None"]
"""An option of another program: name, value, all values by name -> (the field that is meant or "",
the end of the error); None: unknown."""


def command(
    cls: type[T],
    argv: Sequence[str],
    description: str,
    prog: str = "",
    elsewhere: Elsewhere | None = None,
) -> T:
    """The arguments of a command: a dataclass with fields of plain types, filled from `argv`.

    A tuple field (tuple[T, ...]) takes one value an option, or several words after it (--input a
    b), and may be repeated. A bool field stands alone for true. Words that follow no option fill
    the fields that `cls.POSITIONAL` names, in order; a tuple takes all that are left. The
    docstrings of the fields, and `description`, are the help; `prog` is what the user typed to get
    here; `elsewhere` knows the options of another program, to which all words after them belong.

    Raises:
        ConfigError: every mistake in `argv`, required fields that are missing among them.
        SystemExit: with status 0, after printing the help, where `argv` has --help or -h.
    """
    fields = {f"--{field.name}": field for field in dataclasses.fields(cls) if field.init}  # pyright: ignore[reportArgumentType]
    hints = hints_of(cls)
    elements = {
        name: get_args(hint)[0] for name, hint in hints.items() if get_origin(hint) is tuple
    }
    spellings = spellings_of(argv)
    foreign = {
        name
        for name in spellings
        if name not in hints and elsewhere and elsewhere(name.removeprefix("--"), None, {})
    }
    options, strays = split(
        argv,
        {*elements, *foreign},
        {name: is_boolean for name, hint in hints.items() if hint is bool},
    )
    if HELP & {name for name, _ in options}:
        print_help(cls, description, prog)

    free = [
        name
        for name in positional(cls)
        if name in elements or name not in {name for name, _ in options}
    ]
    options, strays = place(options, strays, free, elements)
    values: dict[str, Any] = {}
    typed: dict[str, str] = {}
    for name, text in options:
        key = name.removeprefix("--")
        typed[key] = f"{typed[key]} {text}" if key in typed else text or ""
    problems, meant = list[str](), set[str]()
    for name in dict.fromkeys(name for name, _ in options if name in foreign):
        key = name.removeprefix("--")
        if elsewhere and (known := elsewhere(key, typed[key], typed)):
            meant.add(f"--{known[0]}")
            problems.append(as_typed(f"{name}: no such option{known[1]}", name, spellings))
    for name, text in options:
        if name in foreign:
            continue
        try:
            value = read(name, text, hints | elements, what="option")
            values[name] = (*values.get(name, ()), value) if name in elements else value
        except ValueError as error:
            problems.append(as_typed(str(error), name, spellings))
    problems += [stray(word, hints) for word in strays]
    given = meant | {name for name, _ in options}
    for name, field in fields.items():
        if (
            name not in given
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        ):
            about = first_sentence(field_docs(cls).get(field.name, ""))
            problems.append(
                f"{spelled(name)}: missing; "
                f"{about or expected(elements.get(name, hints[name]), '')}"
            )
    refuse(problems)
    try:
        return cls(**{name.removeprefix("--"): value for name, value in values.items()})
    except ConfigError:
        raise
    except ValueError as error:  # from __post_init__
        raise ConfigError(f"bad command line\n  - {error}") from error


def hints_of(cls: type) -> dict[str, Any]:
    """--field -> its type, of every field of a dataclass that can be set."""
    types = get_type_hints(cls)
    return {f"--{field.name}": types[field.name] for field in dataclasses.fields(cls) if field.init}


def spelled(name: str) -> str:
    """Returns an option's name as help and errors show it. Fields of a config have underscores
    instead, as in Python.
    """
    return name.replace("_", "-")


def positional(cls: type) -> tuple[str, ...]:
    """The options whose values may stand without their names."""
    return tuple(f"--{name}" for name in getattr(cls, "POSITIONAL", ()))


def refuse(problems: Sequence[str]) -> None:
    """Raises ConfigError that lists them, if there are any."""
    if problems:
        raise ConfigError("\n  - ".join(["bad command line", *problems]))


Given = list[tuple[str, str | None]]
"""Options in the order of the command line: (--name, its value, None where it stands alone)."""


def spellings_of(argv: Sequence[str]) -> dict[str, str]:
    """Returns each option's name in our spelling -> as it was typed."""
    typed = [word.partition("=")[0] for word in argv if word.startswith("-")]
    return {f"--{word.lstrip('-').replace('-', '_')}": word for word in typed}


def as_typed(problem: str, name: str, typed: Mapping[str, str]) -> str:
    """Returns a problem that begins with an option's name, which it then shows as it was typed."""
    for shown in (name, spelled(name)):
        if problem.startswith(shown):
            return typed.get(name, shown) + problem.removeprefix(shown)
    return problem


def is_boolean(word: str) -> bool:
    """True for the words that the command line reads as a boolean."""
    return word.lower() in _BOOLEANS


def split(
    argv: Sequence[str],
    many: Collection[str] = (),
    optional: Mapping[str, Callable[[str], bool]] | None = None,
) -> tuple[Given, list[str]]:
    """The words of `argv` as options, and the words that belong to no option. `-` and `_` in a name
    are the same.

    An option in `many` takes all words after it. One in `optional` may stand alone, and takes the
    next word only where the function says that it can be its value.
    """
    options: Given = []
    strays = []
    waiting, optional = False, optional or {}
    for word in argv:
        if (
            waiting
            and not word.startswith("--")
            and optional.get(options[-1][0], bool)(word or " ")
        ):
            options[-1] = (options[-1][0], word)
            waiting = False
        elif word.startswith("-") and word != "-":
            name, equals, value = word.partition("=")
            options.append((f"--{name.lstrip('-').replace('-', '_')}", value if equals else None))
            waiting = not equals
        elif options and options[-1][0] in many:
            options.append((options[-1][0], word))
        else:
            strays.append(word)
            waiting = False
    return options, strays


def place(
    options: Given, strays: list[str], free: Sequence[str], many: Collection[str]
) -> tuple[Given, list[str]]:
    """Gives the words that belong to no option to the positional options `free`, in order. Returns
    the options and the words left over.
    """
    options, strays = list(options), list(strays)
    for name in free:
        words = strays[: len(strays) if name in many else 1]
        options += [(name, word) for word in words]
        del strays[: len(words)]
    return options, strays


def stray(word: str, known: Collection[str]) -> str:
    """The problem with a word that belongs to no option."""
    name, equals, value = word.partition("=")
    name = f"--{name.replace('-', '_')}"
    return f"{word}: belongs to no option" + did_you_mean(
        [f"{spelled(name)}={value}"] if equals and name in known else []
    )


def read(
    name: str,
    text: str | None,
    hints: Mapping[str, Any],
    what: str,
    spellings: Spellings | None = None,
) -> Any:
    """`text` as the type that `hints` has for the option `name`. Raises ValueError with the line to
    show.
    """
    if name not in hints:
        raise ValueError(
            f"{spelled(name)}: no such {what}{near(spelled(name), map(spelled, hints))}"
        )
    return convert(spelled(name), text, _optional(hints[name]) or hints[name], spellings or {})


def convert(name: str, text: str | None, hint: Any, spellings: Spellings) -> Any:
    """`text` as a value of type `hint`; a bool without a text is true. Raises ValueError with the
    line to show.
    """
    if text is None and hint is not bool:
        raise ValueError(f"{name}: needs a value; {expected(hint, '', spellings)}")
    text = "true" if text is None else text
    try:
        return spellings[hint].read(text) if hint in spellings else _by_tyro(hint, text, spellings)
    except SystemExit:
        raise ValueError(f"{name}={text}: {expected(hint, text, spellings)}") from None
    except ValueError as error:
        raise ValueError(f"{name}={text}: {error}") from None


def _by_tyro(hint: Any, text: str, spellings: Spellings) -> Any:
    """`text` as a value of type `hint`, by tyro, which raises SystemExit where it cannot."""
    import tyro

    many = any(get_origin(each) in (tuple, list) for each in (hint, *get_args(hint)))
    words = [word for word in text.split(",") if word] if many else [text]
    with contextlib.redirect_stderr(io.StringIO()):
        return tyro.cli(hint, args=["--", *words], registry=_registry(spellings))


def expected(hint: Any, text: str, spellings: Spellings | None = None) -> str:
    """What would have been right in the place of `text`."""
    if hint is bool:
        return "expected true or false"
    if get_origin(hint) is Literal:
        choices = [str(choice) for choice in get_args(hint)]
        return f"expected one of {', '.join(choices)}{did_you_mean(difflib.get_close_matches(text, choices, n=1))}"
    if get_origin(hint) is tuple and (args := get_args(hint))[1:] == (...,):
        spelling = (spellings or {}).get(args[0])
        one = spelling.form if spelling else inspect.formatannotation(args[0])
        return f"expected {one}, with commas between several and nothing for none"
    return f"expected {inspect.formatannotation(hint)}"


def _optional(hint: Any) -> type | None:
    """Returns the plain type of `int | None` and the like, whose None is a command's default and
    never typed; None for other types.
    """
    others = [each for each in get_args(hint) if each is not type(None)]
    return (
        others[0]
        if len(others) == 1 and len(get_args(hint)) == 2 and others[0] in (int, float, str)
        else None
    )


def near(name: str, known: Iterable[str]) -> str:
    """The nearest name; failing that, fields of the right name in another section, of nearly that
    name in any, or all of its section.
    """

    def last(name: str) -> str:
        return name.lstrip("-").rpartition(".")[2]

    known = list(known)
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.9) or [
        other for other in known if last(other) == last(name)
    ]
    if not found and (
        leaf := difflib.get_close_matches(last(name), map(last, known), n=1, cutoff=0.75)
    ):
        found = [other for other in known if last(other) == leaf[0]]
    section = name.rpartition(".")[0]
    beside = [last(other) for other in known if section and other.rpartition(".")[0] == section]
    return did_you_mean(found) or (
        f"; {section} has {', '.join(beside)}" if beside else "; see --help"
    )


def print_help(
    cls: type,
    description: str,
    prog: str = "",
    default: Any = None,
    spellings: Spellings | None = None,
    *,
    folded: bool = False,
    of_config: bool = False,
) -> NoReturn:
    """Prints every field of a dataclass with its docstring and its default, or its value in
    `default`. Ends in SystemExit(0).

    folded: leave out the fields that are marked `expert` (see `mesh_lm.config.run.expert`).
    of_config: the fields are those of a config, which keep their underscores.
    """
    import tyro

    if free := [name.removeprefix("--") for name in positional(cls)]:
        description += (
            f"\n\n{' and '.join(map(str.upper, free))} may also be given by name: "
            f"--{free[0]}=VALUE."
        )
    more = {} if default is None else {"default": default}
    tyro.cli(
        cls,
        args=["--help"],
        prog=prog or None,
        description=description,
        use_underscores=of_config,
        # A flag pair such as --resume / --no-resume would be a second spelling, and subcommands a
        # second language.
        config=(tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
        registry=_registry(spellings or {}, folded=folded, of_config=of_config),
        **more,
    )
    raise SystemExit(0)


Group = dict[str, tuple[Any, str]]
"""Subcommands: name -> (its dataclass, or a group of its own; what it does)."""


def completion(shell: str, prog: str, commands: Group, spellings: Spellings) -> str:
    """The script that completes `prog` in a shell: bash, zsh, tcsh or fish."""
    import tyro

    def union(group: Group) -> Any:
        members = []
        for name, (cls, about) in group.items():
            if isinstance(cls, dict):
                cls = dataclasses.make_dataclass(name, [("subcommand", union(cls))])
            members.append(Annotated[cls, tyro.conf.subcommand(name, description=about)])
        return Union[tuple(members)]  # noqa: UP007  # of as many as there are

    with contextlib.redirect_stdout(written := io.StringIO()), contextlib.suppress(SystemExit):
        tyro.cli(
            union(commands),
            args=["--tyro-print-completion", shell],
            prog=prog,
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff, tyro.conf.OmitSubcommandPrefixes),
            registry=_registry(spellings),
        )
    return written.getvalue()


def _registry(spellings: Spellings, *, folded: bool = False, of_config: bool = False) -> Any:
    """How tyro reads and shows the types that it does not know, or spells in Python, and which
    fields its help shows.
    """
    import tyro
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
        StructConstructorSpec,
        StructTypeInfo,
    )

    registry, busy = ConstructorRegistry(), set()
    boolean = {bool: Spelling("{true,false}", _boolean, lambda value: str(value).lower())}

    @registry.primitive_rule
    def _(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
        spelling = {**boolean, **spellings}.get(info.type) if isinstance(info.type, type) else None
        if spelling is None:
            return None
        kind = info.type
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
        if not dataclasses.is_dataclass(info.type) or info.type in busy:
            return None
        busy.add(info.type)
        try:
            made = ConstructorRegistry.get_struct_spec(info)
        finally:
            busy.discard(info.type)
        if not isinstance(made, StructConstructorSpec):
            return made  # pyright: ignore[reportReturnType]
        expert = {
            field.name
            for field in dataclasses.fields(info.type)
            if folded and field.metadata.get("expert")
        }
        free = getattr(info.type, "POSITIONAL", ())
        fields = []
        for field in made.fields:
            if field.name in expert:
                field = dataclasses.replace(field, type=Annotated[field.type, tyro.conf.Suppress])
            elif field.name in free:
                shown = tyro.conf.arg(metavar=field.name.upper())
                field = dataclasses.replace(
                    field, type=Annotated[field.type, tyro.conf.Positional, shown]
                )
            elif not of_config and (one := _optional(field.type)):
                shown = tyro.conf.arg(metavar={str: "STR", int: "INT", float: "FLOAT"}[one])
                field = dataclasses.replace(field, type=Annotated[field.type, shown])
            fields.append(field)
        return dataclasses.replace(made, fields=tuple(fields))

    return registry


def _boolean(word: str) -> bool:
    if not is_boolean(word):
        raise ValueError(word)
    return word.lower() == "true"
