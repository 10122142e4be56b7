"""What the launcher says of processes: how they ended, where they are, and which of them holds up the others."""

from __future__ import annotations

import signal
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from mesh_lm.launch import EXIT_CANNOT, EXIT_FEWER, EXIT_PREEMPTED, EXIT_STALLED, EXIT_UNEXPECTED

Beats = Mapping[int, Mapping[str, Any]]
"""Process -> its last heartbeat, with "age": seconds since it was heard."""
_STATUSES = {
    EXIT_CANNOT: "it cannot run so; its error is above",
    EXIT_UNEXPECTED: "an error that nobody foresaw; its traceback is above",
    EXIT_STALLED: "its watchdog saw no progress; the stacks are above",
    EXIT_FEWER: "fewer nodes are enough",
    EXIT_PREEMPTED: "it saved, as it was asked to",
}
_SIGNALS: dict[int, str] = {
    signal.SIGKILL: "out of memory, or killed by somebody",
    signal.SIGBUS: "usual cause: a data file was cut short while it was mapped",
    signal.SIGSEGV: "a bug in native code, or broken memory",
}
_ABORTED = "usual cause: JAX's coordination service ended it, because another process was gone or silent"
_SILENT = 3.0
"""Seconds without a heartbeat that are worth a word."""
_ONCE = ("step", "start", "data", "compile", "restore")
"""Phases that do not slow down every step, or in which a process waits for the others."""


def describe_exit(status: int, processes: int) -> str:
    """How a process ended, as a verb and its reason. processes: of the whole run."""
    if status >= 0:
        return f"ended with status {status}" + (f": {_STATUSES[status]}" if status in _STATUSES else "")
    reason = _ABORTED if -status == signal.SIGABRT and processes > 1 else _SIGNALS.get(-status, "")
    name = signal.Signals(-status).name if -status in {*signal.Signals} else f"signal {-status}"
    return f"was killed by {name}" + (f": {reason}" if reason else "")


def shell_status(status: int) -> int:
    """What a shell makes of it."""
    return status if status >= 0 else 128 - status


def progress_table(beats: Beats, guilty: Collection[int] = ()) -> list[str]:
    """Who is where, a line for all processes that are at the same place. guilty: those that are marked."""
    groups: dict[tuple[int, str, bool], list[int]] = defaultdict(list)
    for process, beat in sorted(beats.items()):
        groups[beat["step"], beat["phase"], process in guilty].append(process)
    lines = []
    for (step, phase, marked), members in sorted(groups.items()):
        longest = max(beats[process]["since"] + beats[process]["age"] for process in members)
        silent = max(beats[process]["age"] for process in members)
        unheard = f", unheard for {silent:.0f} s" if silent > _SILENT else ""
        mark = "   <- likely the culprit" if marked else ""
        lines.append(f"  {number_ranges(members)}: step {step}, {phase} for {longest:.0f} s{unheard}{mark}")
    return lines


def suspects(beats: Beats) -> set[int]:
    """Those that are silent, else those at the lowest step, else in another phase than most; empty where nothing tells them apart."""
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
    """The processes whose own time per step, between two moments, was more than twice the median of the others, and 5 % of a step more."""
    own, took = {}, {}
    for process, beat in now.items():
        if process not in before or (steps := beat["step"] - before[process]["step"]) < 1:
            continue
        spent = {phase: value - before[process]["seconds"].get(phase, 0.0) for phase, value in beat["seconds"].items()}
        own[process] = sum(value for phase, value in spent.items() if phase not in _ONCE) / steps
        took[process] = sum(spent.values()) / steps
    lines = []
    for process, mine in own.items():
        others = statistics.median([value for other, value in own.items() if other != process] or [mine])
        if mine > 2 * others and mine - others > 0.05 * took[process]:
            lines.append(f"process {process} keeps the others waiting: {mine:.3g} s a step outside of the step itself, they {others:.3g} s")
    return lines


def number_ranges(numbers: list[int], singular: str = "process", plural: str = "processes") -> str:
    """process 3; processes 0-6, 8 and so on."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges[:8])
    return f"{plural if len(numbers) > 1 else singular} {shown}{' and more' if len(ranges) > 8 else ''}"
