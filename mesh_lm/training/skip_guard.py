"""When skipped steps are too many in a row: the run goes back to a checkpoint before them, or ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from mesh_lm.config import HealthConfig
from mesh_lm.errors import ConfigError


class SickRun(ConfigError):
    """`health.skip_limit` steps in a row were skipped, and the run may not go back."""


class Sick:
    """Told of the steps in order, late or not. Every process comes to the same decisions, for all have the same metrics."""

    def __init__(self, config: HealthConfig, note: Callable[[str], None] | None = None) -> None:
        """note: takes lines for the log."""
        self.row = 0
        """Steps skipped in a row, up to the newest one told of."""
        self.rewinds = 0
        """Times that the run went back."""
        self._config, self._note = config, note or (lambda line: None)
        self._last: tuple[int, int] | None = None

    def step(self, told: tuple[int, Mapping[str, Any]] | None) -> int | None:
        """None, or the first of too many bad steps: go back to a checkpoint before it, and on with the batches behind those dispatched.

        told: the number of a step, from 1, and its metrics "loss", "grad_norm" (of the step) and "skipped" (of the run), jax.Arrays or
        numbers; None: nothing to tell. A number that is not above the last one is that of a run that went back. Raises SickRun where it
        may not go back (any more).
        """
        if told is None:
            return None
        n, skipped = told[0], int(told[1]["skipped"])
        loss, norm = float(told[1]["loss"]), float(told[1]["grad_norm"])
        finite = math.isfinite(loss) and math.isfinite(norm)
        if self._last and n > self._last[0]:
            steps, new = n - self._last[0], skipped - self._last[1]
        else:  # of the first one after a start, the counter alone tells nothing
            steps, new, self.row = 1, int(skipped > 0 and not finite), 0
        self._last, self.row = (n, skipped), self.row + new if new == steps else 0
        why = f"loss {loss:.4g}, gradient norm {norm:.4g}"
        if finite:
            why += f", one of them over {self._config.outlier:g} standard deviations above the steps before (health.outlier)"
        if new:
            self._note(f"{f'step {n}' if steps == 1 else f'{new} of the {steps} steps up to {n}'} skipped, {skipped} in all: {why}")
        return self._too_many(n - self.row + 1, n, why) if self.row >= self._config.skip_limit else None

    def _too_many(self, first: int, last: int, why: str) -> int:
        steps = f"{self.row} steps in a row skipped, {first} to {last}" if self.row > 1 else f"step {last} skipped"
        if self.rewinds == self._config.rewinds:
            raise SickRun(
                f"{steps}, the last one with {why}; that is health.skip_limit={self._config.skip_limit}, and the run went back "
                f"{self.rewinds} times of health.rewinds={self._config.rewinds}. The weights are still those before step {first}: look at "
                f"the batches from there on, lower optimizer.learning_rate, or set health.rewinds={self.rewinds + 1} to go on without them"
            )
        self.rewinds += 1
        behind = f"going back to the checkpoint before step {first}, and on with the batches behind step {last}"
        self._note(f"{steps}: {behind} (rewind {self.rewinds} of {self._config.rewinds})")
        return first
