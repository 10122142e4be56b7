"""Calls that read or write text in the encoding of the locale, where the same file would have other
characters on another machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_DIRECTORIES = (
    "mesh_lm",
    "sharding_rules",
    "pallas_kernels",
    "configs",
    "benchmarks",
    "tests",
    "docs",
    ".ci",
)
FILES = sorted(
    [
        ROOT / "train.py",
        *(
            path
            for directory in _DIRECTORIES
            for path in (ROOT / directory).rglob("*.py")
            if path.is_file()
        ),
    ]
)
_CANDIDATE = re.compile(
    r"open\(|read_text\(|write_text\(|NamedTemporaryFile\(|TemporaryFile\(|TextIOWrapper\("
)
_MODE = re.compile(r"[rwxa]\+?t?")
_OPENERS = {
    "os",
    "ts",
    "gzip",
    "bz2",
    "lzma",
    "tarfile",
    "zipfile",
    "webbrowser",
    "KvStore",
    "Image",
}
"""What has an `open` whose arguments are not those of the built-in one."""


def unspecified(source: str) -> Iterator[ast.Call]:
    """Yields the calls of `open`, `Path.open`, `read_text`, `write_text` and their like that open
    text without an encoding."""
    if not _CANDIDATE.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and _opens_text(node)
            and not any(word.arg in ("encoding", None) for word in node.keywords)
        ):
            yield node


def _opens_text(call: ast.Call) -> bool:
    function = call.func
    if isinstance(function, ast.Name):
        name, owner = function.id, ""
    elif isinstance(function, ast.Attribute):
        name, owner = (
            function.attr,
            getattr(function.value, "id", getattr(function.value, "attr", "")),
        )
    else:
        return False
    if name == "read_text":
        return not call.args
    if name == "write_text":
        return len(call.args) == 1
    if (
        name == "fdopen"
        or (name == "open" and not isinstance(function, ast.Attribute))
        or (name == "open" and owner == "io")
    ):
        return _MODE.fullmatch(_mode(call, 1, "r")) is not None
    if name == "open":
        return (
            owner not in _OPENERS
            and len(call.args) < 2
            and _MODE.fullmatch(_mode(call, 0, "r")) is not None
        )
    if name in ("NamedTemporaryFile", "TemporaryFile"):
        return _MODE.fullmatch(_mode(call, 0, "w+b")) is not None
    return name == "TextIOWrapper"


def _mode(call: ast.Call, position: int, default: str) -> str:
    """The mode of an `open`; one that is not a literal counts as binary."""
    given = [word.value for word in call.keywords if word.arg == "mode"] + call.args[
        position : position + 1
    ]
    if not given:
        return default
    return (
        given[0].value
        if isinstance(given[0], ast.Constant) and isinstance(given[0].value, str)
        else "b"
    )
