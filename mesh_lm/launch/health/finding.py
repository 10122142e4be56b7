"""The result of a health check, and an examination, which runs all checks of a node at once, within
a limited time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

LIMIT = 60.0
"""Seconds after which a check that has not returned has no result."""
_LONGEST = 300
"""Characters of a line."""

Outcome = Literal["ok", "failed", "unknown"]
Result = tuple[Outcome, str]
"""The outcome of a check, and one line."""
Check = Callable[[], Result]


class Finding(NamedTuple):
    """The result of one check."""

    check: str
    outcome: Outcome
    text: str = ""
    """One line: what was found, and for a failure what to do."""


class Examination:
    """One run of all checks, each in a thread of its own.

    A check that hangs on a dead disk cannot be ended, and is not started again.
    """

    def __init__(
        self, checks: Mapping[str, Check], limit: float = LIMIT, previous: Examination | None = None
    ) -> None:
        """Starts the checks.

        limit: seconds that each may take. previous: the last examination; a check that still runs
        since then is waited for instead.
        """
        running: dict[str, _Running] = {}
        if previous:
            running = {name: run for name, run in previous._running.items() if run.is_alive()}
        self._running = {
            name: running.get(name) or _Running(name, check) for name, check in checks.items()
        }
        self._limit = limit

    def findings(self) -> list[Finding] | None:
        """Returns the result of each check; None while one of them runs and has time left."""
        findings = []
        for name, running in self._running.items():
            finding = running.finding
            if finding is None:
                if time.monotonic() - running.started_at < self._limit:
                    return None
                finding = Finding(name, "unknown", f"no answer within {self._limit:g} s")
            findings.append(finding)
        return findings


class _Running(threading.Thread):
    """A check that was started. Its result is `finding`, once there is one."""

    def __init__(self, name: str, check: Check) -> None:
        super().__init__(daemon=True)
        self._check_name = name
        self._check = check
        self.started_at = time.monotonic()
        self.finding: Finding | None = None
        try:
            self.start()
        except RuntimeError as error:  # the system has no thread left
            self.finding = Finding(name, "unknown", one_line(str(error)))

    def run(self) -> None:
        try:
            outcome, text = self._check()
        except Exception as error:
            outcome = "unknown"
            text = f"{type(error).__name__}: {error}"
        self.finding = Finding(self._check_name, outcome, one_line(text))


def one_line(text: str) -> str:
    """Returns a text as the launchers' messages accept it: one printable line of at most 300
    characters.
    """
    line = " ".join(text.split())
    return "".join(letter if letter.isprintable() else "?" for letter in line)[:_LONGEST]
