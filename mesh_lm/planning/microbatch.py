"""The largest microbatch that fits, found by compiling."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable

from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.training.check import check
from sharding_rules import axes_of
from sharding_rules.lab import Report

GIB = 2**30
_STRAIGHT_ATTEMPTS = 8
"""After more, the memory is far from linear in the sequences, and halving is faster."""


def largest_microbatch(
    config: TrainConfig,
    n_devices: int,
    compiled: Callable[[TrainConfig], Report],
    *,
    say: Callable[[str], None],
    on_paper: Callable[[TrainConfig], float | None] = lambda config: None,
    most: int = 4096,
) -> tuple[tuple[str, str], ...]:
    """Returns facts for the report: b sequences of a microbatch fit on each device, b + 1 do not.

    Each attempt is compiled, with the config's number of microbatches; without a pipeline with at
    most two, because more need no further memory except for their tokens.

    Args:
      compiled: compiles a config.
      say: reports an attempt.
      on_paper: estimates the peak of a config, in bytes; None where it cannot.
      most: the largest microbatch that is tried.
    """
    config = check(config, n_devices)
    sizes = config.mesh.sizes()
    n_shards = math.prod(sizes[axis] for axis in axes_of(config.rules.activations["batch"]))
    n_microbatches = config.train.microbatches
    if sizes["pipeline"] == 1:
        n_microbatches = min(2, n_microbatches)

    def with_sequences(b: int) -> TrainConfig:
        train = dataclasses.replace(
            config.train, global_batch=b * n_shards * n_microbatches, microbatches=n_microbatches
        )
        return dataclasses.replace(config, train=train)

    attempts = _Attempts(lambda b: on_paper(with_sequences(b)))

    def fits(b: int) -> bool:
        report = compiled(with_sequences(b))
        attempts.peak_bytes[b] = report.peak_bytes
        attempts.limit = report.limit
        say(
            f"{b} sequences in a microbatch: {report.peak_bytes / GIB:.2f} GiB of "
            f"{report.limit / GIB:.2f}"
        )
        return report.fits

    label = "largest microbatch"
    if not fits(1):
        return ((label, f"none: one sequence on each device needs {attempts.text(1)}"),)
    low = 1
    high = most + 1
    while high - low > 1:
        b = attempts.guess(low, high)
        if fits(b):
            low = b
        else:
            high = b
    if high > most:
        return ((label, f"at least {low} sequences on each device ({attempts.text(low)})"),)
    result = (
        f"{low} sequences on each device ({attempts.text(low)}); {high} do not fit "
        f"({attempts.text(high)})"
    )

    # The largest microbatch of these that divides the config's batch.
    n_sequences = config.train.global_batch // n_shards
    for b in range(low, 0, -1):
        if n_sequences % b == 0 and _can_run(config, n_sequences // b, n_devices):
            advice = f"--config.train.microbatches={n_sequences // b}: {b} sequences at once"
            return ((label, result), ("for this batch", advice))
    return ((label, result),)


@dataclasses.dataclass
class _Attempts:
    """The microbatches that were compiled."""

    on_paper: Callable[[int], float | None]
    """Sequences of a microbatch -> bytes at the peak, on paper; None without formulas."""
    limit: int = 0
    """The highest peak that fits, in bytes."""
    peak_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    """Sequences of a microbatch -> bytes at the peak."""

    def text(self, b: int) -> str:
        """Returns the memory that b sequences need."""
        return f"{self.peak_bytes[b] / GIB:.2f} of {self.limit / GIB:.2f} GiB"

    def guess(self, low: int, high: int) -> int:
        """Returns the next size to try, inside (low, high).

        It is where a line through two measured peaks reaches that limit: those of low and
        high, or of the largest two that fit if high has not been measured. After the first
        attempt, which it corrects, it is what fits on paper.
        """
        if len(self.peak_bytes) == 1:
            return min(max(low + 1, self._fitting_on_paper(low, high)), high - 1)
        if len(self.peak_bytes) > _STRAIGHT_ATTEMPTS:
            b = (low + high) // 2
        else:
            x0, x1 = (low, high) if high in self.peak_bytes else sorted(self.peak_bytes)[-2:]
            slope = (self.peak_bytes[x1] - self.peak_bytes[x0]) / (x1 - x0)
            b = high
            if slope > 0:
                b = low + int((self.limit - self.peak_bytes[low]) / slope)
        return min(max(low + 1, b), high - 1)

    def _fitting_on_paper(self, low: int, high: int) -> int:
        """Returns the most sequences below `high` that fit on paper; low without formulas."""
        paper = self.on_paper(low)
        if not paper:
            return low
        limit = self.limit * paper / self.peak_bytes[low]
        fitting = range(low, high)
        # The peak grows with the sequences, so that those that fit come first.
        return low + bisect.bisect_right(fitting, limit, key=lambda b: self.on_paper(b) or 0) - 1


def _can_run(config: TrainConfig, microbatches: int, n_devices: int) -> bool:
    train = dataclasses.replace(config.train, microbatches=microbatches)
    try:
        check(dataclasses.replace(config, train=train), n_devices)
    except ConfigError:
        return False
    return True
