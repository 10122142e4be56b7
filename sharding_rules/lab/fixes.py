"""What would make a program fit.

Changes and pairs of them are compiled, several at once, and ranked by their predicted step time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sharding_rules.lab.report import LabError, Report
from sharding_rules.lab.side_by_side import compiled_side_by_side, parallel

GOOD = 1.1
"""Predicted step time over that of the program as it is: once a change or pair that costs no more
fits, the search ends."""
MOST = 12
"""Programs that a search compiles at most."""

# Share of the memory up to which an estimate is worth compiling.
_MARGIN = 1.02
# A pair must be estimated to cost less than this share of the best that fits.
_CHEAPER = 0.99
# Share of the peak that can be independent of the batch, so that the rest is more than nothing.
_MOST_CONSTANT = 0.999


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A change that may help, or several at once."""

    kind: str
    """remat, microbatch, rule, offload, mesh, ...; of a pair both, with + between them."""
    text: str
    """What to type."""
    compile: Callable[[], Report]
    scale: float = 1.0
    """How much of the batch is held at once, over what the program as it is holds."""
    parts: tuple[str, ...] = ()
    """The texts of the single changes that it combines; empty for one change."""
    first: bool = True
    """Among those that are tried first; the others only where none of these is cheap enough."""


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
        """True if the program fits into memory after this change."""
        return self.report.fits

    def __str__(self) -> str:
        time = f", step time x {self.cost:.2f} (predicted)" if self.cost else ""
        end = "it fits" if self.fits else "not enough by itself"
        host = self.report.host_bytes
        on_host = f", {host / 2**30:.1f} GiB of host memory a device" if host else ""
        return (
            f"{self.text}: {self.report.peak_bytes / 2**30:.1f} GiB, {self.saves / 2**30:.1f} "
            f"less{on_host}{time}; {end}"
        )


def rank(
    report: Report,
    candidates: Iterable[Candidate],
    *,
    say: Callable[[str], None] = lambda text: None,
    workers: int = 0,
) -> tuple[Fix, ...]:
    """Returns the changes that help, best first.

    Those that fit are before the others, the cheapest in predicted step time first; then come those
    that save most.

    Single changes are compiled first. From them the memory and time of pairs, and of microbatches
    in between, are estimated; the cheapest that should fit are compiled. The search ends with one
    that fits at GOOD, with MOST programs, or when it is interrupted (control-C). A change that does
    not compile, or saves nothing, is left out.

    Args:
      report: of the program as it is.
      candidates: changes and pairs of them.
      say: told what is being compiled, and why the search ends.
      workers: programs that compile at once; 0: as many as this machine has cores and memory for.
    """
    search = _Search(report, list(candidates), say, workers or parallel())
    try:
        search.run()
    except KeyboardInterrupt:
        say(f"interrupted: {search.n_untried} changes and pairs were not tried")
    return tuple(sorted(search.fixes.values(), key=_rank))


def _rank(fix: Fix) -> tuple[bool, float, int]:
    cost = (fix.cost or 1.0) if fix.fits else -fix.saves
    return not fix.fits, cost, -fix.saves


class _Estimate(NamedTuple):
    """An estimate of a program that was not compiled."""

    peak: float
    """Bytes."""
    cost: float
    """Predicted step time over that of the program as it is."""
    constant: float
    """Bytes of the peak that do not grow with the batch."""


