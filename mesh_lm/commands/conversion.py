"""Another trainer's arguments as a config: which fields they set, what is left out, and the Python
file. The tables are those of the suggestions (`mesh_lm.commands.other_names`).
"""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mesh_lm.commands.command_line import SPELLINGS, field_types, with_values
from mesh_lm.commands.meanings import RULES_SLOTS, Context, Meaning, NotBuiltError
from mesh_lm.commands.options import convert as converted_value
from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.optim import RULES
from sharding_rules import MeshConfig, Rules

_RULE = "optimizer.rule"
_RULES = "rules"
_WIDTH = 100
_OFF = frozenset({"", "0", "0.0", "false", "none", "null"})
"""Values by which an argument asks for nothing."""
_AXIS_OF_SLOT = {"tensor": "tensor", "sequence": "sequence", "expert": "expert"}
"""A factor of `rules` -> the mesh axis without which it has no effect."""


class Argument(NamedTuple):
    """An argument, or a key, of another trainer."""

    name: str
    """As in the table of meanings."""
    text: str
    """Its value; empty for a switch."""
    source: str
    """What the config shows beside the field: --num-layers 24."""


class Setting(NamedTuple):
    """A field that the config sets."""

    field: str
    text: str
    """The value as on a command line."""
    source: str


class LeftOut(NamedTuple):
    """An argument that sets no field."""

    source: str
    reason: str

    @property
    def is_lost(self) -> bool:
        """Whether the run differs without it; False: it needs no field here."""
        return not self.reason.startswith(_NO_OPTION)


