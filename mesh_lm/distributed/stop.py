"""What SIGTERM does to a process: it saves after the step, or ends at once where there is nothing to save."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType

import jax
from jax.experimental import multihost_utils

from mesh_lm.distributed.phases import Phases
from mesh_lm.launch import EXIT_PREEMPTED

_UNWIND = 2.0
"""Seconds that the main thread has to end by itself, which it cannot while XLA compiles."""


class StopOnSigterm:
    """A context in which SIGTERM to any process makes `poll` return True on all of them at the same call, so that they save and exit.

    Before the first new step is done there is nothing to save: SIGTERM then ends the process at once with status 99. A run of several
    processes does that only until they are connected: from then on JAX's preemption service catches the signal and picks the call, so
    all of them must call `poll` equally often, and it is the launcher that ends them at once.
    """

    requested = False
    """Whether `poll` has returned True."""

    def __init__(self, phases: Phases) -> None:
        """phases: this process's progress."""
        self._phases, self._polls = phases, 0
        self._signalled = self._leaving = False
        self._said = threading.Lock()

    def poll(self) -> bool:
        """Returns whether to stop now."""
        if jax.process_count() == 1:
            self.requested |= self._signalled
        elif not self.requested:
            self._polls += 1
            self.requested = multihost_utils.reached_preemption_sync_point(self._polls)
        return self.requested

    def __enter__(self) -> StopOnSigterm:
        self._main = threading.current_thread() is threading.main_thread()  # Python delivers signals to no other thread
        if self._main:
            # Python's own handler runs when XLA returns; this pipe is written to at once.
            self._signals, self._writer = os.pipe()
            for end in (self._signals, self._writer):
                os.set_blocking(end, end == self._signals)
            self._woken = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._before = signal.signal(signal.SIGTERM, self._signal)
            os.register_at_fork(after_in_child=self._forked)
            self._watcher = threading.Thread(target=self._watch, name="sigterm", daemon=True)
            self._watcher.start()
        return self

    def _signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        if self._phases.nothing_to_save:
            self._leaving = True
            self._say()
            raise SystemExit(EXIT_PREEMPTED)  # files are closed and removed on the way

    def _say(self) -> None:
        """Prints once why this process ends, past the buffers of whatever it was interrupted in."""
        if self._said.acquire(blocking=False):
            with contextlib.suppress(OSError):
                os.write(2, f"stopped by SIGTERM in phase {self._phases.phase}: there is nothing new to save\n".encode())

    def _watch(self) -> None:
        while numbers := os.read(self._signals, 64):
            if signal.SIGTERM in numbers and self._phases.nothing_to_save:
                self._say()
                threading.Event().wait(_UNWIND)
                if self._leaving or self._phases.nothing_to_save:  # otherwise a step was done meanwhile, and is saved
                    os._exit(EXIT_PREEMPTED)
        os.close(self._signals)

    def _forked(self) -> None:
        """In a child: its signals are not those of this process, whose pipe it has inherited."""
        if signal.getsignal(signal.SIGTERM) == self._signal:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._before)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if not self._main:
            return
        signal.set_wakeup_fd(self._woken)
        if not jax.distributed.is_initialized():  # otherwise the handler is JAX's
            signal.signal(signal.SIGTERM, self._before)
        os.close(self._writer)  # ends the watcher, unless it has a signal to obey
