"""What would make a program fit: every candidate is compiled, and ranked by what it is predicted to cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from sharding_rules.lab.report import LabError, Report


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A change that may help."""

    kind: str
    """remat, microbatch, rule, offload, mesh, ..."""
    text: str
    """What to type."""
    compile: Callable[[], Report]


@dataclasses.dataclass(frozen=True)
class Fix:
    """A change that was compiled."""

    kind: str
    text: str
    report: Report
    saves: int
    """Bytes less at the peak."""
    cost: float | None
    """Predicted step time divided by that of the program as it is; None without estimates."""

    @property
    def fits(self) -> bool:
        return self.report.fits

    def __str__(self) -> str:
        time = f", step time x {self.cost:.2f} (predicted)" if self.cost else ""
        end = "it fits" if self.fits else "not enough by itself"
        return f"{self.text}: {self.report.peak_bytes / 2**30:.1f} GiB, {self.saves / 2**30:.1f} less{time}; {end}"


def rank(report: Report, candidates: Iterable[Candidate], *, say: Callable[[str], None] = lambda text: None) -> tuple[Fix, ...]:
    """Compiles each candidate. Those that fit come first, the cheapest in predicted step time before; then those that save most.

    A candidate that does not compile, or saves nothing, is left out. say: told what is being compiled.
    """
    fixes = []
    for candidate in candidates:
        say(f"trying {candidate.text}")
        try:
            changed = candidate.compile()
        except LabError as error:
            say(f"{candidate.text} does not compile: {error}")
            continue
        saves = report.peak_bytes - changed.peak_bytes
        if saves > 0:
            before, after = report.timeline, changed.timeline
            cost = after.step / before.step if before and after and before.step else None
            fixes.append(Fix(candidate.kind, candidate.text, changed, saves, cost))
    return tuple(sorted(fixes, key=lambda fix: (not fix.fits, (fix.cost or 1.0) if fix.fits else -fix.saves, -fix.saves)))
