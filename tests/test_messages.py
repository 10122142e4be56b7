"""The message of an error leads to its source: 25 characters of it are where it is raised, and in
no other place.
"""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("mesh_lm", "sharding_rules", "pallas_kernels")
WIDTH = 25
"""Characters of a message that someone searches for."""

HEAD = "It is the head of a list, and each line of the list can be found."
PASSED_ON = "It says what another message is about, and that message can be found."
PART = (
    "It is a part of a sentence whose other part can be found, in the function that completes it."
)
INTERNAL = "No user sees it."
NOT_YET = "It has not been written for this rule yet."
EXCEPTIONS = {
    ("mesh_lm/commands/formulas.py", ""): INTERNAL,
    ("mesh_lm/commands/meanings.py", ""): INTERNAL,
    ("mesh_lm/commands/options.py", "bad command line"): HEAD,
    ("mesh_lm/config/resolved.py", "--config="): PASSED_ON,
    ("mesh_lm/data/index_cache.py", "CRC-32 of "): PART,
    ("mesh_lm/data/index_cache.py", " is missing"): PART,
    ("mesh_lm/distributed/processes.py", "process "): PASSED_ON,
    ("mesh_lm/launch/job.py", "bad command line"): HEAD,
    ("mesh_lm/model/attention.py", "model.attention="): PASSED_ON,
    ("mesh_lm/schedules/stages.py", "pipeline.layers="): PASSED_ON,
    ("mesh_lm/strict_json.py", "longer than "): PART,
    ("mesh_lm/strict_json.py", "nested deeper than "): PART,
    ("mesh_lm/strict_json.py", "nested too deeply"): PART,
    ("mesh_lm/strict_json.py", "expected "): PART,
    ("mesh_lm/training/check.py", "this config cannot run"): HEAD,
    ("mesh_lm/training/session.py", "this run cannot start"): HEAD,
    ("pallas_kernels/attention/hopper/backward_sweep.py", "stages is at least 1"): INTERNAL,
    ("pallas_kernels/attention/hopper/spec.py", "no ref "): INTERNAL,
    ("pallas_kernels/attention/problem.py", "flash_attention: "): HEAD,
    ("pallas_kernels/dev/", ""): INTERNAL,
    ("pallas_kernels/grouped_matmul.py", "grouped_matmul: "): HEAD,
    ("pallas_kernels/stacked_matmul.py", "stacked_matmul: "): HEAD,
    ("pallas_kernels/stacked_matmul.py", "add_weight_gradient: "): HEAD,
    ("sharding_rules/lab/", ""): NOT_YET,
}
"""Beginning of a path, and words of its messages ("": all) -> why they need not be found."""


class Message(NamedTuple):
    """A text that is raised, or that a module of problems yields."""

    file: str
    source: str
    """The lines that make it."""
    parts: tuple[str, ...]
    """The text between its values, across the line breaks of the source."""


def messages(file: str, source: str) -> Iterator[Message]:
    """Yields the messages of a file that have words.

    One that only puts values together, as f"{file}: {error}" does, has its words elsewhere.
    """
    lines = source.splitlines()
    for statement in _statements(ast.parse(source)):
        match statement:
            case ast.Raise(exc=ast.Call(args=[text, *_])):
                pass
            case ast.Expr(value=ast.Yield(value=ast.expr() as text)) if "problems" in file:
                pass
            case _:
                continue
        parts = tuple(_parts(text))
        if any(character.isalpha() for part in parts for character in part):
            yield Message(file, "\n".join(lines[text.lineno - 1 : text.end_lineno]), parts)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements in a node. It does not visit expressions, which would take long."""
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        for statement in getattr(node, block, []):
            yield statement
            yield from _statements(statement)


def _parts(text: ast.AST) -> Iterator[str]:
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        yield text.value
    elif not isinstance(text, ast.Subscript):  # its string is a key
        for node in ast.iter_child_nodes(text):
            yield from _parts(node)


def is_found(message: Message, sources: str) -> bool:
    """Returns whether some WIDTH characters of a message are in its lines, and in no others.

    A literal that is split over two lines is two: what spans the split is not in the source.
    """
    for part in message.parts:
        for start in range(len(part) - WIDTH + 1):
            window = part[start : start + WIDTH]
            if window in message.source and sources.count(window) == 1:
                return True
    return False


@functools.cache
def not_found() -> list[Message]:
    """Returns the messages of this project that cannot be found."""
    paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    sources = "\n".join(texts.values())
    return [
        message
        for file, text in texts.items()
        for message in messages(file, text)
        if not is_found(message, sources)
    ]


def is_about(message: Message, exception: tuple[str, str]) -> bool:
    """Returns whether an exception names a message."""
    path, words = exception
    return message.file.startswith(path) and any(words in part for part in message.parts)


def test_messages_are_found() -> None:
    wrong = [
        f"{message.file}: {message.source.strip()}"
        for message in not_found()
        if not any(is_about(message, exception) for exception in EXCEPTIONS)
    ]
    assert not wrong, (
        f"no {WIDTH} characters of these messages are on one line of the source and in one place; "
        "reorder the sentence, say more precisely what is wrong, or let one function raise it:\n"
        + "\n".join(wrong)
    )


@pytest.mark.parametrize("exception", EXCEPTIONS, ids=" ".join)
def test_exceptions_are_needed(exception: tuple[str, str]) -> None:
    assert any(is_about(message, exception) for message in not_found()), (
        f"remove it from EXCEPTIONS: {exception}"
    )


LONG = "there are no prompts to continue"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (f'raise ValueError("{LONG}")', [True]),
        (f'raise ValueError(f"{{name}}: {LONG} in {{file}}")', [True]),
        (f'raise ValueError(\n    "; ".join(["{LONG}", *problems])\n)', [True]),
        (
            f'if a:\n    raise ValueError("{LONG}")\nelse:\n    raise ValueError("{LONG}")',
            [False] * 2,
        ),
        (f'raise ValueError("{LONG}")  # {LONG}', [False]),
        ('raise ValueError("no prompts")', [False]),
        ('raise ValueError("there are no prompts "\n    "to continue")', [False]),
        ('raise ValueError(f"there are no {name} to continue from {file}")', [False]),
        (f'try:\n    f()\nexcept E as e:\n    raise ValueError("{LONG[:20]}") from e', [False]),
        (f'def problems():\n    yield "{LONG}"\n    yield f"no {{name}}"', [True, False]),
        ('raise ValueError(f"{file}: {error}")\nraise ValueError(message["problem"])', []),
        ("raise ValueError(text)\nraise Missing\nraise\nx = yield\nyield", []),
    ],
)
def test_what_is_found(source: str, expected: list[bool]) -> None:
    found = [is_found(message, source) for message in messages("problems.py", source)]
    assert found == expected


def test_only_modules_of_problems_yield_messages() -> None:
    assert list(messages("lines.py", 'def lines():\n    yield "no prompts"')) == []
