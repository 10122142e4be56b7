"""The docstrings of a dataclass's fields, which Python does not keep."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap


def field_docs(cls: type) -> dict[str, str]:
    """Returns the docstring of each field of a dataclass and its bases: the string that stands
    below it.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):  # a class that was made at run time
            continue
        assert isinstance(body, ast.ClassDef)
        for statement, after in zip(body.body, body.body[1:], strict=False):
            if not (
                isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            ):
                continue
            if (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                found[statement.target.id] = after.value.value
    return found


def first_sentence(text: str) -> str:
    """Returns the first sentence of a docstring, without its full stop."""
    return re.split(r"(?<=\.)\s+(?=[A-Z\d])", " ".join(text.split()), maxsplit=1)[0].removesuffix(
        "."
    )