_NO_OPTION = "no option: "


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What a conversion made."""

    config: TrainConfig
    settings: tuple[Setting, ...]
    """One for each field, in the order of the fields of the config."""
    left_out: tuple[LeftOut, ...]


def convert(
    arguments: Sequence[Argument],
    meanings: Mapping[str, Meaning],
    base: TrainConfig,
    settings: Sequence[Setting] = (),
) -> Conversion:
    """Returns the config that the arguments describe.

    Args:
      arguments: those with a name in `meanings`.
      base: the values of all other fields.
      settings: fields that follow from several arguments at once, such as the mesh.

    Raises ConfigError that lists every value that cannot be read.
    """
    converter = _Converter(arguments, base)
    for setting in settings:
        converter.set(*setting)
    for argument in _in_order(arguments, meanings):
        converter.add(argument, meanings[argument.name])
    return converter.result()


def _in_order(arguments: Sequence[Argument], meanings: Mapping[str, Meaning]) -> Sequence[Argument]:
    """Returns the arguments, with those first whose fields others need: the update rule, then
    fields that take the same values, then formulas, those of the number of steps first.
    """

    def rank(argument: Argument) -> int:
        meaning = meanings[argument.name]
        if meaning.field == _RULE:
            return 0
        if meaning.field and not meaning.convert:
            return 1
        if not meaning.field:
            return 2
        return 3 if meaning.field == "train.steps" else 4

    return sorted(arguments, key=rank)


class _Converter:
    """The config as it is so far, and what was left out."""

    def __init__(self, arguments: Sequence[Argument], base: TrainConfig) -> None:
        self._config = base
        self._base = base
        self._typed = {
            argument.name.replace("-", "_").rpartition(".")[2]: argument.text
            for argument in arguments
        }
        self._settings: dict[str, Setting] = {}
        self._factors: dict[str, Setting] = {}
        self._left_out: list[LeftOut] = []
        self._problems: list[str] = []

    def add(self, argument: Argument, meaning: Meaning) -> None:
        """Takes one argument over, or leaves it out."""
        ours = meaning.ours.replace("`", "")
        if not meaning.field and not meaning.parts:
            if argument.text.lower() not in _OFF - {""}:
                self._left_out.append(LeftOut(argument.source, ours))
            return
        context = Context(self._config, self._typed)
        fields: dict[str, str] = {}
        try:
            if meaning.field:
                text = argument.text
                if meaning.convert:
                    text = meaning.convert(text, context)
                fields[meaning.field] = text
            if meaning.parts:
                fields |= meaning.parts(argument.text)
        except NotBuiltError as error:
            reason = f"{error} is not built; here it is {ours.removeprefix(_NO_OPTION)}"
            self._left_out.append(LeftOut(argument.source, reason))
            return
        except (ValueError, ZeroDivisionError):
            if not _is_off_switch(argument, meaning):
                reason = f"the other arguments do not say which value it is; here it is {ours}"
                self._left_out.append(LeftOut(argument.source, reason))
            return
        source = argument.source
        if meaning.note and not meaning.parts:
            source += meaning.note.replace("`", "")
        for field, text in fields.items():
            self.set(field, text, source)

    def set(self, field: str, text: str, source: str) -> None:
        """Sets a field, or a factor of the rules."""
        setting = Setting(field, text, source)
        section, _, slot = field.partition(".")
        if not field or (section == _RULES and not text):
            return
        if section == _RULES and slot:
            self._factors[slot] = setting
            return
        types = field_types(self._config)
        if field not in types:
            name = type(self._config.model).__name__
            self._left_out.append(LeftOut(source, f"{field} is no field of this run's {name}"))
            return
        try:
            value = converted_value(field, text, types[field], SPELLINGS)
        except ValueError as error:
            self._problems.append(f"{source}: {error}")
            return
        self._config = with_values(self._config, {field: value})
        self._settings[field] = setting

    def result(self) -> Conversion:
        """Returns the conversion. Raises ConfigError for values that could not be read."""
        if self._problems:
            raise ConfigError("\n  - ".join(["values that cannot be read", *self._problems]))
        self._set_rules()
        order = {field: number for number, field in enumerate(field_types(self._config))}
        settings = sorted(self._settings.values(), key=lambda setting: order[setting.field])
        return Conversion(self._config, tuple(settings), tuple(self._left_out))

    def _set_rules(self) -> None:
        """Sets `rules` to the product of its factors, without those whose mesh axis has size 1."""
        factors: list[Setting] = []
        for slot in RULES_SLOTS:
            axis = _AXIS_OF_SLOT.get(slot, "")
            if slot not in self._factors or (axis and getattr(self._config.mesh, axis) == 1):
                continue
            factors.append(self._factors[slot])
        if not factors or all(factor.field == "rules.reduction" for factor in factors):
            factors.insert(0, Setting("rules.data", "ddp", "data parallelism"))
        name = "+".join(factor.text for factor in factors)
        sources = ", ".join(dict.fromkeys(factor.source for factor in factors))
        self.set(_RULES, name, sources)


def _is_off_switch(argument: Argument, meaning: Meaning) -> bool:
    """Whether an argument is a switch that is off, as in "enabled": false."""
    return meaning.numbers is None and argument.text.lower() in _OFF - {""}


# The file.


def python_file(conversion: Conversion, docstring: str, base: str = "") -> str:
    """Returns the text of a config file.

    base: the config, by its name or path, whose other fields the file keeps; empty: every other
    field has its default.
    """
    sources = {setting.field: setting.source for setting in conversion.settings}
    writer = _Writer(conversion.config, sources, is_derived=bool(base))
    body = list(writer.section(conversion.config, "", 1))
    quoted = docstring.replace("\\", "/").replace('"', "'")
    lines = [f'"""{quoted}"""', ""]
    lines += writer.imports(base)
    lines += ["", "", "def get_config() -> TrainConfig:"]
    if base:
        lines.append(f"    config = load({_quoted(base)})")
    lines.append(f"    return {body[0].lstrip()}")
    lines += [*body[1:-1], "    )"]
    lines += _left_out_comments(conversion.left_out)
    return "\n".join(lines) + "\n"


def left_out_lines(left_out: Sequence[LeftOut]) -> Iterator[str]:
    """Yields what has no counterpart, then what needs none; each part has a head."""
    groups = {
        "has no counterpart, or no single field:": [item for item in left_out if item.is_lost],
        "needs no field here:": [item for item in left_out if not item.is_lost],
    }
    for head, items in groups.items():
        if not items:
            continue
        yield head
        sources_by_reason: dict[str, list[str]] = {}
        for item in items:
            reason = item.reason.removeprefix(_NO_OPTION)
            sources_by_reason.setdefault(reason, []).append(item.source)
        for reason, sources in sources_by_reason.items():
            yield f"  {', '.join(sources)}: {reason}"


def _left_out_comments(left_out: Sequence[LeftOut]) -> list[str]:
    comments = ["", ""] if left_out else []
    for line in left_out_lines(left_out):
        indent = "  " if line.startswith("  ") else ""
        comments += textwrap.wrap(
            line.lstrip(),
            _WIDTH,
            initial_indent=f"# {indent}",
            subsequent_indent=f"# {indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return comments


class _Writer:
    """Writes a config as Python."""

    def __init__(
        self, config: TrainConfig, sources: Mapping[str, str], *, is_derived: bool
    ) -> None:
        self._config = config
        self._sources = sources
        self._is_derived = is_derived
        self._classes: list[type] = []

    def section(self, value: Any, path: str, depth: int) -> Iterator[str]:
        """Yields the lines of a section: the fields that are set, each with its source."""
        indent = "    " * depth
        name = path.rpartition(".")[2]
        head = f"{indent}{name}=" if name else indent
        if self._is_kept(path):
            yield f"{head}dataclasses.replace("
            yield f"{indent}    config{f'.{path}' if path else ''},"
        else:
            self._classes.append(type(value))
            yield f"{head}{type(value).__name__}("
        for field in dataclasses.fields(value):
            below = f"{path}.{field.name}" if path else field.name
            inner = getattr(value, field.name)
            if any(source.startswith(f"{below}.") for source in self._sources):
                yield from self.section(inner, below, depth + 1)
            elif below in self._sources:
                shown = self._shown(inner)
                line = f"{indent}    {field.name}={shown},"
                yield from _with_comment(line, self._sources[below])
        yield f"{indent}),"

    def _is_kept(self, path: str) -> bool:
        """Whether a section keeps the values of the base. The mesh is of this run alone."""
        return self._is_derived and path != "mesh" and path not in self._sources

    def _shown(self, value: Any) -> str:
        if isinstance(value, Rules):
            return f'preset("{value.name}")'
        if type(value) in RULES.values() or dataclasses.is_dataclass(value):
            self._classes.append(type(value))
            return f"{type(value).__name__}()"
        if isinstance(value, str):
            return _quoted(value)
        if isinstance(value, tuple):
            items = [self._shown(item) for item in value]
            return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
        return repr(value)

    def imports(self, base: str) -> list[str]:
        """Returns the import statements, after all sections are written."""
        names: dict[str, set[str]] = {"mesh_lm.config": {"TrainConfig"}, "sharding_rules": set()}
        for cls in self._classes:
            module = _public_module(cls)
            names.setdefault(module, set()).add(cls.__name__)
        if _RULES in self._sources:
            names["sharding_rules"].add("preset")
        if base:
            names["mesh_lm.config"].add("load")
        lines = ["import dataclasses", ""] if base else []
        for module in sorted(filter(names.get, names)):
            lines += _import_lines(module, sorted(names[module]))
        return lines


def _quoted(text: str) -> str:
    """Returns a Python string in double quotes."""
    return json.dumps(text, ensure_ascii=False)


def _import_lines(module: str, names: Sequence[str]) -> list[str]:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= _WIDTH:
        return [line]
    return [f"from {module} import (", *(f"    {name}," for name in names), ")"]


def _public_module(cls: type) -> str:
    """Returns the module from which a config imports a class."""
    if cls is MeshConfig:
        return "sharding_rules"
    parts = cls.__module__.split(".")
    package = ".".join(parts[:2])
    public = {"mesh_lm.config", "mesh_lm.model", "mesh_lm.optim"}
    if cls.__name__.endswith("Config") and package == "mesh_lm.optim":
        return "mesh_lm.config"
    if cls.__name__ == "ExpertsConfig" or package not in public:
        return cls.__module__
    return package


def _with_comment(line: str, source: str) -> Iterator[str]:
    """Yields a line with its source behind it, or above it where it would be too long."""
    source = " ".join(source.split())
    if len(line) + len(source) + 4 <= _WIDTH:
        yield f"{line}  # {source}"
        return
    indent = line[: len(line) - len(line.lstrip())]
    prefix = f"{indent}# "
    yield from textwrap.wrap(
        source,
        _WIDTH,
        initial_indent=prefix,
        subsequent_indent=prefix,
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield line
