"""Options of other programs: what a name stands for here, and the answer to a user who typed it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mesh_lm.commands.options import ForeignOption, ForeignOptions
from mesh_lm.errors import did_you_mean

if TYPE_CHECKING:
    from mesh_lm.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Context:
    """The other options of a command line, for values that depend on them."""

    run: TrainConfig | None = None
    """The config with the other options; None: the command has no config."""
    typed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Every option with a value as it was typed: its name without dashes in front, with underscores
    -> the value."""

    @property
    def config(self) -> TrainConfig:
        """The config. Raises ValueError if there is none."""
        if self.run is None:
            raise ValueError("no config")
        return self.run


class NotBuiltError(ValueError):
    """A value that has no counterpart here. Its text is the value."""


Formula = Callable[[str, Context], str]
"""(value of the other trainer's option, the other options) -> text. Raises ValueError if the
command line does not determine it."""
Parts = Callable[[str], Mapping[str, str]]
"""Value of the other trainer's option -> {field: text}. A field "rules.SLOT" is a factor of the
product in `rules`, where SLOT is one of RULES_SLOTS. Raises NotBuiltError for a value that has no
counterpart."""
RULES_SLOTS = ("data", "tensor", "sequence", "expert", "reduction")
"""What the factors of `rules` decide, in the order of the product."""


@dataclasses.dataclass(frozen=True)
class Meaning:
    """What the option of another trainer is here."""

    ours: str
    """What decides it here, in Markdown, as a cell of the tour's table."""
    field: str = ""
    """The field, or the command's option, that takes the value; empty: there is none."""
    convert: Formula | None = None
    """Their value -> the value of `field`. None: the same value."""
    numbers: Formula | None = None
    """Their value -> the formula of `ours` with its numbers."""
    note: str = ""
    """What a suggestion of `field` must add, in Markdown."""
    exact: bool = True
    """Whether the same value means the same. False: users mean different things by this name, and
    only the field is suggested."""
    parts: Parts | None = None
    """What a converted config sets besides `field`, or instead of one: `mesh-lm convert` reads it.
    None: nothing."""


def same(field: str, note: str = "") -> Meaning:
    """A field that takes the same values. note: what a suggestion must add."""
    return Meaning(f"`{field}`{note}", field, note=note)


def similar(field: str) -> Meaning:
    """A field whose values are spelled differently, or that the name does not mean everywhere."""
    return Meaning(f"`{field}`", field, exact=False)


def option(name: str, note: str = "") -> Meaning:
    """An option of a command that has no config."""
    return Meaning(f"`--{name}`{note}", name, note=note)


def one_of(field: str, values: Mapping[str, str], ours: str = "") -> Meaning:
    """A choice whose values have other names here."""
    value_by_name = {theirs.lower(): value for theirs, value in values.items()}

    def convert(text: str, _: Context) -> str:
        if text and text.lower() not in value_by_name:
            raise NotBuiltError(text)
        return value_by_name[require_value(text).lower()]

    if not ours:
        ours = ", ".join(f"`{field}={value}`" for value in dict.fromkeys(values.values()))
    return Meaning(ours, field, convert)


def flag(field: str, value: str, note: str = "") -> Meaning:
    """A switch that sets a field to one value."""

    def convert(text: str, _: Context) -> str:
        if text.lower() in ("false", "0", "no"):
            raise ValueError(text)
        return value

    return Meaning(f"`{field}={value}`{note}", field, convert, note=note)


def explained(ours: str, parts: Parts | None = None) -> Meaning:
    """An option that is no single field here; `ours` says what to do instead, and `parts` does it
    in a converted config.
    """
    return Meaning(ours, parts=parts)


SCHEDULED_BY_XLA = explained(
    "no option: XLA schedules communication, by the flag sets of `launch.xla_flags`"
)
"""What options about buckets, prefetching and overlap are here."""


def constant(**values: str) -> Parts:
    """Returns parts that do not depend on the value; "__" in a name is a dot."""
    fields = {name.replace("__", "."): text for name, text in values.items()}
    return lambda _: fields


def chosen(field: str, values: Mapping[str, str]) -> Parts:
    """Returns parts that set one field, whose value has another name here."""

    def parts(text: str) -> Mapping[str, str]:
        if text.lower() not in values:
            raise NotBuiltError(text)
        return {field: values[text.lower()]}

    return parts


def with_parts(meaning: Meaning, parts: Parts) -> Meaning:
    """Returns the meaning of an option that needs more than its field in a converted config."""
    return dataclasses.replace(meaning, parts=parts)


def require_value(text: str) -> str:
    """Returns the text. Raises ValueError for an option without a value."""
    if not text:
        raise ValueError("no value")
    return text


def answer(meaning: Meaning, text: str | None, context: Context, prefix: str = "--") -> str:
    """Returns the end of an error: what to write instead of an option that has this meaning.

    Args:
      text: the option's value; None if it has none.
      context: the other options, which a formula needs.
      prefix: that of the suggested option, "--" or "--config.".
    """
    ours = meaning.ours.replace("`", "").removeprefix("no option: ")
    note = meaning.note.replace("`", "")
    if not meaning.field:
        return f"; {ours}"
    if not meaning.convert:
        value = f"={text}" if text and meaning.exact and " " not in text else ""
        return did_you_mean([f"{prefix}{meaning.field}{value}{note}"])

    explanation = f"; here it is {ours}"
    try:
        value = meaning.convert(text or "", context)
    except NotBuiltError as error:
        return f"; {error} is not built{explanation}"
    except (ValueError, ZeroDivisionError):
        return explanation + _numbers(meaning, text, context)
    suggestion = did_you_mean([f"{prefix}{meaning.field}={value}{note}"])
    if meaning.numbers:
        return explanation + _numbers(meaning, text, context) + suggestion
    # A switch or a choice is only written otherwise, and needs no explanation.
    return suggestion


def _numbers(meaning: Meaning, text: str | None, context: Context) -> str:
    if not text or not meaning.numbers:
        return ""
    try:
        return f" = {meaning.numbers(text, context)}"
    except ValueError:
        return ""


def foreign_options(names: Mapping[str, Meaning]) -> ForeignOptions:
    """Returns the look-up that `options.command` needs for the options of another program."""
    meaning_by_name = {name.replace("-", "_"): meaning for name, meaning in names.items()}

    def look_up(name: str, text: str | None, typed: Mapping[str, str]) -> ForeignOption | None:
        meaning = meaning_by_name.get(name.lower())
        if meaning is None:
            return None
        hint = answer(meaning, text, Context(typed=typed))
        return ForeignOption(meaning.field.replace("-", "_"), hint)

    return look_up


def table(
    names: Mapping[str, Meaning],
    heads: tuple[str, str] = ("Megatron-LM", "mesh_lm"),
    prefix: str = "--",
) -> str:
    """Returns a table in Markdown: the arguments of others, and what they are here.

    Those with the same meaning share a row. prefix: what stands before an argument.
    """
    rows: dict[str, list[str]] = {}
    for name, meaning in names.items():
        rows.setdefault(meaning.ours, []).append(f"`{prefix}{name}`")
    lines = [f"| {heads[0]} | {heads[1]} |", "|---|---|"]
    lines += [f"| {', '.join(theirs)} | {ours} |" for ours, theirs in rows.items()]
    return "\n".join(lines)
