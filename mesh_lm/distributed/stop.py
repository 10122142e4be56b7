"""What SIGTERM and Ctrl-C do to a process: it saves after the step, or ends at once where there is
nothing to save.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Literal, NoReturn

import jax
from jax.experimental import multihost_utils

from mesh_lm.distributed.phases import Phases
from mesh_lm.network.environment import HEARTBEAT
from mesh_lm.network.exit_status import EXIT_INTERRUPTED, EXIT_PREEMPTED

_UNWIND = 2.0
"""Seconds that the main thread has to end by itself, which it cannot while XLA compiles."""
_NATIVE = ("restore", "compile")
"""Phases in which XLA and Orbax work in threads of their own. An interpreter that is torn down
meanwhile ends with SIGSEGV."""
_SHOW_CURSOR = b"\x1b[?25h"
_SIGNALS_A_READ = 64
_TOGETHER = (
    "Ctrl-C: the processes of this run stop together, after their next step; a second Ctrl-C ends "
    "this one at once"
)


def status_of(*, interrupted: bool) -> Literal[99, 130]:
    """Returns the status of a process that a signal has ended.

    It is 130 for SIGINT, but under a launcher 99, which it does not take for a failure.
    """
    return EXIT_INTERRUPTED if interrupted and HEARTBEAT not in os.environ else EXIT_PREEMPTED


class StopOnSignal:
    """A context in which SIGTERM or SIGINT to any process makes `poll` return True on all of them
    at the same call: they save and exit.

    Before the first new step is done there is nothing to save: the signal then ends the process at
    once (with `status_of`). A run of several processes does that only until they are connected:
    from then on JAX's preemption service catches SIGTERM, as which a SIGINT is passed on, and picks
    the call, so all of them must call `poll` equally often, and it is the launcher that ends them
    at once.

    A second SIGINT ends a process at once in any phase; in an interactive Python, which must
    survive it, it is a KeyboardInterrupt. A process that ignores SIGINT, as a shell's background
    jobs do, goes on ignoring it.
    """

    requested = False
    """Whether `poll` has returned True."""
    interrupted = False
    """Whether this process has received SIGINT."""

    def __init__(self, phases: Phases | None = None) -> None:
        """phases: this process's progress; None: it begins now."""
        self.phases = phases or Phases()
        self._n_polls = 0
        self._signalled = False  # by a signal that JAX does not catch
        self._leaving = False  # whether an exception is on its way out of the context
        self._is_native = False  # whether it was raised in one of the phases _NATIVE
        self._announced = threading.Lock()  # held once the end of this process was announced
        self._is_interactive = hasattr(sys, "ps1")

    @property
    def cause(self) -> str:
        """The signal, as the user calls it."""
        return "Ctrl-C" if self.interrupted else "SIGTERM"

    def poll(self) -> bool:
        """Returns whether to stop now."""
        if jax.process_count() == 1:
            self.requested |= self._signalled
        elif not self.requested:
            self._n_polls += 1
            self.requested = multihost_utils.reached_preemption_sync_point(self._n_polls)
        return self.requested

    def __enter__(self) -> StopOnSignal:
        # Python delivers signals to no other thread.
        self._in_main_thread = threading.current_thread() is threading.main_thread()
        if not self._in_main_thread:
            return self

        # Python's own handler runs when XLA returns; this pipe is written to at once.
        self._signals, self._writer = os.pipe()
        os.set_blocking(self._signals, True)
        os.set_blocking(self._writer, False)
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

        self._old_handlers = {signal.SIGTERM: signal.signal(signal.SIGTERM, self._terminate)}
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._old_handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        os.register_at_fork(after_in_child=self._restore_in_child)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    # Handlers, in the main thread.

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self._stop()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            self._end_at_once()
        self.interrupted = True
        if jax.distributed.is_initialized():
            os.kill(os.getpid(), signal.SIGTERM)  # which JAX catches
        else:
            self._stop()

    def _stop(self) -> None:
        self._signalled = True
        if self._leaving or not self.phases.nothing_to_save:
            return  # a second exception would break off the cleaning up after the first
        self._leaving = True
        self._is_native = self.phases.phase in _NATIVE
        self._announce_nothing_to_save(self.cause)
        if self.interrupted and self._is_interactive:
            raise KeyboardInterrupt
        # Files are closed and removed on the way to __exit__.
        raise SystemExit(status_of(interrupted=self.interrupted))

    def _end_at_once(self) -> NoReturn:
        """Ends the process without a save, as SIGKILL would.

        Checkpoints and corpora are renamed into place when they are complete.
        """
        if self._is_interactive:
            raise KeyboardInterrupt
        newest = self.phases.saved
        cure = f"continues from step {newest}" if newest > 0 else "starts again"
        self._announce(f"ended at once by a second Ctrl-C, without a save; the same command {cure}")
        _exit(status_of(interrupted=True))

    def _announce_nothing_to_save(self, cause: str) -> None:
        self._announce(
            f"stopped by {cause} in phase {self.phases.phase}: there is nothing new to save"
        )

    def _announce(self, text: str) -> None:
        """Prints once why this process ends."""
        if self._announced.acquire(blocking=False):
            _write(text)

    # The thread that acts while the main thread is in XLA and Python cannot run the handlers.

    def _watch(self) -> None:
        n_interrupts = 0
        while True:
            numbers = os.read(self._signals, _SIGNALS_A_READ)
            if not numbers:  # the context was left
                break
            n_interrupts += numbers.count(signal.SIGINT)
            if n_interrupts > 1 and not self._is_interactive:
                self._end_at_once()
            if not self.phases.nothing_to_save:
                continue
            is_interrupt = signal.SIGINT in numbers and not self._is_interactive
            # In a connected process JAX's service catches SIGTERM, and the handler passes SIGINT on
            # to it.
            is_connected = jax.distributed.is_initialized()
            if is_interrupt and is_connected:
                _write(_TOGETHER)  # which may take minutes
            if signal.SIGTERM in numbers or (is_interrupt and not is_connected):
                self._end_unless_saving(interrupted=n_interrupts > 0)
        os.close(self._signals)

    def _end_unless_saving(self, *, interrupted: bool) -> None:
        """Ends the process after _UNWIND seconds, or at a second SIGINT, unless a step was done
        meanwhile, which is saved.
        """
        self._announce_nothing_to_save("Ctrl-C" if interrupted else "SIGTERM")
        deadline = time.monotonic() + _UNWIND
        signals = select.poll()
        signals.register(self._signals, select.POLLIN)
        while True:
            seconds = deadline - time.monotonic()
            if seconds <= 0 or not signals.poll(1e3 * seconds):
                break
            numbers = os.read(self._signals, _SIGNALS_A_READ)
            if not numbers:  # the context was left, which is not yet the end of the process
                threading.Event().wait(deadline - time.monotonic())
                break
            if interrupted and signal.SIGINT in numbers:
                _exit(status_of(interrupted=True))
            interrupted |= signal.SIGINT in numbers
        if self._leaving or self.phases.nothing_to_save:
            _exit(status_of(interrupted=interrupted))

    # The end of the context.

    def _restore_in_child(self) -> None:
        """Undoes `__enter__` in a forked child.

        Its signals are not those of this process, whose pipe it has inherited.
        """
        if signal.getsignal(signal.SIGTERM) == self._terminate:
            signal.set_wakeup_fd(-1)
            self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._in_main_thread:
            return
        if self._is_native and isinstance(value, SystemExit):
            _flush()
            _exit(status_of(interrupted=self.interrupted))
        signal.set_wakeup_fd(self._old_wakeup_fd)
        if jax.distributed.is_initialized():
            del self._old_handlers[signal.SIGTERM]  # the handler is JAX's
        self._restore_handlers()
        os.close(self._writer)  # ends the watcher, unless it has a signal to obey


def _write(text: str) -> None:
    """Prints a line past the buffers of whatever this process was interrupted in."""
    below_bar = "\n" if os.isatty(2) else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{below_bar}{text}\n".encode())


def _flush() -> None:
    """Writes out what the interpreter would on its way out.

    Output that a full disk or a closed pipe does not take is lost there, too.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _exit(status: int) -> NoReturn:
    """Ends the process from any thread, and shows the terminal's cursor, which a progress bar
    hides.
    """
    with contextlib.suppress(OSError):
        if os.isatty(1):
            os.write(1, _SHOW_CURSOR)
    os._exit(status)
