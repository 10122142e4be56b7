"""A generation is one life of all workers: the nodes that run it, how its processes ended, and the
signals that end it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import math
import signal
import sys
import time

from mesh_lm.launch import messages
from mesh_lm.launch.messages import Beat
from mesh_lm.network.exit_status import EXIT_FEWER, EXIT_PREEMPTED
from mesh_lm.network.protocol import PREPARING

SignalPlan = tuple[tuple[float, int], ...]
"""(seconds after the order, signal) of each signal that a worker gets while it lives."""
# After a crash the others usually end by themselves with the same error, which is worth reading.
# JAX swallows SIGTERM.
CRASH_PLAN: SignalPlan = ((2.0, signal.SIGTERM), (4.0, signal.SIGKILL))
FEWER_PLAN: SignalPlan = ((10.0, signal.SIGTERM), (12.0, signal.SIGKILL))
KILL_PLAN: SignalPlan = ((0.0, signal.SIGKILL),)
# A process that compiles obeys only when XLA has finished.
IDLE_PLAN: SignalPlan = ((0.0, signal.SIGTERM), (2.0, signal.SIGKILL))
UNKILLABLE = 60.0
"""Seconds after SIGKILL by which a worker must be gone. One that hangs in the kernel, on a dead
disk or GPU, stays."""


class EndReason(enum.Enum):
    """Why the end of a generation was ordered."""

    CRASH = "a worker crashed, or a node was lost"
    SIGNAL = "a launcher or a worker got SIGTERM"
    GROW = "more nodes are connected than are in use"
    FEWER = "the largest mesh needs fewer nodes"


@dataclasses.dataclass
class Generation:
    """One life of all workers, on the nodes `members`, in the order of their processes."""

    number: int
    members: list[int]
    per_node: int
    """Processes of each member."""
    running: set[int] = dataclasses.field(init=False)
    """Members with workers that have not ended."""
    statuses: dict[int, int] = dataclasses.field(default_factory=dict)
    """Process -> its status, for the processes that ended by themselves."""
    beats: dict[int, Beat] = dataclasses.field(default_factory=dict)
    """Process -> its last heartbeat."""
    end_reason: EndReason | None = None
    """Why its end was ordered; None: it was not."""
    deadline: float = math.inf
    """The time at which nodes whose workers still run count as lost (time.monotonic)."""
    failure: int | None = None
    """The status to fail with."""
    culprit: int | None = None
    """The node whose worker failed first."""
    idle: bool = False
    """Whether a signal ended it when there was nothing to save."""
    cut_short: bool = False
    """Whether a signal killed a process that was asked to stop."""
    fewer: int = 0
    """The number of nodes that is enough, as its workers reported; 0: they did not."""

    def __post_init__(self) -> None:
        self.running = {*self.members}
        self._stragglers_searched_at = time.monotonic()
        self._searched_beats: dict[int, Beat] = {}  # those at the last search for stragglers

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
        self.failure = status
        if node is not None:
            self.culprit = node

    def left_early(self) -> list[int]:
        """The processes that have ended with status 0."""
        return sorted(process for process, status in self.statuses.items() if status == 0)

    def has_begun(self) -> bool:
        """Whether a process came past the connection of all processes."""
        return any(beat.phase != "start" for beat in self.beats.values())

    def nothing_to_save(self) -> bool:
        """Whether every process reports that it has made no step since the checkpoint from which it
        started.
        """
        if len(self.beats) < self.n_processes:
            return False
        return all(
            beat.phase in PREPARING and beat.step <= max(beat.saved, 0)
            for beat in self.beats.values()
        )

    def has_trained(self, process: int) -> bool:
        """Whether a process came past its preparations."""
        beat = self.beats.get(process)
        return beat is not None and beat.phase not in PREPARING

    def restarts_from(self, newest: int) -> str:
        """Returns where the next life begins, as far as it is known.

        newest: the step of the newest checkpoint that was reported; -1: none.
        """
        if newest >= 0:
            return f"from its newest checkpoint (step {newest} or later)"
        # A checkpoint is reported only some steps after it is complete, so the next life begins
        # at the start for sure only if no save was begun.
        if_any = "from its newest checkpoint, if there is one"
        first = self.beats.get(0)
        if first is None or first.phase in ("start", "restore") or first.saved != -1:
            return if_any
        has_saved = first.phase == "save" or first.seconds.get("save")
        return if_any if has_saved else "from the start"

    def saved_and_left(self) -> bool:
        """Whether all processes ended in order after a signal asked them to, or had nothing to
        save.
        """
        if self.failure is not None:
            return False
        if self.idle:
            return True
        in_order = {0, EXIT_FEWER, EXIT_PREEMPTED, -signal.SIGTERM}
        return self.all_ended and {*self.statuses.values()} <= in_order

    def log_progress(self, *blamed: int, stalled: bool = True) -> None:
        """Logs the last heartbeats of all processes, with the suspects marked.

        They are the `blamed`, else, if `stalled`, `messages.suspects`.
        """
        if self.n_processes == 1 or not self.beats:
            return
        marked = {*blamed}
        if not marked and stalled:
            marked = messages.suspects(self.beats)
        log("\n".join(["last heartbeats:", *messages.progress_table(self.beats, marked)]))

    def log_stragglers(self, interval: float) -> None:
        """Logs processes that slow the others down, once every `interval` seconds."""
        if time.monotonic() - self._stragglers_searched_at <= interval:
            return
        for line in messages.stragglers(self._searched_beats, self.beats):
            log(line)
        self._stragglers_searched_at = time.monotonic()
        self._searched_beats = {
            process: beat for process, beat in self.beats.items() if beat.step > 0
        }


def log(text: str) -> None:
    """Prints an event on the launcher's stderr.

    A log that cannot be written (full disk, no reader) is ignored.
    """
    with contextlib.suppress(OSError):
        print(f"[launch] {text}", file=sys.stderr, flush=True)
