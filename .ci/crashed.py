"""Prints the tests that a worker of pytest ran when it crashed, a line each; of the output of
`pytest -n`, which is the argument.

Exits with 1 if there are none, or if anything else has failed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_CRASH = re.compile(r"^worker '\w+' crashed while running '(.+)'$", re.MULTILINE)
_FAILED = re.compile(r"\b(\d+) (?:failed|errors?)\b")


def crashed(text: str) -> list[str]:
    """Returns the tests; empty if anything else has failed, too."""
    tests = _CRASH.findall(text)
    summary = text.strip().rpartition("\n")[2]
    n_failed = sum(map(int, _FAILED.findall(summary)))
    return tests if n_failed == len(tests) else []


if __name__ == "__main__":
    found = crashed(Path(sys.argv[1]).read_text(encoding="utf-8", errors="replace"))
    print("\n".join(found))
    sys.exit(not found)
