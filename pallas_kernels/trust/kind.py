"""What a self-test is about, and its result, as plain data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Literal

Status = Literal["passed", "failed", "untested"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of call, all of whose members run the same kernels. Make it with `Kind.of`."""

    family: str
    """A name of `self_test.FAMILIES`."""
    facts: str
    """JSON that the family's check understands."""

    @classmethod
    def of(cls, family: str, facts: dict[str, Any]) -> Kind:
        """A kind; facts: what decides which code runs, and the shapes of the self-test."""
        return cls(family, json.dumps(facts, sort_keys=True))

    @property
    def values(self) -> dict[str, Any]:
        """The facts as a dict."""
        return json.loads(self.facts)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a self-test. Only kernels that `passed` are used; `untested`: the test could
    not be run.
    """

    status: Status
    reason: str
    """What happened; the subject is the kernel or its self-test, named elsewhere."""
    report: str = ""
    """The file with the details, if there is one."""

    @property
    def passed(self) -> bool:
        """Whether the kernel may be used."""
        return self.status == "passed"


def worst(verdicts: list[Verdict]) -> Verdict:
    """The worst of several verdicts on one kernel: a failure before a missing test before a
    success. The list must not be empty.
    """
    return min(verdicts, key=lambda verdict: ("failed", "untested", "passed").index(verdict.status))
