"""The subject of a self-test, and its result, as plain data."""

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
        """A kind; facts: everything that decides which code runs, and the self-test's shapes."""
        return cls(family, json.dumps(facts, sort_keys=True))

    @property
    def values(self) -> dict[str, Any]:
        """The facts as a dict."""
        return json.loads(self.facts)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a self-test. Only kernels that `passed` are used."""

    status: Status
    """untested: the test could not be run."""
    reason: str
    """The end of a sentence whose subject is the kernel or its self-test."""
    report: str = ""
    """The file with the details, if there is one."""

    @property
    def passed(self) -> bool:
        """Whether the kernel may be used."""
        return self.status == "passed"


def worst(verdicts: list[Verdict]) -> Verdict:
    """The worst of one or more verdicts on one kernel: failed, else untested, else passed."""
    order = ("failed", "untested", "passed")
    return min(verdicts, key=lambda verdict: order.index(verdict.status))
