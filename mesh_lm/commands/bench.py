"""mesh-lm bench [NAME]: the measurements of this repository, each a script in benchmarks/."""

from __future__ import annotations

import ast
import difflib
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mesh_lm.errors import ConfigError, did_you_mean

Request = tuple[str, list[str]]
_HELP = """usage: mesh-lm bench [NAME [argument ...]]

Runs benchmarks/NAME.py; without a name, lists what there is. mesh-lm bench NAME --help lists its options."""


def parse(argv: Sequence[str], prog: str = "mesh-lm bench") -> Request:
    """The benchmark's name, empty for the list of them, and its own arguments. Raises
    ConfigError.
    """
    if argv and argv[0] in ("-h", "--help"):
        print(_HELP)
        raise SystemExit(0)
    name, rest = (argv[0].removesuffix(".py"), list(argv[1:])) if argv else ("", [])
    known = scripts()
    if name and name not in known:
        raise ConfigError(
            f"{prog} {name}: no such "
            f"benchmark{did_you_mean(difflib.get_close_matches(name, known, n=1))}; see {prog}"
        )
    return name, rest


def run(asked: Request) -> int:
    """The status of the benchmark; 0 after the list."""
    name, rest = asked
    if name:
        return subprocess.call(
            [sys.executable, _directory() / f"{name}.py", *rest], cwd=_directory().parent
        )
    known = scripts()
    for each, about in known.items():
        print(f"  {each.ljust(max(map(len, known)))}  {about}")
    return 0


def scripts() -> dict[str, str]:
    """Name -> the first sentence of its docstring, of every script that can be run by itself.
    Raises ConfigError where there are none.
    """
    found = {}
    for file in sorted(_directory().glob("*.py")):
        text = file.read_text(encoding="utf-8")
        # those are started by others
        if "__main__" in text and not file.stem.endswith(("_worker", "_peers")):
            found[file.stem] = (
                (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0].partition(". ")[0]
            )
    return found


def _directory() -> Path:
    directory = Path(__file__).resolve().parents[2] / "benchmarks"
    if not (directory / "record.py").is_file():
        raise ConfigError(
            f"the benchmarks are not installed with the package (no {directory}); clone the "
            "repository and run this there"
        )
    return directory
