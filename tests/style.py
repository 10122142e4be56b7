"""Finds words of docs/style_words.toml in Markdown and in Python's docstrings, comments and
messages: python tests/style.py FILE..."""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = ROOT / "docs" / "style_words.toml"
LONGEST = 120
"""Columns of a line of prose."""


@dataclass(frozen=True)
class Word:
    pattern: re.Pattern[str]
    instead: str
    allowed: tuple[re.Pattern[str], ...]

    def hits(self, text: str) -> list[str]:
        """The matches in a text that are not inside a context where the word is allowed."""
        fine = [match.span() for pattern in self.allowed for match in pattern.finditer(text)]
        return [
            match[0]
            for match in self.pattern.finditer(text)
            if not any(start <= match.start() and match.end() <= end for start, end in fine)
        ]


@functools.cache
def words() -> tuple[Word, ...]:
    """The list, compiled. Raises KeyError where an allowed context has no reason."""
    rows = tomllib.loads(WORDS.read_text(encoding="utf-8"))["word"]
    return tuple(
        Word(
            re.compile(row["pattern"], re.I),
            row["instead"],
            tuple(_allowed(one) for one in row.get("allow", ())),
        )
        for row in rows
    )


def _allowed(row: dict[str, str]) -> re.Pattern[str]:
    assert row["why"], row
    return re.compile(row["context"], re.I)


def found(text: str) -> list[str]:
    """A line for each private word in a text: the word in its context, and what to write
    instead."""
    plain = " ".join(text.split())
    return [f"{hit!r}: {word.instead}" for word in words() for hit in word.hits(plain)]


def paragraphs(markdown: str) -> Iterator[tuple[int, str]]:
    """(number of the first line, text) of each paragraph, table row and heading: without code,
    comments and the targets of links."""
    kept, fence = [], ""
    for line in re.sub(
        r"<!--.*?-->", lambda match: "\n" * match[0].count("\n"), markdown, flags=re.S
    ).splitlines():
        mark = re.match(r"\s*(```|~~~)", line)
        if mark:
            fence = "" if fence else mark[1]
        kept.append(
            "" if mark or fence else re.sub(r"\]\([^)]*\)", "]", re.sub(r"`+[^`]*`+", "`", line))
        )
    start, lines = 1, []
    for number, line in enumerate([*kept, ""], 1):
        alone = line.startswith(("|", "#"))
        if lines and (alone or not line.strip()):
            yield start, " ".join(lines)
            lines = []
        if alone:
            yield number, line
        elif line.strip():
            start, lines = (start, lines) if lines else (number, lines)
            lines.append(line)


def long_lines(markdown: str) -> list[int]:
    """The numbers of lines of prose over LONGEST columns: not those of code, tables, headings,
    images and HTML."""
    fence, numbers = False, []
    for number, line in enumerate(markdown.splitlines(), 1):
        if re.match(r"\s*(```|~~~)", line):
            fence = not fence
        elif not fence and len(line) > LONGEST and not re.match(r"\s*(\||#|!\[|<|    )", line):
            numbers.append(number)
    return numbers


def documentation(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings, those of fields and constants included, which --help prints, and
    of comments."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def messages(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of what a program may print: each string of three words or more that is no
    docstring. Values in it are `x`."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if id(node) in documentation | inside:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values
            )
        else:
            continue
        if len(re.findall(r"[a-z]{2,}", text)) > 2:
            yield node.lineno, text


def problems(path: Path) -> list[str]:
    """FILE:LINE and what is wrong there, for a Markdown page or a Python file."""
    text = path.read_text(encoding="utf-8")
    parts = (
        paragraphs(text)
        if path.suffix == ".md"
        else sorted([*documentation(text), *messages(text)])
    )
    said = [f"{path}:{line}: {problem}" for line, part in parts for problem in found(part)]
    if path.suffix == ".md":
        said += [f"{path}:{line}: over {LONGEST} columns" for line in long_lines(text)]
    return said


def main(names: list[str]) -> int:
    """Prints what it finds in files, and in the .md and .py files of directories. Returns 1 where
    that is anything."""
    files = [
        file
        for name in map(Path, names)
        for file in (sorted(name.glob("**/*")) if name.is_dir() else [name])
    ]
    said = [
        problem for file in files if file.suffix in (".md", ".py") for problem in problems(file)
    ]
    print(*said, f"{len(said)} in all", sep="\n")
    return bool(said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
