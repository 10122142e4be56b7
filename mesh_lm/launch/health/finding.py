"""What a health check returns, and how all checks of a node are run at once, within a limited time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

LIMIT = 60.0
"""Seconds after which a check that has not returned has no result."""
_LONGEST = 300


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    outcome: Literal["ok", "failed", "unknown"]
    text: str = ""
    """One line: what was found, and for a failure what to do."""


Result = tuple[Literal["ok", "failed", "unknown"], str]
"""What a check returns: the outcome, and one line."""
Check = Callable[[], Result]


class Examination:
    """One run of all checks, each in a thread of its own."""

    def __init__(self, checks: Mapping[str, Check], limit: float = LIMIT) -> None:
        """Starts them. limit: seconds."""
        self._found: dict[str, Finding] = {}
        self._checks, self._limit, self._began = checks, limit, time.monotonic()
        for name in checks:
            threading.Thread(target=self._run, args=(name,), daemon=True).start()  # one that hangs on a dead disk cannot be ended

    def _run(self, name: str) -> None:
        try:
            outcome, text = self._checks[name]()
        except Exception as error:
            outcome, text = "unknown", f"{type(error).__name__}: {error}"
        self._found[name] = Finding(name, outcome, one_line(text))

    def findings(self) -> list[Finding] | None:
        """Returns the result of each check; None while one of them runs and has time left."""
        found = {**self._found}
        if len(found) < len(self._checks) and time.monotonic() - self._began < self._limit:
            return None
        late = f"no answer within {self._limit:g} s"
        return [found.get(name, Finding(name, "unknown", late)) for name in self._checks]


def one_line(text: str) -> str:
    """Returns a text as the launchers' messages accept it: one printable line of at most 300 characters."""
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:_LONGEST]
