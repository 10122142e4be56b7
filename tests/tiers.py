"""The tiers of tests, each a marker expression of pytest: what runs on every change, what CI adds,
and what a complete run adds.

- fast: plain `pytest`. Its expression is the default of pyproject.toml, from where it is read.
- ci: the slow part of CI, after the fast tests (.ci/run). Of the faults CI runs those of one file,
  `CI_FAULTS`.
- full: what only benchmarks/full_run.py runs, beside all faults.

`python tests/tiers.py ci` prints the expression of a tier, for a shell.
"""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Set
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]


def _default() -> str:
    """Returns the marker expression that pytest uses where none is given."""
    options = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "pytest"
    ]["ini_options"]
    words = shlex.split(options["addopts"])
    return words[words.index("-m") + 1]


FAST = _default()
CI = "(slow or deviceless) and not exhaustive and not gpu and not fault"
FULL = "exhaustive and not gpu and not fault"
FAULTS = "fault"
TIERS = {"fast": FAST, "ci": CI, "full": FULL, "faults": FAULTS}
"""Name -> expression. A test that needs no GPU is in one of them. One that is marked deviceless and
not slow is in two, because CI skips no such test in its slow part."""
CI_FAULTS = "tests/fault/test_corruption.py"
"""The only file of faults that CI runs, with the expression `FAULTS`: the others kill processes,
and have time limits in seconds."""


def ci_selects(file: str) -> str:
    """Returns the expression that selects those tests of a file, named by its path in the
    repository, that some run of CI selects."""
    if file == CI_FAULTS:
        return FAULTS
    return f"({FAST}) or ({CI})"


def selects(expression: str, marks: Set[str]) -> bool:
    """Whether a marker expression selects a test with these marks. tests/conftest.py marks what is
    exhaustive as slow."""
    implied = {"slow"} if "exhaustive" in marks else set()
    known = {
        name: name in marks | implied
        for name in re.findall(r"\w+", expression)
        if name not in ("and", "or", "not")
    }
    return bool(eval(expression, {"__builtins__": {}}, known))


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in TIERS:
        sys.exit(f"usage: python tests/tiers.py {'|'.join(TIERS)}")
    print(TIERS[sys.argv[1]])
