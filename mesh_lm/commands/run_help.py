"""The help of `mesh-lm train`: each field that runs commonly change, as it is set, with the first
sentence about it.
"""

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
    """Prints the fields of a run's config by section, with their values. Fields that are marked
    `expert` are left out.
    """
    console = Console(highlight=False)
    console.print(Text(f"usage: {usage}\n\n{description}"))
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for option, about in _rows(config, "", spellings):
        table.add_row(Text(option), Text(about))
    console.print(table)


def _rows(section: Any, prefix: str, spellings: Spellings) -> Iterator[tuple[str, str]]:
    """Yields --section.field=value and what it is; the fields of a section after those that belong
    to none.
    """
    hints, about = get_type_hints(type(section)), field_docs(type(section))
    sections = []
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value) and type(value) not in spellings:
            sections.append((f"{prefix}{field.name}.", value))
        elif field.init and not field.metadata.get("expert"):
            yield (
                f"--{prefix}{field.name}={_shown(value, spellings)}",
                first_sentence(about.get(field.name, "")) + _choices(hints[field.name]),
            )
    for name, each in sections:
        yield "", ""
        yield from _rows(each, name, spellings)


def _shown(value: Any, spellings: Spellings) -> str:
    """Returns a value as it is written on the command line."""
    if type(value) in spellings:
        return spellings[type(value)].show(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(_shown(each, spellings) for each in value)
    return str(getattr(value, "__name__", value))


def _choices(hint: Any) -> str:
    return f" [{', '.join(map(str, get_args(hint)))}]" if get_origin(hint) is Literal else ""
