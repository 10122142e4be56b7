"""What would make a program fit: changes and pairs of them are compiled, several at once, and
ranked by their predicted step time.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import numpy as np

from sharding_rules.lab.child import TURN, server
from sharding_rules.lab.report import LabError, Report

GOOD = 1.1
"""Predicted step time over that of the program as it is: once a change or pair that costs no more
fits, the search ends."""
MOST = 12
"""Programs that a search compiles at most."""
_MARGIN = 1.02
"""Share of the memory by which an estimate may exceed it and still be worth compiling."""
_CHILD = 3 * 2**30
"""Bytes of this machine's memory that are left for each program that compiles; gpt_175b on 1,024
takes 0.6 GiB."""


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
        return (
            f"{self.text}: {self.report.peak_bytes / 2**30:.1f} GiB, {self.saves / 2**30:.1f} "
            f"less{time}; {end}"
        )


def rank(
    report: Report,
    candidates: Iterable[Candidate],
    *,
    say: Callable[[str], None] = lambda text: None,
    workers: int = 0,
) -> tuple[Fix, ...]:
    """The changes that help: those that fit first, the cheapest in predicted step time before; then
    those that save most.

    Single changes are compiled first. From them the memory and time of pairs, and of microbatches
    in between, are estimated; the cheapest that should fit are compiled. The search ends with one
    that fits at GOOD, with MOST programs, or when it is interrupted (control-C). A change that does
    not compile, or saves nothing, is left out.

    Args:
      say: told what is being compiled, and why the search ends.
      workers: programs that compile at once; 0: as many as this machine has cores and memory for.
    """
    search = _Search(report, list(candidates), say, workers or parallel())
    try:
        search.run()
    except KeyboardInterrupt:
        say(f"interrupted: {search.left} changes and pairs were not tried")
    return tuple(
        sorted(
            search.fixes.values(),
            key=lambda fix: (
                not fix.fits,
                (fix.cost or 1.0) if fix.fits else -fix.saves,
                -fix.saves,
            ),
        )
    )


def parallel() -> int:
    """How many programs may compile at once here: by the cores and the memory that is free, at
    least one.
    """
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        free = next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
    except (OSError, StopIteration, ValueError):  # not Linux
        free = _CHILD * (os.cpu_count() or 1)
    return max(1, min(os.cpu_count() or 1, free // _CHILD))


class _Search:
    def __init__(
        self, report: Report, candidates: list[Candidate], say: Callable[[str], None], workers: int
    ) -> None:
        self.report, self.say, self.workers = report, say, workers
        self.candidates = candidates
        self.fixes: dict[str, Fix] = {}
        self.tried: dict[str, Report | None] = {}
        """By text; None where it does not compile."""

    @property
    def left(self) -> int:
        return len({one.text for one in self.candidates} - self.tried.keys())

    def run(self) -> None:
        for first in (True, False):
            mine = [one for one in self.candidates if one.first or not first]
            singles = [one for one in mine if not one.parts]
            ends = _ends([one for one in singles if one.scale != 1])
            self._compile(
                [
                    one
                    for one in singles
                    if (one.scale == 1 or one in ends) and one.text not in self.tried
                ]
            )
            while len(self.tried) < MOST and (promising := self._promising(mine)):
                self._compile(promising[: self.workers])
            if self._best() <= GOOD or len(self.tried) >= MOST:
                break
        if self.left:
            self.say(
                f"the search ends: {self.left} more changes and pairs are estimated to be dearer, "
                "or not to fit, or were not tried"
            )

    def _best(self) -> float:
        """The least cost of what fits."""
        return min(
            (fix.cost or 1.0 for fix in self.fixes.values() if fix.fits), default=float("inf")
        )

    def _compile(self, candidates: Sequence[Candidate]) -> None:
        candidates = candidates[: max(0, MOST - len(self.tried))]
        threads = ThreadPoolExecutor(self.workers)
        running = {threads.submit(self._try, one): one for one in candidates}
        try:
            for done in as_completed(running):
                self._keep(running[done], done.result())
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            server().close()  # with the children, for which the threads wait
            raise
        threads.shutdown()

    def _try(self, candidate: Candidate) -> Report | LabError:
        # tracing is one thread's at a time; while its child compiles, another has its turn
        with TURN:
            self.say(f"trying {candidate.text}")
            try:
                return candidate.compile()
            except LabError as error:
                return error

    def _keep(self, candidate: Candidate, changed: Report | LabError) -> None:
        if isinstance(changed, LabError):
            self.tried[candidate.text] = None
            self.say(f"{candidate.text} does not compile: {changed}")
            return
        self.tried[candidate.text] = changed
        before, after = self.report.timeline, changed.timeline
        cost = after.step / before.step if before and after and before.step else None
        if (saves := self.report.peak_bytes - changed.peak_bytes) > 0:
            self.fixes[candidate.text] = Fix(candidate.kind, candidate.text, changed, saves, cost)

    # Estimates.

    def _promising(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """Those not tried that should fit and be cheaper than all that do, the cheapest first."""
        estimated = []
        for one in candidates:
            if one.text not in self.tried and (guess := self._estimate(one)):
                peak, cost = guess
                if peak <= _MARGIN * self.report.hbm and cost < min(self._best(), 1e9) * 0.99:
                    estimated.append((cost, peak, one.text, one))
        return [one for *_, one in sorted(estimated, key=lambda each: each[:3])]

    def _estimate(self, candidate: Candidate) -> tuple[float, float] | None:
        """Peak in bytes, and cost; None where one of its changes is not known yet."""
        if (scaled := self._scaled(candidate.scale)) is None:
            return None
        peak, cost, rest = scaled
        for part in candidate.parts or (candidate.text,):
            single = next((one for one in self.candidates if one.text == part), None)
            if single is None or single.scale != 1:
                continue
            if (known := self.tried.get(part)) is None:
                return None
            # What a change saves is of what grows with the batch, where there is such a line, else
            # of everything.
            peak = rest + (peak - rest) * (known.peak_bytes - rest) / (
                self.report.peak_bytes - rest
            )
            cost *= self._cost(known)
        return peak, cost

    def _cost(self, made: Report) -> float:
        before, after = self.report.timeline, made.timeline
        return after.step / before.step if before and after and before.step else 1.0

    def _scaled(self, scale: float) -> tuple[float, float, float] | None:
        """Peak, cost and the part of the peak that does not grow with the batch, of the program
        with so much of the batch at once.

        The peak is a line. The cost has what does not change, what grows with a microbatch (a
        pipeline's bubble), and what grows with the number of microbatches (weights that are
        gathered in each, kernels that get small).
        """
        points = {
            one.scale: made
            for one in self.candidates
            if not one.parts and one.scale != 1 and (made := self.tried.get(one.text))
        }
        if not points:
            return (float(self.report.peak_bytes), 1.0, 0.0) if scale == 1 else None
        points[1.0] = self.report
        x = np.array(list(points))
        peaks = np.array([made.peak_bytes for made in points.values()], float)
        costs = np.array([self._cost(made) for made in points.values()])
        slope, rest = np.polyfit(x, peaks, 1)
        rest = float(np.clip(rest, 0, 0.999 * self.report.peak_bytes))
        terms = [np.ones_like(x), 1 / x, x][: len(x)]
        weights = np.linalg.lstsq(np.stack(terms, 1), costs, rcond=None)[0]
        cost = weights @ np.array([1, 1 / scale, scale][: len(x)])
        return (
            (float(self.report.peak_bytes) if scale == 1 else rest + slope * scale),
            float(cost),
            rest,
        )


def _ends(scaled: Sequence[Candidate]) -> list[Candidate]:
    """The largest and the smallest, from which those in between are estimated."""
    ordered = sorted(scaled, key=lambda one: -one.scale)
    return ordered[:1] + ordered[1:][-1:]
