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
"""The benchmark's name, empty for the list of benchmarks, and its own arguments."""
_HELP = """usage: mesh-lm bench [NAME [argument ...]]

Runs benchmarks/NAME.py; without a name, lists what there is. \
mesh-lm bench NAME --help lists its options."""
_STARTED_BY_OTHERS = ("_worker", "_peers")
"""The ends of the names of scripts that other benchmarks start."""


def parse(argv: Sequence[str], prog: str = "mesh-lm bench") -> Request:
    """Raises ConfigError for an unknown benchmark, and SystemExit after printing the help."""
    if not argv:
        return "", []
    if argv[0] in ("-h", "--help"):
        print(_HELP)
        raise SystemExit(0)
    name = argv[0].removesuffix(".py")
    summaries = scripts()
    if name and name not in summaries:
        similar = difflib.get_close_matches(name, summaries, n=1)
        raise ConfigError(
            f"{prog} {name}: there is no such benchmark{did_you_mean(similar)}; see {prog}"
        )
    return name, list(argv[1:])


def run(request: Request) -> int:
    """Returns the status of the benchmark; 0 after the list."""
    name, arguments = request
    if name:
        script = _directory() / f"{name}.py"
        return subprocess.call([sys.executable, script, *arguments], cwd=script.parents[1])
    summaries = scripts()
    width = max(map(len, summaries))
    for script_name, summary in summaries.items():
        print(f"  {script_name.ljust(width)}  {summary}")
    return 0


def scripts() -> dict[str, str]:
    """Returns the name of every script that can be run by itself -> its docstring's first sentence.

    Raises ConfigError if the benchmarks are not installed.
    """
    summaries = {}
    for file in sorted(_directory().glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "__main__" in text and not file.stem.endswith(_STARTED_BY_OTHERS):
            docstring = ast.get_docstring(ast.parse(text)) or ""
            summaries[file.stem] = docstring.partition("\n")[0].partition(". ")[0]
    return summaries


def _directory() -> Path:
    directory = Path(__file__).resolve().parents[2] / "benchmarks"
    if not (directory / "record.py").is_file():
        raise ConfigError(
            f"the benchmarks are not installed with the package (no {directory}); clone the "
            "repository and run this there"
        )
    return directory