class _Search:
    def __init__(
        self, report: Report, candidates: list[Candidate], say: Callable[[str], None], workers: int
    ) -> None:
        self.report = report
        self.candidates = candidates
        self.say = say
        self.workers = workers
        self.fixes: dict[str, Fix] = {}
        self.tried: dict[str, Report | None] = {}
        """By text; None where it does not compile."""

    @property
    def n_untried(self) -> int:
        return len({candidate.text for candidate in self.candidates} - self.tried.keys())

    def run(self) -> None:
        """Tries the first candidates; then all, unless one of the first is cheap enough."""
        for candidates in ([one for one in self.candidates if one.first], self.candidates):
            self._compile_singles(candidates)
            while len(self.tried) < MOST:
                promising = self._promising(candidates)
                if not promising:
                    break
                self._compile(promising[: self.workers])
            if self._best_cost() <= GOOD or len(self.tried) >= MOST:
                break
        if self.n_untried:
            self.say(
                f"the search ends: {self.n_untried} more changes and pairs are estimated to be "
                "dearer, or not to fit, or were not tried"
            )

    def _compile_singles(self, candidates: Sequence[Candidate]) -> None:
        """Compiles single changes, and of those that scale the batch both ends.

        Those in between are estimated from them.
        """
        singles = [candidate for candidate in candidates if not candidate.parts]
        scaled = sorted((one for one in singles if one.scale != 1), key=lambda one: -one.scale)
        ends = scaled[:1] + scaled[-1:]
        self._compile(
            [
                candidate
                for candidate in singles
                if (candidate.scale == 1 or candidate in ends) and candidate.text not in self.tried
            ]
        )

    def _best_cost(self) -> float:
        """The least cost of a change that fits; infinite if none does."""
        costs = [fix.cost or 1.0 for fix in self.fixes.values() if fix.fits]
        return min(costs, default=float("inf"))

    def _compile(self, candidates: Sequence[Candidate]) -> None:
        candidates = candidates[: max(0, MOST - len(self.tried))]
        by_text = {candidate.text: candidate for candidate in candidates}
        programs = {text: candidate.compile for text, candidate in by_text.items()}
        for text, result in compiled_side_by_side(programs, self.workers, self.say):
            self._record(by_text[text], result)

    def _record(self, candidate: Candidate, result: Report | LabError) -> None:
        if isinstance(result, LabError):
            self.tried[candidate.text] = None
            self.say(f"{candidate.text} does not compile: {result}")
            return
        self.tried[candidate.text] = result
        saves = self.report.peak_bytes - result.peak_bytes
        if saves > 0:
            self.fixes[candidate.text] = Fix(
                candidate.kind, candidate.text, result, saves, self._cost(result)
            )

    def _cost(self, report: Report) -> float | None:
        """Predicted step time over that of the program as it is; None without estimates."""
        old = self.report.timeline
        new = report.timeline
        return new.step / old.step if old and new and old.step else None

    # Estimates.

    def _promising(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Returns those not tried that should fit and be cheaper than all that do.

        The cheapest is first.
        """
        limit = min(self._best_cost(), 1e9) * _CHEAPER
        promising = []
        for candidate in candidates:
            if candidate.text in self.tried:
                continue
            estimate = self._estimate(candidate)
            if estimate is None or estimate.cost >= limit:
                continue
            if estimate.peak <= _MARGIN * self.report.limit:
                promising.append((estimate.cost, estimate.peak, candidate.text, candidate))
        promising.sort(key=lambda item: item[:3])
        return [candidate for *_, candidate in promising]

    def _estimate(self, candidate: Candidate) -> _Estimate | None:
        """Estimates a change or pair; None where one of its changes is not known yet."""
        estimate = self._estimate_scale(candidate.scale)
        if estimate is None:
            return None
        peak, cost, constant = estimate
        for text in candidate.parts or (candidate.text,):
            part = next((one for one in self.candidates if one.text == text), None)
            if part is None or part.scale != 1:
                continue
            report = self.tried.get(text)
            if report is None:
                return None
            # A change saves a share of what grows with the batch, where it is known how much that
            # is, else of everything.
            growing = self.report.peak_bytes - constant
            peak = constant + (peak - constant) * (report.peak_bytes - constant) / growing
            cost *= self._cost(report) or 1.0
        return _Estimate(peak, cost, constant)

    def _estimate_scale(self, scale: float) -> _Estimate | None:
        """Estimates the program with so much of the batch at once; None if no such is known.

        The peak is a line. The cost has what does not change, what grows with a microbatch (a
        pipeline's bubble), and what grows with the number of microbatches (weights that are
        gathered in each, kernels that get small).
        """
        reports: dict[float, Report] = {}
        for candidate in self.candidates:
            report = self.tried.get(candidate.text)
            if report and not candidate.parts and candidate.scale != 1:
                reports[candidate.scale] = report
        if not reports:
            return _Estimate(float(self.report.peak_bytes), 1.0, 0.0) if scale == 1 else None
        reports[1.0] = self.report

        scales = np.array(list(reports))
        peaks = np.array([report.peak_bytes for report in reports.values()], float)
        slope, intercept = np.polyfit(scales, peaks, 1)
        constant = float(np.clip(intercept, 0, _MOST_CONSTANT * self.report.peak_bytes))
        peak = float(self.report.peak_bytes) if scale == 1 else constant + slope * scale

        # As many terms as there are programs.
        costs = np.array([self._cost(report) or 1.0 for report in reports.values()])
        terms = np.stack([np.ones_like(scales), 1 / scales, scales][: len(scales)], axis=1)
        weights = np.linalg.lstsq(terms, costs, rcond=None)[0]
        cost = weights @ np.array([1, 1 / scale, scale][: len(scales)])
        return _Estimate(peak, float(cost), constant)
