"""HTML for the pages: the whole document, sections, and tables whose numbers align and sort.

Text that is not HTML yet (the title of a document, code) is escaped; all else is HTML already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from sharding_rules.lab.summary import Unit

_DOCUMENT = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{head}
<main>
{main}</main>
{foot}
<div id="tip" role="tooltip" hidden></div>
<script>
{script}</script>
</body>
</html>
"""


def document(title: str, head: str, main: str, foot: str) -> str:
    """Returns the whole page, with its style and script in it."""
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    script = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
    return _DOCUMENT.format(
        title=escape(title), style=style, script=script, head=head, main=main, foot=foot
    )


def section(name: str, title: str, body: str) -> str:
    """Returns a section of the page, with its heading and its anchor."""
    return f'<section id="{name}">\n<h2>{title}</h2>\n{body}\n</section>\n'


def code(text: str) -> str:
    """Returns text in a code element, escaped."""
    return f"<code>{escape(text)}</code>"


class Number(str):
    """A number in a table: right-aligned, sorted by its value, with a bar of 0 to 1 behind it."""

    value: float
    bar: float | None

    def __new__(
        cls,
        value: float,
        digits: int = 0,
        prefix: str = "",
        bar: float | None = None,
        show: str | None = None,
    ) -> Number:
        """Returns the value with `digits` decimals after `prefix`, or the text `show`."""
        text = f"{prefix}{value:,.{digits}f}" if show is None else show
        number = super().__new__(cls, text)
        number.value = value
        number.bar = bar
        return number


def amount(n: float, unit: Unit, bar: float | None = None) -> Number:
    """Returns bytes as a number in the unit of their table."""
    return Number(n / unit.scale, unit.digits, bar=bar)


def table(
    names: Sequence[str],
    lines: Sequence[Sequence[str]],
    *,
    tags: Iterable[str] = (),
    foot: Sequence[str] | None = None,
    cls: str = "",
) -> str:
    """Returns a table. A column is numeric if all its cells are `Number`s.

    Args:
      names: the heading of each column.
      lines: the cells of each row.
      tags: attributes of each row; empty: none.
      foot: the cells of the last row.
      cls: the classes of the table.
    """
    head = ""
    for column, name in enumerate(names):
        numeric = bool(lines) and all(isinstance(line[column], Number) for line in lines)
        align = ' class="n"' if numeric else ""
        head += f'<th scope="col"{align}>{name}</th>'
    body = ""
    for line, tag in zip(lines, list(tags) or [""] * len(lines), strict=True):
        body += f"<tr {tag}>{''.join(map(_cell, line))}</tr>"
    last = f"<tfoot><tr>{''.join(map(_cell, foot))}</tr></tfoot>" if foot else ""
    return (
        f'<div class="scroll"><table class="{cls}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody>{last}</table></div>"
    )


def _cell(cell: str) -> str:
    if not isinstance(cell, Number):
        return f"<td>{cell}</td>"
    if cell.bar is None:
        return f'<td class="n" data-value="{cell.value!r}">{cell}</td>'
    bar = f"--bar:{100 * cell.bar:.1f}%"
    return f'<td class="n behind" data-value="{cell.value!r}" style="{bar}">{cell}</td>'
