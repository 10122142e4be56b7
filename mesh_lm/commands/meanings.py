"""How something is written here that another program has a name for: what a name stands for, and
the answer to who typed it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mesh_lm.errors import did_you_mean

if TYPE_CHECKING:
    from mesh_lm.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the rest of a command line asks for, for the values that depend on it."""

    run: TrainConfig | None = None
    """The config with the other options; None: the command has no config."""
    typed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Every option with a value as it was typed: its name without dashes in front, with underscores
    -> the value."""

    @property
    def config(self) -> TrainConfig:
        """The config. Raises ValueError where there is none."""
        if self.run is None:
            raise ValueError("no config")
        return self.run


class NotBuiltError(ValueError):
    """A value that has no counterpart here. Its text is the value."""


@dataclasses.dataclass(frozen=True)
class Meaning:
    """How something is written here that another trainer has a name for."""

    ours: str
    """What decides it here, in Markdown, as a cell of the tour's table."""
    field: str = ""
    """The field, or the command's option, that takes the value; empty: there is none."""
    convert: Callable[[str, Asked], str] | None = None
    """Their value -> the value of `field`. Raises ValueError where the command does not determine
    it. None: the same value."""
    numbers: Callable[[str, Asked], str] | None = None
    """Their value -> the formula of `ours` with its numbers. Raises ValueError where it is no such
    value."""
    note: str = ""
    """What a suggestion of `field` must add, in Markdown."""
    exact: bool = True
    """Whether the same value means the same. False: users mean different things by this name, and
    only the field is suggested."""


def same(field: str, note: str = "") -> Meaning:
    """A field that takes the same values; note: what a suggestion must add."""
    return Meaning(f"`{field}`{note}", field, note=note)


def near_to(field: str) -> Meaning:
    """A field whose values are spelled differently, or that not all users of the name mean."""
    return Meaning(f"`{field}`", field, exact=False)


def option(name: str, note: str = "") -> Meaning:
    """An option of a command that is no config."""
    return Meaning(f"`--{name}`{note}", name, note=note)


def one_of(field: str, values: Mapping[str, str], ours: str = "") -> Meaning:
    """A choice whose values have other names here."""
    known = {theirs.lower(): value for theirs, value in values.items()}

    def convert(text: str, _: Asked) -> str:
        if text and text.lower() not in known:
            raise NotBuiltError(text)
        return known[given(text).lower()]

    return Meaning(
        ours or ", ".join(f"`{field}={value}`" for value in dict.fromkeys(values.values())),
        field,
        convert,
    )


def flag(field: str, value: str, note: str = "") -> Meaning:
    """A switch that sets a field to one value."""

    def convert(text: str, _: Asked) -> str:
        if text.lower() in ("false", "0", "no"):
            raise ValueError(text)
        return value

    return Meaning(f"`{field}={value}`{note}", field, convert, note=note)


def explained(ours: str) -> Meaning:
    """No single field takes the value; `ours` says what to do instead."""
    return Meaning(ours)


def given(text: str) -> str:
    """Raises ValueError for an option without a value."""
    if not text:
        raise ValueError("no value")
    return text


def answer(meaning: Meaning, text: str | None, asked: Asked, prefix: str = "--") -> str:
    """Returns the end of an error: what to write instead of an option that has this meaning.

    text: its value; None where it has none. asked: the other options, which a formula needs.
    prefix: that of the suggested option, "--" or "--config.".
    """
    ours, note = (
        meaning.ours.replace("`", "").removeprefix("no option: "),
        meaning.note.replace("`", ""),
    )
    if not meaning.field:
        return f"; {ours}"
    if not meaning.convert:
        one = text and meaning.exact and " " not in text
        return did_you_mean([f"{prefix}{meaning.field}{f'={text}' if one else ''}{note}"])
    here = f"; here it is {ours}"
    formula = _formula(meaning, text, asked)
    try:
        value = meaning.convert(text or "", asked)
    except NotBuiltError as error:
        return f"; {error} is not built{here}"
    except (ValueError, ZeroDivisionError):
        return here + formula
    # A formula is what decides; a switch or a choice is only written otherwise.
    return (here + formula if meaning.numbers else "") + did_you_mean(
        [f"{prefix}{meaning.field}={value}{note}"]
    )


def _formula(meaning: Meaning, text: str | None, asked: Asked) -> str:
    try:
        return f" = {meaning.numbers(text, asked)}" if text and meaning.numbers else ""
    except ValueError:
        return ""


def of_command(
    names: Mapping[str, Meaning],
) -> Callable[[str, str | None, Mapping[str, str]], tuple[str, str] | None]:
    """Returns what `options.command` asks for an option that it does not know: the field that is
    meant, or "", and the end of the error.
    """
    known = {name.replace("-", "_"): meaning for name, meaning in names.items()}

    def look_up(name: str, text: str | None, typed: Mapping[str, str]) -> tuple[str, str] | None:
        meaning = known.get(name.lower())
        return meaning and (
            meaning.field.replace("-", "_"),
            answer(meaning, text, Asked(typed=typed)),
        )

    return look_up


def table(names: Mapping[str, Meaning], heads: tuple[str, str] = ("Megatron-LM", "mesh_lm")) -> str:
    """Returns a table of the tour in Markdown: the arguments of others, those with the same meaning
    in one row.
    """
    rows: dict[str, list[str]] = {}
    for name, meaning in names.items():
        rows.setdefault(meaning.ours, []).append(f"`--{name}`")
    lines = [f"| {', '.join(theirs)} | {ours} |" for ours, theirs in rows.items()]
    return "\n".join([f"| {heads[0]} | {heads[1]} |", "|---|---|", *lines])
