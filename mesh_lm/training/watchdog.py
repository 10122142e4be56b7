"""Ends a process that makes no progress. JAX itself waits for a stuck peer without a time limit."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from types import TracebackType

from mesh_lm.config import HealthConfig
from mesh_lm.distributed.phases import Phases
from mesh_lm.network.exit_status import EXIT_STALLED

_BUSY = ("batch", "step")
"""Phases of the training loop, in which every step is a sign of life."""
_MARGIN = 30.0
"""Seconds after which faulthandler dumps the stacks, in case native code holds the GIL and no
Python thread can run."""

_STDERR = 2
"""The file descriptor, because sys.stderr may have been replaced by an object without one."""


class Watchdog:
    """A context in which a process ends with status 75, after dumping the stacks of all threads,
    when a phase takes too long.

    The limit between two signs of life is max(health.stall, 10 median steps) in the training loop,
    and health.patience in all other phases: data, restore, compile, save, evaluate. health.stall=0
    turns the watchdog off.
    """

    def __init__(self, config: HealthConfig, phases: Phases, prefix: str = "") -> None:
        """prefix: the prefix of this process's log lines."""
        self._config = config
        self._phases = phases
        self._prefix = prefix
        self._ended = threading.Event()

    @property
    def limit(self) -> float:
        """Seconds that the current phase may take."""
        if self._phases.phase not in _BUSY or not self._phases.median_step:
            return max(self._config.patience, self._config.stall)
        return max(self._config.stall, 10 * self._phases.median_step)

    def __enter__(self) -> Watchdog:
        if not faulthandler.is_enabled():
            # prints the stack of a bus error, such as that of a truncated data file
            faulthandler.enable(_STDERR)
        if self._config.stall:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._config.stall / 4)):
            limit = self.limit
            patience = max(1.0, limit - self._phases.idle + _MARGIN)
            # In case this thread cannot run (`_MARGIN`). It always exits with status 1.
            faulthandler.dump_traceback_later(patience, exit=True, file=_STDERR)
            idle = self._phases.idle
            if idle > limit:
                self._end_process(idle, limit)
        faulthandler.cancel_dump_traceback_later()

    def _end_process(self, idle: float, limit: float) -> None:
        message = (
            f"{self._prefix}error: no progress for {idle:.0f} s (limit {limit:.0f}): "
            f"phase {self._phases.phase}, {self._phases.step} steps done; "
            f"median step {self._phases.median_step:.2f} s, "
            f"health.stall={self._config.stall:g}, health.patience={self._config.patience:g}. "
            "The stacks of all threads:"
        )
        try:
            print(message, file=sys.stderr, flush=True)
            faulthandler.dump_traceback(_STDERR, all_threads=True)
            sys.stdout.flush()
        finally:  # also if the log cannot be written
            os._exit(EXIT_STALLED)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._config.stall:
            self._thread.join()
