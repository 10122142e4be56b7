"""The launcher's messages about processes: how they ended, their progress, and which of them delay
the others.
"""

from __future__ import annotations

import dataclasses
import signal
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import NamedTuple

from mesh_lm.errors import number_ranges
from mesh_lm.network.exit_status import (
    EXIT_CANNOT,
    EXIT_FEWER,
    EXIT_PREEMPTED,
    EXIT_REPLACED,
    EXIT_STALLED,
    EXIT_UNEXPECTED,
    EXIT_USAGE,
)

GONE = "is gone: its launcher exited, or closed the connection"
_STATUSES = {
    EXIT_CANNOT: "the run cannot start as configured; the error is above",
    EXIT_UNEXPECTED: "an unexpected error; its traceback is above",
    EXIT_USAGE: "there is no such script, or it has no such option; the error is above",
    EXIT_STALLED: "no progress, or a disk that failed; the stacks or the error are above",
    EXIT_FEWER: "fewer nodes are enough",
    EXIT_REPLACED: "another run has taken its output over, and goes on there; the error is above",
    EXIT_PREEMPTED: "it was asked to stop, and saved",
}
_CANNOT_CONTINUE = "the run cannot continue; the error is above"
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "out of memory, or killed from outside",
    signal.SIGBUS: "usual cause: a memory-mapped data file was truncated",
    signal.SIGSEGV: "a bug in native code, or faulty memory",
}
_ABORTED = (
    "usual cause: JAX's coordination service aborted it, because another process had died or "
    "stopped responding"
)
_SILENT = 3.0
"""Seconds without a heartbeat that are reported."""
_NOT_PER_STEP = ("step", "start", "data", "compile", "restore")
"""Phases that do not slow down every step, or in which a process waits for the others."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """A process's heartbeat, as its launcher reported it."""

    step: int
    phase: str
    since: float
    """Seconds in this phase when it was sent."""
    saved: int
    """Step of the newest checkpoint; -1: none."""
    seconds: Mapping[str, float]
    """Phase -> the seconds spent in it so far."""
    received_at: float
    """The time at which the launcher received it (time.monotonic)."""

    @property
    def age(self) -> float:
        """Seconds since it was received."""
        return time.monotonic() - self.received_at


Beats = Mapping[int, Beat]
"""Process -> its last heartbeat."""


def describe_exit(
    status: int, processes: int, *, has_trained: bool = False, was_asked: bool = False
) -> str:
    """Returns how a process ended, as a verb phrase with the reason.

    Args:
      status: its exit status; -N after signal N.
      processes: the number of processes in the run.
      has_trained: whether this one came past its preparations.
      was_asked: whether the launcher had asked it to stop.
    """
    if status >= 0:
        meaning = _STATUSES.get(status, "")
        if status == EXIT_CANNOT and has_trained:
            meaning = _CANNOT_CONTINUE
        return f"ended with status {status}{f': {meaning}' if meaning else ''}"

    number = -status
    name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
    if was_asked:
        return f"was killed by {name} after it was asked to stop"
    cause = _SIGNALS.get(number, "")
    if number == signal.SIGABRT and processes > 1:
        cause = _ABORTED
    return f"was killed by {name}{f': {cause}' if cause else ''}"


def describe_silence(seconds: float, start: float, is_first: bool) -> str:
    """Returns that a process sent no heartbeat, as a verb phrase.

    is_first: it never sent one, and had `start` seconds for it.
    """
    if is_first:
        return (
            f"did not begin within --start={start:g} s: it has sent no heartbeat yet; raise "
            "--start if this host is slow"
        )
    return f"sent no heartbeat for {seconds:.0f} s: it is stopped, or hangs outside of Python"


def shell_status(status: int) -> int:
    """Returns the status that a shell reports: 128 + N for a process killed by signal N."""
    return status if status >= 0 else 128 - status


def progress_table(beats: Beats, marked: Collection[int] = ()) -> list[str]:
    """Returns one line for each group of processes at the same step and phase.

    marked: the processes to mark as the likely cause.
    """
    groups: dict[tuple[int, str, bool], list[int]] = defaultdict(list)
    for process, beat in sorted(beats.items()):
        groups[beat.step, beat.phase, process in marked].append(process)
    lines = []
    for (step, phase, is_marked), members in sorted(groups.items()):
        in_phase = max(beats[process].since + beats[process].age for process in members)
        silence = max(beats[process].age for process in members)
        missing = f", no heartbeat for {silence:.0f} s" if silence > _SILENT else ""
        mark = "   <- likely the cause" if is_marked else ""
        lines.append(
            f"  {number_ranges(members)}: step {step}, {phase} for {in_phase:.0f} s{missing}{mark}"
        )
    return lines


def suspects(beats: Beats) -> set[int]:
    """Returns the processes that are silent, else those at the lowest step, else those in another
    phase than most; empty if all agree.
    """
    silent = {process for process, beat in beats.items() if beat.age > _SILENT}
    if 0 < len(silent) < len(beats):
        return silent

    steps = {process: beat.step for process, beat in beats.items()}
    if len({*steps.values()}) > 1:
        return {process for process, step in steps.items() if step == min(steps.values())}

    phases = Counter(beat.phase for beat in beats.values())
    if len(phases) < 2:
        return set()
    ((usual, n_usual),) = phases.most_common(1)
    if n_usual <= len(beats) / 2:
        return set()
    return {process for process, beat in beats.items() if beat.phase != usual}


class _StepTime(NamedTuple):
    """Seconds a step that a process spent between two heartbeats."""

    total: float
    busy: float
    """Seconds outside of phases in which it waits for the others."""


def stragglers(old_beats: Beats, new_beats: Beats) -> list[str]:
    """Returns a line for each straggler between the two heartbeats.

    A straggler's busy time per step exceeds the median of the others twofold, and by 5 % of a step.
    Busy time is the time outside of phases in which a process waits for others.
    """
    times = {}
    for process, beat in new_beats.items():
        if process in old_beats and beat.step > old_beats[process].step:
            times[process] = _step_time(old_beats[process], beat)

    lines = []
    for process, time_ in times.items():
        other_times = [other.busy for name, other in times.items() if name != process]
        median = statistics.median(other_times or [time_.busy])
        if time_.busy > 2 * median and time_.busy - median > 0.05 * time_.total:
            lines.append(
                f"process {process} is a straggler: it spends {time_.busy:.3g} s per step outside "
                f"of the step itself, the others {median:.3g} s"
            )
    return lines


def _step_time(old: Beat, new: Beat) -> _StepTime:
    n_steps = new.step - old.step
    spent = {phase: value - old.seconds.get(phase, 0.0) for phase, value in new.seconds.items()}
    busy = sum(value for phase, value in spent.items() if phase not in _NOT_PER_STEP)
    return _StepTime(total=sum(spent.values()) / n_steps, busy=busy / n_steps)
