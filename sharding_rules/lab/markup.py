"""HTML for the pages: the whole document, sections, and tables whose numbers align and sort.
Everything given as text is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from sharding_rules.lab.summary import Unit

_WHOLE = """<!doctype html>
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
    """The whole page, with its style and script in it. `title` is text, the rest is HTML."""
    style, script = (
        Path(__file__).with_name(f"page.{kind}").read_text(encoding="utf-8")
        for kind in ("css", "js")
    )
    return _WHOLE.format(
        title=escape(title), style=style, script=script, head=head, main=main, foot=foot
    )


def section(name: str, title: str, body: str) -> str:
    """A section of the page, with its heading and its anchor."""
    return f'<section id="{name}">\n<h2>{title}</h2>\n{body}\n</section>\n'


def code(text: str) -> str:
    """Text in a code element, escaped."""
    return f"<code>{escape(text)}</code>"


class Number(str):
    """A number in a table: right-aligned, sorted by its value, with a bar of 0 to 1 behind it."""

    value: float
    bar: float | None

    def __new__(
        cls,
        value: float,
        digits: int = 0,
        before: str = "",
        bar: float | None = None,
        show: str | None = None,
    ) -> Number:
        """The value with `digits` decimals after `before`, or the text `show`."""
        self = super().__new__(cls, f"{before}{value:,.{digits}f}" if show is None else show)
        self.value, self.bar = value, bar
        return self


def amount(n: float, unit: Unit, bar: float | None = None) -> Number:
    """Bytes as a number in the unit of their table."""
    return Number(n / unit.scale, unit.digits, bar=bar)


def table(
    names: Sequence[str],
    lines: Sequence[Sequence[str]],
    *,
    tags: Iterable[str] = (),
    foot: Sequence[str] | None = None,
    cls: str = "",
) -> str:
    """Cells are HTML already."""
    numeric = [
        bool(lines) and all(isinstance(line[i], Number) for line in lines)
        for i in range(len(names))
    ]
    head = "".join(
        f'<th scope="col"{_class(n)}>{name}</th>' for name, n in zip(names, numeric, strict=True)
    )
    tags = list(tags) or [""] * len(lines)
    body = "".join(
        f"<tr {tag}>{''.join(map(_cell, line))}</tr>" for line, tag in zip(lines, tags, strict=True)
    )
    last = f"<tfoot><tr>{''.join(map(_cell, foot))}</tr></tfoot>" if foot else ""
    return (
        '<div class="scroll"><table '
        f'class="{cls}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody>{last}</table></div>'
    )


def _cell(text: str) -> str:
    if not isinstance(text, Number):
        return f"<td>{text}</td>"
    behind = f' style="--bar:{100 * text.bar:.1f}%"' if text.bar is not None else ""
    return (
        f'<td class="n{" behind" * bool(behind)}" data-value="{text.value!r}"{behind}>{text}</td>'
    )


def _class(numeric: bool) -> str:
    return ' class="n"' if numeric else ""
