"""The docstrings of a dataclass's fields, which Python does not keep."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap


def field_docs(cls: type) -> dict[str, str]:
    """Returns the docstring of each field of a dataclass and its bases: the string below it."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            node = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, TypeError, SyntaxError):  # a class that was made at run time
            continue
        assert isinstance(node, ast.ClassDef)
        for statement, next_statement in itertools.pairwise(node.body):
            match statement, next_statement:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    docs[name] = doc
    return docs


def first_sentence(text: str) -> str:
    """Returns the first sentence of a docstring, without its full stop."""
    line = " ".join(text.split())
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z\d])", line, maxsplit=1)[0]
    return sentence.removesuffix(".")
