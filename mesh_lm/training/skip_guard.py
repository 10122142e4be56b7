"""The reaction to too many skipped steps in a row: the run rolls back to a checkpoint before them,
or ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from mesh_lm.config import HealthConfig
from mesh_lm.errors import ConfigError


class TooManySkips(ConfigError):
    """`health.skip_limit` steps in a row were skipped, and the run may not roll back (any more)."""


class SkipGuard:
    """Counts skipped steps from the metrics, which may arrive late but in order. All processes
    decide the same from the same metrics.
    """

    def __init__(self, config: HealthConfig, note: Callable[[str], None] | None = None) -> None:
        """note: takes lines for the log."""
        self.consecutive_skips = 0
        """Steps skipped in a row, up to the newest one reported."""
        self.rewinds = 0
        """How often the run rolled back."""
        self._config = config
        self._note = note or (lambda line: None)
        self._newest: _Report | None = None

    def step(self, report: tuple[int, Mapping[str, Any]] | None) -> int | None:
        """Returns None, or the first step of a streak that is too long: roll back to a checkpoint
        before it, and continue with the batches that follow those already dispatched.

        report: a step's number, from 1, and its metrics "loss", "grad_norm" (of the step) and
        "skipped" (of the run), as jax.Arrays or numbers; None is ignored. A number that is not
        above the last one belongs to a run that was rolled back. Raises TooManySkips where the run
        may not roll back (any more).
        """
        if report is None:
            return None
        step, metrics = report
        n_skipped = int(metrics["skipped"])
        loss = float(metrics["loss"])
        grad_norm = float(metrics["grad_norm"])
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)

        if self._newest and step > self._newest.step:
            n_steps = step - self._newest.step
            n_new = n_skipped - self._newest.n_skipped
        else:
            # The first report after a start: how many of the earlier steps were skipped in a row is
            # unknown.
            n_steps = 1
            n_new = int(n_skipped > 0 and not is_finite)
            self.consecutive_skips = 0
        self._newest = _Report(step, n_skipped)
        if n_new == n_steps:
            self.consecutive_skips += n_new
        else:
            self.consecutive_skips = 0

        reason = f"loss {loss:.4g}, gradient norm {grad_norm:.4g}"
        if is_finite:
            reason += (
                f", one of them more than {self._config.outlier:g} standard deviations above "
                "recent steps (health.outlier)"
            )
        if n_new:
            steps = (
                f"step {step}" if n_steps == 1 else f"{n_new} of the {n_steps} steps up to {step}"
            )
            self._note(f"{steps} skipped, {n_skipped} in all: {reason}")
        if self.consecutive_skips < self._config.skip_limit:
            return None
        return self._begin_rewind(step - self.consecutive_skips + 1, step, reason)

    def _begin_rewind(self, first: int, last: int, reason: str) -> int:
        """Returns `first`, the first step of the streak. Raises TooManySkips."""
        steps = f"step {last} skipped"
        if self.consecutive_skips > 1:
            steps = f"{self.consecutive_skips} steps in a row skipped, {first} to {last}"
        if self.rewinds == self._config.rewinds:
            raise TooManySkips(
                f"{steps}, the last one with {reason}; that is "
                f"health.skip_limit={self._config.skip_limit}, and the run has used {self.rewinds} "
                f"of health.rewinds={self._config.rewinds}. The weights are still those before "
                f"step {first}: inspect the batches from there on, lower optimizer.learning_rate, "
                f"or set health.rewinds={self.rewinds + 1} to skip those batches"
            )
        self.rewinds += 1
        self._note(
            f"{steps}: rolling back to the checkpoint before step {first}, and continuing with the "
            f"batches after step {last} (rewind {self.rewinds} of {self._config.rewinds})"
        )
        return first


class _Report(NamedTuple):
    """The newest report of a step."""

    step: int
    n_skipped: int
    """Steps that the run has skipped so far."""
