"""A timeline divided into the pieces that a person looks at.

A piece is one trip of a loop that matters, at its own scale.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sharding_rules.lab.report import Span, Timeline

_HEAVY = 0.25
"""Share of the loop around it from which a loop is a piece of its own."""
_NAMED = 0.25
"""Share of a piece's compute time from which a phase or a part is in its name."""
_NS = 1000
"""Nanoseconds in a microsecond: times are added up as integers."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """A stretch of the schedule that runs `times` times in a step."""

    begin: float
    end: float
    """Microseconds on the timeline."""
    loops: tuple[float, ...]
    """Trip counts of the loops around it, outermost first."""
    spans: tuple[Span, ...]
    """The spans that overlap it."""

    @property
    def times(self) -> float:
        """How often it runs in a step."""
        return math.prod(self.loops)

    @property
    def duration(self) -> float:
        """Microseconds, one time."""
        return self.end - self.begin

    @property
    def total(self) -> float:
        """Microseconds in a step, with all trips of the small loops inside."""
        later_trips = 0
        for span in self.spans:
            if span.stream == "compute":
                later_trips += span.duration * (math.prod(span.loops) - self.times)
        return self.times * self.duration + later_trips

    @property
    def waits(self) -> list[tuple[float, float]]:
        """Intervals (begin, end) in which compute is idle while the network or PCIe is busy."""
        compute = self._busy("compute")
        waits = []
        for begin, end in _union([*self._busy("network"), *self._busy("host")]):
            for busy_begin, busy_end in compute:
                if busy_begin >= end or busy_end <= begin:
                    continue
                if busy_begin > begin:
                    waits.append((begin, busy_begin))
                begin = busy_end
            if begin < end:
                waits.append((begin, end))
        return waits

    @property
    def waiting(self) -> float:
        """Microseconds of `waits` in a step."""
        return self.times * sum(end - begin for begin, end in self.waits)

    @property
    def name(self) -> str:
        """The phases and parts with most of its compute time: recompute and backward of layers."""
        phase_ns = Counter[str]()
        part_ns = Counter[str]()
        for span in self.spans:
            if span.stream == "compute":
                phase_ns[span.where.phase] += round(_NS * span.duration)
                part_ns[span.where.part.split("/")[0]] += round(_NS * span.duration)
        phases = " and ".join(_largest(phase_ns))
        parts = " and ".join(_largest(part_ns))
        if parts == phases:
            parts = ""
        return " of ".join(filter(None, (phases, parts))) or "unnamed"

    def _busy(self, stream: str) -> list[tuple[float, float]]:
        """Returns the disjoint intervals of the piece in which a stream is busy."""
        intervals = []
        for span in self.spans:
            if span.stream == stream:
                end = min(span.start + span.duration, self.end)
                intervals.append((max(span.start, self.begin), end))
        return _union(intervals)


class _Cut(NamedTuple):
    """The begin of a piece, and the loops that it is in."""

    begin: float
    loops: tuple[float, ...]


def pieces(line: Timeline) -> list[Piece]:
    """Returns the timeline in pieces.

    It is divided where a loop begins or ends that takes _HEAVY or more of the time of the one
    around it.
    """
    spans = sorted(line.spans, key=lambda span: (span.start, span.stream))
    ns_by_loops = Counter[tuple[float, ...]]()
    for span in spans:
        for depth in range(len(span.loops) + 1):
            ns_by_loops[span.loops[:depth]] += round(_NS * span.duration * math.prod(span.loops))
    cuts: list[_Cut] = []
    for span in spans:
        loops = _heavy_loops(span, ns_by_loops)
        if not cuts or cuts[-1].loops != loops:
            cuts.append(_Cut(span.start, loops))
    end = max((span.start + span.duration for span in spans), default=0.0)
    ends = [*(cut.begin for cut in cuts[1:]), end] if cuts else []
    return [
        Piece(cut.begin, end, cut.loops, _overlapping(spans, cut.begin, end))
        for cut, end in zip(cuts, ends, strict=True)
        if end > cut.begin
    ]


def _heavy_loops(span: Span, ns_by_loops: Counter[tuple[float, ...]]) -> tuple[float, ...]:
    """Returns the loops around a span, up to the first that takes less than _HEAVY of its outer."""
    for depth in range(len(span.loops)):
        outer = span.loops[:depth]
        if ns_by_loops[span.loops[: depth + 1]] < _HEAVY * ns_by_loops[outer]:
            return outer
    return span.loops


def _overlapping(spans: Sequence[Span], begin: float, end: float) -> tuple[Span, ...]:
    return tuple(span for span in spans if span.start < end and span.start + span.duration > begin)


def _union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def _largest(ns_by_word: Counter[str]) -> Iterator[str]:
    """Yields the words with _NAMED or more of the time that has a name, the largest first."""
    total = sum(ns for word, ns in ns_by_word.items() if word)
    for word, ns in ns_by_word.most_common():
        if word and ns >= _NAMED * total:
            yield word
