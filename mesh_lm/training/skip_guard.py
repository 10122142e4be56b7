"""The reaction to too many skipped steps in a row: the run rolls back to a checkpoint before them,
or ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

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
        self._config, self._note = config, note or (lambda line: None)
        self._last: tuple[int, int] | None = None

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
        n, skipped = report[0], int(report[1]["skipped"])
        loss, norm = float(report[1]["loss"]), float(report[1]["grad_norm"])
        finite = math.isfinite(loss) and math.isfinite(norm)
        if self._last and n > self._last[0]:
            steps, new = n - self._last[0], skipped - self._last[1]
        else:
            # The first report after a start: how many of the earlier steps were skipped in a row is
            # unknown.
            steps, new, self.consecutive_skips = 1, int(skipped > 0 and not finite), 0
        self._last, self.consecutive_skips = (
            (n, skipped),
            self.consecutive_skips + new if new == steps else 0,
        )
        why = f"loss {loss:.4g}, gradient norm {norm:.4g}"
        if finite:
            why += (
                f", one of them more than {self._config.outlier:g} standard deviations above "
                "recent steps (health.outlier)"
            )
        if new:
            self._note(
                f"{f'step {n}' if steps == 1 else f'{new} of the {steps} steps up to {n}'} "
                f"skipped, {skipped} in all: {why}"
            )
        return (
            self._too_many(n - self.consecutive_skips + 1, n, why)
            if self.consecutive_skips >= self._config.skip_limit
            else None
        )

    def _too_many(self, first: int, last: int, why: str) -> int:
        n = self.consecutive_skips
        steps = (
            f"{n} steps in a row skipped, {first} to {last}" if n > 1 else f"step {last} skipped"
        )
        if self.rewinds == self._config.rewinds:
            raise TooManySkips(
                f"{steps}, the last one with {why}; that is "
                f"health.skip_limit={self._config.skip_limit}, and the run has used {self.rewinds} "
                f"of health.rewinds={self._config.rewinds}. The weights are still those before "
                f"step {first}: inspect the batches from there on, lower optimizer.learning_rate, "
                f"or set health.rewinds={self.rewinds + 1} to skip those batches"
            )
        self.rewinds += 1
        action = (
            f"rolling back to the checkpoint before step {first}, and continuing with the batches "
            f"after step {last}"
        )
        self._note(f"{steps}: {action} (rewind {self.rewinds} of {self._config.rewinds})")
        return first
