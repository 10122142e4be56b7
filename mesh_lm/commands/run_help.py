"""The help of `mesh-lm train`: the fields that runs commonly change, with a sentence on each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mesh_lm.commands.field_docs import field_docs, first_sentence
from mesh_lm.commands.options import Spellings


def print_fields(config: Any, usage: str, description: str, spellings: Spellings) -> None:
    """Prints the fields of a run's config by section, with their values.

    Fields that are marked `expert` are left out.
    """
    console = Console(highlight=False)
    console.print(Text(f"usage: {usage}\n\n{description}"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for option, meaning in _rows(config, "", spellings):
        table.add_row(Text(option), Text(meaning))
    console.print(table)


def _rows(section: Any, prefix: str, spellings: Spellings) -> Iterator[tuple[str, str]]:
    """Yields --section.field=value and its description, those of nested sections last."""
    types = get_type_hints(type(section))
    docs = field_docs(type(section))
    sections = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        spelling = spellings.get(types[field.name])
        is_section = dataclasses.is_dataclass(value) and (not spelling or spelling.has_fields)
        if is_section:
            sections.append((f"{prefix}{field.name}.", value))
        if (spelling or not is_section) and field.init and not field.metadata.get("expert"):
            description = first_sentence(docs.get(field.name, ""))
            if get_origin(types[field.name]) is Literal:
                description += f" [{', '.join(map(str, get_args(types[field.name])))}]"
            shown = spelling.show(value) if spelling else _format(value, spellings)
            yield f"--{prefix}{field.name}={shown}", description
    for section_prefix, value in sections:
        yield "", ""
        yield from _rows(value, section_prefix, spellings)


def _format(value: Any, spellings: Spellings) -> str:
    """Returns a value as it is written on the command line."""
    if type(value) in spellings:
        return spellings[type(value)].show(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(_format(element, spellings) for element in value)
    return str(getattr(value, "__name__", value))
