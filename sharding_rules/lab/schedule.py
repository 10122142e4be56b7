"""A timeline divided into the pieces that a person looks at: one trip of each loop that matters, at
its own scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from sharding_rules.lab.report import Span, Timeline

_HEAVY = 0.25
"""Share of the loop around it from which a loop is a piece of its own."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of the schedule that runs `times` times in a step."""

    begin: float
    end: float
    """Microseconds on the timeline."""
    loops: tuple[int, ...]
    spans: tuple[Span, ...]
    """The spans that overlap it."""

    @property
    def times(self) -> int:
        """How often it runs in a step."""
        return math.prod(self.loops)

    @property
    def duration(self) -> float:
        """Microseconds, one time."""
        return self.end - self.begin

    @property
    def total(self) -> float:
        """Microseconds in a step, with all trips of the small loops inside."""
        again = sum(
            span.duration * (math.prod(span.loops) - self.times)
            for span in self.spans
            if span.stream == "compute"
        )
        return self.times * self.duration + again

    @property
    def waits(self) -> list[tuple[float, float]]:
        """When compute is idle while the network is busy."""
        busy = _union(self._of("compute"))
        waits = []
        for begin, end in _union(self._of("network")):
            for from_, to in busy:
                if from_ < end and to > begin:
                    if from_ > begin:
                        waits.append((begin, from_))
                    begin = to
            if begin < end:
                waits.append((begin, end))
        return waits

    @property
    def waiting(self) -> float:
        """Microseconds of `waits` in a step."""
        return self.times * sum(end - begin for begin, end in self.waits)

    @property
    def name(self) -> str:
        """The phases and parts that most of its compute time belongs to: recompute and backward of
        layers.
        """
        phases, parts = Counter[str](), Counter[str]()
        for span in self.spans:
            if span.stream == "compute":
                phases[span.where.phase] += round(1000 * span.duration)
                parts[span.where.part.split("/")[0]] += round(1000 * span.duration)
        phase, part = (" and ".join(_most(counted)) for counted in (phases, parts))
        return " of ".join(filter(None, (phase, part if part != phase else ""))) or "unnamed"

    def _of(self, stream: str) -> Iterator[tuple[float, float]]:
        for span in self.spans:
            if span.stream == stream:
                yield max(span.start, self.begin), min(span.start + span.duration, self.end)


def pieces(line: Timeline) -> list[Piece]:
    """Returns the timeline in pieces, divided where a loop begins or ends that takes _HEAVY or more
    of the time of the one around it.
    """
    spans = sorted(line.spans, key=lambda span: (span.start, span.stream))
    weight = Counter[tuple[int, ...]]()
    for span in spans:
        for depth in range(len(span.loops) + 1):
            weight[span.loops[:depth]] += round(1000 * span.duration * math.prod(span.loops))
    cuts: list[tuple[float, tuple[int, ...]]] = []
    for span in spans:
        depths = range(1, len(span.loops) + 1)
        light = (
            depth - 1
            for depth in depths
            if weight[span.loops[:depth]] < _HEAVY * weight[span.loops[: depth - 1]]
        )
        key = span.loops[: next(light, len(span.loops))]
        if not cuts or cuts[-1][1] != key:
            cuts.append((span.start, key))
    end = max((span.start + span.duration for span in spans), default=0.0)
    ends = [*(begin for begin, _ in cuts), end][1:]
    return [
        Piece(begin, to, key, _inside(spans, begin, to))
        for (begin, key), to in zip(cuts, ends, strict=True)
        if to > begin
    ]


def _inside(spans: Sequence[Span], begin: float, end: float) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.start < end and span.start + span.duration > begin)


def _union(intervals: Iterator[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _most(counted: Counter[str]) -> list[str]:
    """The words with a quarter or more of the whole, the largest first; unnamed ones do not
    count.
    """
    named = [(word, n) for word, n in counted.most_common() if word]
    return [word for word, n in named if 4 * n >= sum(n for _, n in named)]
