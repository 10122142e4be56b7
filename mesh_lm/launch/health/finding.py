"""What a health check returns, and how all checks of a node are run at once, within a limited
time.
"""

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
    """One run of all checks, each in a thread of its own. One that hangs on a dead disk cannot be
    ended, and is not started again.
    """

    def __init__(
        self, checks: Mapping[str, Check], limit: float = LIMIT, before: Examination | None = None
    ) -> None:
        """Starts them. limit: seconds. before: the last examination; a check that still runs since
        then is waited for instead.
        """
        running = (
            {name: each for name, each in before._running.items() if each.is_alive()}
            if before
            else {}
        )
        self._running = {
            name: running.get(name) or _Running(name, check) for name, check in checks.items()
        }
        self._limit = limit

    def findings(self) -> list[Finding] | None:
        """Returns the result of each check; None while one of them runs and has time left."""
        found = {name: each.finding for name, each in self._running.items()}
        if any(
            found[name] is None and time.monotonic() - each.began < self._limit
            for name, each in self._running.items()
        ):
            return None
        late = f"no answer within {self._limit:g} s"
        return [each or Finding(name, "unknown", late) for name, each in found.items()]


class _Running(threading.Thread):
    """A check that was started. Its result is `finding`, once there is one."""

    def __init__(self, name: str, check: Check) -> None:
        super().__init__(daemon=True)
        self._check, self._about, self.began = check, name, time.monotonic()
        self.finding: Finding | None = None
        try:
            self.start()
        except RuntimeError as error:  # the system has no thread left
            self.finding = Finding(name, "unknown", one_line(str(error)))

    def run(self) -> None:
        try:
            outcome, text = self._check()
        except Exception as error:
            outcome, text = "unknown", f"{type(error).__name__}: {error}"
        self.finding = Finding(self._about, outcome, one_line(text))


def one_line(text: str) -> str:
    """Returns a text as the launchers' messages accept it: one printable line of at most 300
    characters.
    """
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:_LONGEST]
