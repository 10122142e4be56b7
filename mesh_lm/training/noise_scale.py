"""The gradient noise scale of a run, from the estimates of its steps
(`mesh_lm.parallel.noise_scale`).
"""

from __future__ import annotations

import math

_MEMORY = 100
"""The time constant of the running means, in steps; until then they are plain averages."""


class RunningNoiseScale:
    """Means of the two estimates, each over steps; their ratio is the noise scale.

    A single step's ratio is biased, and its denominator may be negative (arXiv 1812.06162, A.1).
    """

    def __init__(self) -> None:
        self._n_steps = 0
        self._trace = 0.0
        self._signal = 0.0

    def add(self, trace: float, signal: float) -> None:
        """Takes the estimates of a step; those of a step that was skipped, which are not finite, do
        not count.
        """
        if not (math.isfinite(trace) and math.isfinite(signal)):
            return
        self._n_steps += 1
        share = max(1 / self._n_steps, 1 / _MEMORY)
        self._trace += share * (trace - self._trace)
        self._signal += share * (signal - self._signal)

    @property
    def value(self) -> float | None:
        """The noise scale in sequences; None as long as a mean is not positive."""
        if self._trace <= 0 or self._signal <= 0:
            return None
        return self._trace / self._signal
