"""What a planted bug is: a program, the mistake made in it, what the mistake costs, and what lint
must say of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import pytest

from sharding_rules import Rules
from sharding_rules.lab import Report
from sharding_rules.lab.lint import Finding, lint

H100S = 16


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A report, and what lint is told beside it."""

    report: Report
    rules: Rules | None = None
    axes: Mapping[str, Sequence[str | None]] | None = None

    def findings(self) -> tuple[Finding, ...]:
        return lint(self.report, self.rules, self.axes)


class Program(Protocol):
    """Something that can be compiled for H100s; `reports` is a directory that keeps reports."""

    @property
    def name(self) -> str: ...

    def compile(self, reports: str) -> Compiled: ...


@dataclasses.dataclass(frozen=True)
class Plant:
    """A mistake in one program."""

    name: str
    mistake: str
    """What somebody did wrong, in a sentence."""
    healthy: Program
    plant: Callable[[pytest.MonkeyPatch], Program]
    """Makes the mistake, in the modules that it is a mistake of, and returns what to compile."""
    costs: Mapping[str, float]
    """What the mistake does to the compiled program, as the least ratio to the healthy one: see
    `MEASURES`."""
    check: str
    """The finding that names it; several, where each would, have "|" between them."""
    says: Sequence[str]
    """What the text or fix of one such finding must have in it, each of them."""

    def effect(self, reports: str, planted: Compiled) -> dict[str, float]:
        """The ratios that the mistake really has, by the names in `costs`."""
        healthy = self.healthy.compile(reports).report
        return {
            name: MEASURES[name](planted.report) / MEASURES[name](healthy) for name in self.costs
        }

    def named_by(self, found: Sequence[Finding]) -> list[Finding]:
        """The findings that name it: of the right check, with all the words, none of them a mere
        notice."""
        mine = [
            one for one in found if one.check in self.check.split("|") and one.severity != "notice"
        ]
        return [one for one in mine if all(word in f"{one.text}\n{one.fix}" for word in self.says)]


MEASURES: dict[str, Callable[[Report], float]] = {
    "wire": lambda report: report.wire_bytes(),
    "peak": lambda report: report.peak_bytes,
    "flops": lambda report: sum(report.flops.values()),
    "step": lambda report: report.timeline.step if report.timeline else 0.0,
}
"""Bytes that a device sends in a step, bytes of memory at the peak, FLOPs of matmuls, predicted
microseconds."""
