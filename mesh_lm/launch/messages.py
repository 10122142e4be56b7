"""The launcher's messages about processes: how they ended, their progress, and which of them delay
the others.
"""

from __future__ import annotations

import signal
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

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

Beats = Mapping[int, Mapping[str, Any]]
"""Process -> its last heartbeat, with "age": seconds since it was received."""
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
GONE = "is gone: its launcher exited, or closed the connection"
_SILENT = 3.0
"""Seconds without a heartbeat that are reported."""
_ONCE = ("step", "start", "data", "compile", "restore")
"""Phases that do not slow down every step, or in which a process waits for the others."""


def describe_exit(
    status: int, processes: int, *, has_trained: bool = False, was_asked: bool = False
) -> str:
    """Returns how a process ended, as a verb phrase with the reason.

    Args:
      processes: the number of processes in the run.
      has_trained: whether this one came past its preparations.
      was_asked: whether the launcher had asked it to stop.
    """
    if status >= 0:
        meaning = (
            _CANNOT_CONTINUE if status == EXIT_CANNOT and has_trained else _STATUSES.get(status, "")
        )
        return f"ended with status {status}" + (f": {meaning}" if meaning else "")
    cause = _ABORTED if -status == signal.SIGABRT and processes > 1 else _SIGNALS.get(-status, "")
    name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
    return f"was killed by {name}" + (
        " after it was asked to stop" if was_asked else f": {cause}" if cause else ""
    )


def describe_silence(seconds: float, start: float, is_first: bool) -> str:
    """Returns that a process sent no heartbeat, as a verb phrase. is_first: it never sent one, and
    had `start` seconds for it.
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
    """Returns one line for each group of processes at the same step and phase. marked: the
    processes to mark as the likely cause.
    """
    groups: dict[tuple[int, str, bool], list[int]] = defaultdict(list)
    for process, beat in sorted(beats.items()):
        groups[beat["step"], beat["phase"], process in marked].append(process)
    lines = []
    for (step, phase, is_marked), members in sorted(groups.items()):
        longest = max(beats[process]["since"] + beats[process]["age"] for process in members)
        silent = max(beats[process]["age"] for process in members)
        missing = f", no heartbeat for {silent:.0f} s" if silent > _SILENT else ""
        mark = "   <- likely the cause" if is_marked else ""
        lines.append(
            f"  {number_ranges(members)}: step {step}, {phase} for {longest:.0f} s{missing}{mark}"
        )
    return lines


def suspects(beats: Beats) -> set[int]:
    """Returns the processes that are silent, else those at the lowest step, else those in another
    phase than most; empty if all agree.
    """
    silent = {process for process, beat in beats.items() if beat["age"] > _SILENT}
    if 0 < len(silent) < len(beats):
        return silent
    steps = {process: beat["step"] for process, beat in beats.items()}
    if len({*steps.values()}) > 1:
        return {process for process, step in steps.items() if step == min(steps.values())}
    phases = Counter(beat["phase"] for beat in beats.values()).most_common()
    if len(phases) < 2 or phases[0][1] <= len(beats) / 2:
        return set()
    return {process for process, beat in beats.items() if beat["phase"] != phases[0][0]}


def stragglers(before: Beats, now: Beats) -> list[str]:
    """Returns a line for each process whose own time per step between the two heartbeats exceeded
    the median of the others twofold, and by 5 % of a step. Own time is the time outside of phases
    in which a process waits for others.
    """
    own, total = {}, {}
    for process, beat in now.items():
        if process not in before or (steps := beat["step"] - before[process]["step"]) < 1:
            continue
        spent = {
            phase: value - before[process]["seconds"].get(phase, 0.0)
            for phase, value in beat["seconds"].items()
        }
        own[process] = sum(value for phase, value in spent.items() if phase not in _ONCE) / steps
        total[process] = sum(spent.values()) / steps
    lines = []
    for process, seconds in own.items():
        others = statistics.median(
            [value for other, value in own.items() if other != process] or [seconds]
        )
        if seconds > 2 * others and seconds - others > 0.05 * total[process]:
            spends = (
                f"it spends {seconds:.3g} s per step outside of the step itself, the others "
                f"{others:.3g} s"
            )
            lines.append(f"process {process} is a straggler: {spends}")
    return lines
