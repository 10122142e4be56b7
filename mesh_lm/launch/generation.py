"""A generation is one life of all workers: the nodes that run it, how its processes ended, and the
signals that end it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import sys
import time
from typing import Any

from mesh_lm.launch import messages
from mesh_lm.network.exit_status import EXIT_FEWER, EXIT_PREEMPTED
from mesh_lm.network.protocol import PREPARING

SignalPlan = tuple[tuple[float, int], ...]
"""(seconds after the order, signal) of each signal that a worker gets while it lives."""
# After a crash the others usually end by themselves with the same error, which is worth reading.
# JAX swallows SIGTERM.
CRASHED: SignalPlan = ((2.0, signal.SIGTERM), (4.0, signal.SIGKILL))
FEWER: SignalPlan = ((10.0, signal.SIGTERM), (12.0, signal.SIGKILL))
AT_ONCE: SignalPlan = ((0.0, signal.SIGKILL),)
# A process that compiles obeys only when XLA has finished.
IDLE: SignalPlan = ((0.0, signal.SIGTERM), (2.0, signal.SIGKILL))
UNKILLABLE = 60.0
"""Seconds after SIGKILL by which a worker must be gone. One that hangs in the kernel, on a dead
disk or GPU, stays."""


@dataclasses.dataclass
class Generation:
    """One life of all workers, on the nodes `members`, in the order of their processes."""

    number: int
    members: list[int]
    running: set[int]
    """Members with workers that have not ended."""
    per_node: int
    """Processes of each member."""
    statuses: dict[int, int] = dataclasses.field(default_factory=dict)
    """Process -> its status, for the processes that ended by themselves."""
    stopping: str = ""
    """Why its end was ordered: crash, signal, grow or fewer."""
    failure: int | None = None
    """The status to fail with."""
    culprit: int | None = None
    """The node whose worker failed first."""
    deadline: float = math.inf
    """When nodes whose workers still run count as lost (time.monotonic)."""
    idle: bool = False
    """Whether a signal ended it when there was nothing to save."""
    cut_short: bool = False
    """Whether a signal killed a process that was asked to stop."""
    fewer: int = 0
    """The number of nodes that is enough, as its workers reported; 0: they did not."""
    beats: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Process -> its last heartbeat, with "heard": when it came (time.monotonic)."""
    looked: tuple[float, dict[int, dict[str, Any]]] = (0.0, {})
    """The time of the last search for stragglers, and the heartbeats at that time."""

    @property
    def n_processes(self) -> int:
        """The number of processes."""
        return len(self.members) * self.per_node

    @property
    def all_ended(self) -> bool:
        """Whether every process has ended by itself."""
        return len(self.statuses) == self.n_processes

    def processes_of(self, node: int) -> range:
        """The processes on a member."""
        first = self.members.index(node) * self.per_node
        return range(first, first + self.per_node)

    def node_of(self, process: int) -> int:
        """The member on which a process runs."""
        return self.members[process // self.per_node]

    def fail(self, status: int, node: int | None = None) -> None:
        """Sets the status to fail with, and the node to blame."""
        self.failure, self.culprit = status, self.culprit if node is None else node

    def left_early(self) -> list[int]:
        """The processes that have ended with status 0."""
        return sorted(process for process, status in self.statuses.items() if status == 0)

    def nothing_to_save(self) -> bool:
        """Whether every process reports that it has made no step since the checkpoint from which it
        started.
        """
        return len(self.beats) == self.n_processes and all(
            beat["phase"] in PREPARING and beat["step"] <= max(beat["saved"], 0)
            for beat in self.beats.values()
        )

    def has_trained(self, process: int) -> bool:
        """Whether a process came past its preparations."""
        return self.beats.get(process, {}).get("phase", "start") not in PREPARING

    def restarts_from(self, newest: int) -> str:
        """Returns where the next life begins, as far as it is known. newest: the step of the newest
        checkpoint that was reported; -1: none.

        A checkpoint is reported only some steps after it is complete, so it is at the start for
        sure only if no save was begun.
        """
        first = self.beats.get(0, {})
        looked = (
            first.get("phase", "start") not in ("start", "restore") and first.get("saved") == -1
        )
        if newest >= 0:
            return f"from its newest checkpoint (step {newest} or later)"
        if looked and first["phase"] != "save" and not first["seconds"].get("save"):
            return "from the start"
        return "from its newest checkpoint, if there is one"

    def saved_and_left(self) -> bool:
        """Whether all processes ended in order after a signal asked them to, or had nothing to
        save.
        """
        if self.idle:
            return self.failure is None
        return (
            self.failure is None
            and {*self.statuses.values()} <= {0, EXIT_FEWER, EXIT_PREEMPTED, -signal.SIGTERM}
            and self.all_ended
        )

    def log_progress(self, *blamed: int, stalled: bool = True) -> None:
        """Logs the last heartbeats of all processes, with the suspects marked: those `blamed`,
        else, if `stalled`, `messages.suspects`.
        """
        if self.n_processes > 1 and self.beats:
            beats = {
                process: beat | {"age": time.monotonic() - beat["heard"]}
                for process, beat in self.beats.items()
            }
            marked = blamed or (messages.suspects(beats) if stalled else ())
            log("\n".join(["last heartbeats:", *messages.progress_table(beats, marked)]))

    def log_stragglers(self, every: float) -> None:
        """Logs processes that slow the others down, once every `every` seconds."""
        when, before = self.looked
        if time.monotonic() - when > every:
            for line in messages.stragglers(before, self.beats):
                log(line)
            self.looked = (
                time.monotonic(),
                {process: beat for process, beat in self.beats.items() if beat["step"] > 0},
            )


def log(text: str) -> None:
    """Prints an event on the launcher's stderr. A log that cannot be written (full disk, no reader)
    is ignored.
    """
    with contextlib.suppress(OSError):
        print(f"[launch] {text}", file=sys.stderr, flush=True)
