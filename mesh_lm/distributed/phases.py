"""The phase that a process is in, since when, and its wall time by phase: one clock for the
watchdog, the launcher and goodput.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeVar, get_args

from mesh_lm.network.protocol import PREPARING

Phase = Literal["start", "data", "restore", "compile", "batch", "step", "save", "evaluate"]
"""start: until all processes are connected. batch: waiting for the next batch. compile: the first
two steps."""

PHASES: tuple[Phase, ...] = get_args(Phase)
_COMPILED_STEPS = 2
"""The first step is compiled and dispatched, and the second waits for the first to finish."""
_RECENT_STEPS = 64
_Item = TypeVar("_Item")


class Phases:
    """The main thread updates it; other threads may read it.

    Attributes:
      phase: the current phase.
      since: when that began (`clock`'s seconds).
      step: steps done; -1 before the first is known.
      saved: the newest complete checkpoint's step; -1: none.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = clock()
        self._seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        self._recent_steps: deque[float] = deque(maxlen=_RECENT_STEPS)
        self.phase: Phase = "start"
        self.since = self._started_at
        self.step = -1
        self.saved = -1

    def at(self, phase: Phase) -> None:
        """Begins a phase and ends the one before.

        Calling it again with the same phase is a sign of life.
        """
        timestamp = self._clock()
        self._seconds[self.phase] += timestamp - self.since
        self.phase = phase
        self.since = timestamp

    def steps(self, batches: Iterable[_Item]) -> Iterator[_Item]:
        """Yields the batches.

        Waiting for one is phase "batch", and the caller's work on it is "step", or "compile" for
        the first two: the first is compiled and dispatched, and the second waits for the first to
        finish.
        """
        iterator = iter(batches)
        n_steps = 0
        step_began = 0.0
        while True:
            self.at("batch")
            if n_steps > _COMPILED_STEPS:
                self._recent_steps.append(self._clock() - step_began)
            step_began = self._clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            n_steps += 1
            self.at("compile" if n_steps <= _COMPILED_STEPS else "step")
            yield batch

    @property
    def nothing_to_save(self) -> bool:
        """Whether no step is done since the checkpoint from which this process started."""
        return self.phase in PREPARING and self.step <= max(self.saved, 0)

    @property
    def idle(self) -> float:
        """Seconds since the last sign of life."""
        return self._clock() - self.since

    @property
    def age(self) -> float:
        """Seconds since the first phase began."""
        return self._clock() - self._started_at

    @property
    def median_step(self) -> float:
        """The median of the last 64 step times, in seconds; 0 before there is one."""
        # A copy, because the main thread may append while another thread reads.
        recent = list(self._recent_steps)
        return statistics.median(recent) if recent else 0.0

    def seconds(self) -> dict[str, float]:
        """Seconds spent in each phase so far, the current one included."""
        return self._seconds | {self.phase: self._seconds[self.phase] + self.idle}
