"""Node 0's view of a run: which nodes are there, when their workers start and stop, and whether to try again.

A *generation* is one life of all workers: they start together, and when one of them is gone all others are ended, because JAX's processes
cannot go on without each other. Nothing here touches a process: agents (`mesh_lm.launch.agent`) do, one on each node, this one included.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import socket
import sys
import time
from collections import Counter
from typing import Any

from mesh_lm.launch import EXIT_CANNOT, EXIT_FEWER, EXIT_PREEMPTED, EXIT_STALLED, messages
from mesh_lm.launch.job import Job
from mesh_lm.launch.wire import Peer, free_port

SignalPlan = tuple[tuple[float, int], ...]
"""Signals that a worker gets, each so many seconds after the order, as long as it lives."""
# After a crash the others usually end by themselves with the same error, which is worth reading. JAX swallows SIGTERM.
CRASHED: SignalPlan = ((2.0, signal.SIGTERM), (4.0, signal.SIGKILL))
AT_ONCE: SignalPlan = ((0.0, signal.SIGKILL),)
UNKILLABLE = 60.0
"""Seconds after SIGKILL that a worker has to be gone; who hangs in the kernel, on a dead disk or GPU, stays."""
_TICK = 0.05
_HELLO = 5.0
"""Seconds that a caller has to say who it is, and that an agent has to leave at the end."""
_LOOK = 60.0
"""Seconds between two looks for stragglers."""
_LONGEST_PAUSE = 60.0


@dataclasses.dataclass
class Node:
    """An agent that is connected."""

    peer: Peer
    host: str


@dataclasses.dataclass
class Generation:
    """One life of all workers, on the nodes `members`, in the order of their processes."""

    number: int
    members: list[int]
    running: set[int]
    """Members whose workers have not all ended."""
    statuses: dict[int, int] = dataclasses.field(default_factory=dict)
    """Process -> its status, of those that ended by themselves."""
    stopping: str = ""
    """Why its end was ordered: crash, signal or grow."""
    failure: int | None = None
    """The status to fail with."""
    culprit: int | None = None
    """The node whose worker was the first to fail."""
    deadline: float = math.inf
    """When those that still run count as lost (time.monotonic)."""
    fewer: int = 0
    """Nodes that are enough, as its workers said."""
    beats: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    looked: tuple[float, dict[int, dict[str, Any]]] = (0.0, {})
    """When stragglers were looked for, and the heartbeats of then."""


class Controller:
    """Runs a job to its end: `run` returns its status. It speaks with agents through `listener` only."""

    def __init__(self, job: Job, listener: socket.socket) -> None:
        self._job, self._listener = job, listener
        self._nodes: dict[int, Node] = {}
        self._callers: list[Peer] = []
        self._now: Generation | None = None
        self._count = 0
        self._begun = 0  # generations that came as far as their checkpoints
        self._vain = 0  # restarts in a row that brought no new checkpoint
        self._failed = Counter[int]()  # node -> how often its workers failed first since there was a new checkpoint
        self._newest = self._saved = -1  # the newest checkpoint, now and when the last generation ended
        self._expected = job.nodes  # nodes to wait for: those that the last generation had
        self._enough: tuple[int, int] = (job.nodes, job.nodes)  # with the first as many nodes as the second are enough
        self._not_before, self._since, self._patience = 0.0, time.monotonic(), job.first_wait
        self._stop = False
        self._pinged, self._heard = 0.0, time.monotonic()
        self._status: int | None = None
        self._listener.setblocking(False)

    def run(self) -> int:
        if self._job.nodes > 1:
            log(f"waits for {self._job.nodes} nodes at {self._job.rendezvous}, for {self._patience:g} s at most")
        while self._status is None:
            self._hear()
            if self._now is None:
                self._gather()
            else:
                self._watch(self._now)
        self._leave()
        return self._status

    # What comes in.

    def _hear(self) -> None:
        time.sleep(_TICK)
        before, self._heard = self._heard, time.monotonic()
        paused = self._heard - before > self._job.pause
        with contextlib.suppress(OSError):
            while True:
                self._callers.append(Peer(self._listener.accept()[0]))
        for caller in [*self._callers]:
            self._welcome(caller)
        for number, node in [*self._nodes.items()]:
            for message in node.peer.receive(excused=paused):
                self._take(number, message)
            if not node.peer.open:
                self._lose(number, "is gone: its launcher ended, or closed the connection")
            elif node.peer.silence > self._job.heartbeat:
                self._lose(number, f"was silent for {node.peer.silence:.0f} s: its machine, its launcher or the network is gone")
        if time.monotonic() - self._pinged > min(1.0, self._job.heartbeat / 4):
            self._pinged = time.monotonic()
            for node in self._nodes.values():
                node.peer.send()

    def _welcome(self, caller: Peer) -> None:
        """A new agent, or one that comes back; or a stranger."""
        received = caller.receive()
        if not received and caller.open and caller.silence < _HELLO:
            return
        self._callers.remove(caller)
        hello = received[0] if received else {}
        number = hello.get("node")
        mine, theirs = self._job.shared(), hello.get("job")
        if not (isinstance(number, int) and 0 <= number < self._job.nodes and isinstance(theirs, dict) and hello.get("hello") == "mesh_lm"):
            return caller.close()
        if differences := [f"{name} {theirs.get(name)}, not {value}" for name, value in mine.items() if theirs.get(name) != value]:
            why = f"node {number} does not run what node 0 runs, but {'; '.join(differences)}"
            caller.send(exit=EXIT_CANNOT, why=why)
            caller.close()
            return log(why)
        if number in self._nodes:
            self._lose(number, "came a second time: its first connection counts as gone")
        self._nodes[number] = Node(caller, str(hello.get("host")))
        caller.send(**({} if self._status is None else {"exit": self._status}))
        if self._job.nodes > 1 and self._count:
            log(f"node {number} ({hello.get('host')}) is back")
        for message in received[1:]:
            self._take(number, message)

    def _take(self, number: int, message: dict[str, Any]) -> None:
        """One message of a node. Those of an older generation are late, and nothing."""
        if "stop" in message:
            self._asked(message["stop"], at_once=message.get("at_once", False))
        now = self._now
        if now is None or message.get("generation") != now.number:
            return
        for process, beat in message.get("beats", {}).items():
            now.beats[int(process)] = beat | {"heard": time.monotonic() - beat["age"]}
            if int(process) == 0 and beat["saved"] >= 0:  # it falls where a run goes back
                self._newest = beat["saved"]
        now.fewer = message.get("fewer", 0) or now.fewer
        if "silent" in message:
            self._silent(now, number, message["silent"], message["seconds"])
        for process, status, sent in message.get("died", ()):
            self._died(now, number, process, status, sent)
        if message.get("ended"):
            now.running.discard(number)

    # What it does about it.

    def _lose(self, number: int, how: str) -> None:
        node, now = self._nodes.pop(number), self._now
        node.peer.close()
        if self._status is not None:
            return
        log(f"node {number} ({node.host}) {how}")
        if now and number in now.members:
            now.running.discard(number)
            if now.failure is None:
                now.failure = EXIT_STALLED
                self._order(now, "crash", CRASHED)
                first = now.members.index(number) * self._job.per_node
                self._table(now, *range(first, first + self._job.per_node))

    def _silent(self, now: Generation, number: int, process: int, seconds: float) -> None:
        if now.failure is None:
            log(f"process {process}{self._at(number)} was silent for {seconds:.0f} s: it is stopped, or hangs outside of Python")
            now.failure, now.culprit = EXIT_STALLED, number
            self._table(now, process)
        self._order(now, "crash", AT_ONCE)

    def _died(self, now: Generation, number: int, process: int, status: int, sent: int) -> None:
        """The first that dies is the cause, unless it was a victim of one that dies right after."""
        # Slurm's SIGTERM may reach a worker before its launcher's does.
        asked = self._stop and now.stopping != "crash" and status == -signal.SIGTERM
        if sent and not asked and not (now.stopping in ("signal", "grow") and sent == signal.SIGTERM):
            return
        now.statuses[process] = status
        if status in (0, EXIT_FEWER):
            return
        what = f"process {process}{self._at(number)} {messages.describe_exit(status, self._processes(now))}"
        if asked or status == EXIT_PREEMPTED or (status == -sent and now.stopping != "crash"):
            if not now.stopping:
                log(f"{what}; the others are asked to do the same")
                self._order(now, "signal", self._farewell)
            return
        if now.failure is None:
            log(what)
            now.failure, now.culprit = status, number
            self._table(now, stalled=status in (EXIT_STALLED, -signal.SIGABRT))
            self._order(now, "crash", CRASHED)
        elif status != now.failure and status < 0 and status != -signal.SIGABRT:
            log(f"{what}, which may be the cause")
            now.failure, now.culprit = status, number
        elif now.failure == EXIT_CANNOT and status != EXIT_CANNOT:  # what a victim makes of it hides no accident
            now.failure, now.culprit = status, number

    def _asked(self, how: str, *, at_once: bool) -> None:
        """Somebody wants the run to end."""
        if self._stop and not at_once:
            return
        log(f"{how}: the workers {'end at once' if at_once else f'save and leave, in {self._job.grace:g} s at most'}")
        self._stop = True
        if self._now and (at_once or self._now.stopping != "crash"):
            self._order(self._now, "signal", AT_ONCE if at_once else self._farewell)

    def _watch(self, now: Generation) -> None:
        if now.fewer and not now.stopping:
            self._order(now, "fewer", ((10.0, signal.SIGTERM), (12.0, signal.SIGKILL)))
        for number in [*now.running] if time.monotonic() > now.deadline else ():
            self._lose(number, f"has workers that SIGKILL did not end in {UNKILLABLE:g} s: they hang in its kernel")
        if not now.running:
            self._now = None
            self._conclude(now)
            return
        if not now.stopping and self._could_grow(now):
            log(f"{len(self._nodes)} nodes are there, and {len(now.members)} run: the workers save, and start again on more")
            self._order(now, "grow", self._farewell)
        when, before = now.looked
        if time.monotonic() - when > _LOOK:
            for line in messages.stragglers(before, now.beats):
                log(line)
            now.looked = (time.monotonic(), {process: beat for process, beat in now.beats.items() if beat["step"] > 0})

    def _conclude(self, now: Generation) -> None:
        """All its workers are gone: done, or what next."""
        self._begun += any(beat["phase"] != "start" for beat in now.beats.values())
        statuses = {*now.statuses.values()}
        if statuses == {0} and len(now.statuses) == self._processes(now):
            self._status = 0
        elif self._stop:
            orderly = statuses <= {0, EXIT_FEWER, EXIT_PREEMPTED, -signal.SIGTERM}
            saved = now.failure is None and orderly and len(now.statuses) == self._processes(now)
            self._status = EXIT_PREEMPTED if saved else messages.shell_status(-signal.SIGKILL if now.failure is None else now.failure)
        elif now.failure is None and now.stopping == "grow":
            self._again(0.0)
        elif now.fewer and EXIT_FEWER in statuses:
            self._enough, self._expected = (len(now.members), now.fewer), now.fewer
            log(f"{now.fewer} of {len(now.members)} nodes are enough for the largest mesh; the others wait")
            self._again(0.0)
        elif now.failure is None and EXIT_PREEMPTED in statuses:
            self._status = EXIT_PREEMPTED
        elif statuses == {now.failure} == {EXIT_CANNOT} and (len(now.statuses) == self._processes(now) or self._newest < 0):
            self._status = EXIT_CANNOT  # a mistake; of one process, in a run that has worked, it is more likely an accident
        else:
            self._retry(now)

    def _retry(self, now: Generation) -> None:
        """Another try, unless the last ones brought nothing."""
        if self._newest != self._saved:
            self._saved, self._vain = self._newest, 0
            self._failed.clear()
        if now.culprit is not None:
            self._failed[now.culprit] += 1
        if self._vain >= self._job.restarts:
            log(f"gives up after {self._vain} restarts without a new checkpoint" if self._vain else "gives up: --restarts=0")
            self._status = messages.shell_status(EXIT_STALLED if now.failure is None else now.failure)
            return
        pause = min(_LONGEST_PAUSE, 2.0 ** (self._vain - 1)) if self._vain else 0.0
        self._vain += 1
        where = f"from step {self._newest}" if self._newest >= 0 else "from the start"
        log(f"restart {self._vain} of {self._job.restarts} {where}, {f'in {pause:g} s' if pause else 'at once'}")
        self._again(pause)

    def _again(self, pause: float) -> None:
        self._not_before = time.monotonic() + pause
        self._since, self._patience = self._not_before, self._job.rejoin
        if len(self._nodes) < self._expected:
            log(f"waits for {self._absent}, for {self._patience:g} s at most")

    def _gather(self) -> None:
        """Starts a generation when enough nodes are there for it."""
        if self._stop:
            self._status = EXIT_PREEMPTED
            return
        now, there = time.monotonic(), len(self._nodes)
        late = now - self._since > self._patience
        # JAX's coordinator is on node 0.
        if now < self._not_before or 0 not in self._nodes or there < (self._job.least if late else self._expected):
            if late:
                log(f"gives up: {self._absent} did not come in {self._patience:g} s; {self._job.least} must be there, and node 0")
                self._status = EXIT_STALLED
            return
        usable = self._usable
        members = sorted(usable[: self._wanted(len(usable))])
        self._count, self._expected = self._count + 1, len(members)
        self._now = Generation(self._count, members, {*members})
        self._now.looked = (now, {})
        host = self._job.address[0]
        coordinator = f"[{host}]" if ":" in host else host
        coordinator += f":{free_port('127.0.0.1' if self._job.nodes == 1 else '')}"
        if len(members) < self._job.nodes:
            log(f"goes on with {len(members)} of {self._job.nodes} nodes: {', '.join(map(str, members))}")
        for rank, number in enumerate(members):
            self._nodes[number].peer.send(
                start=self._count, coordinator=coordinator, count=len(members) * self._job.per_node, first=rank * self._job.per_node,
                nodes=len(members), begun=self._begun,
            )  # fmt: skip

    # Small questions.

    @property
    def _usable(self) -> list[int]:
        """Nodes that are there, the best first. Those whose workers fail again and again are left out where the others are enough."""
        bad = [number for number in sorted(self._nodes) if number and self._failed[number] > 1]
        good = [number for number in sorted(self._nodes) if number not in bad]
        return good if len(good) >= self._job.least else good + bad

    def _wanted(self, there: int) -> int:
        """Nodes that a run with so many would use."""
        most, enough = self._enough
        return enough if enough <= there <= most else there

    def _could_grow(self, now: Generation) -> bool:
        return len(now.members) < self._wanted(self._job.nodes) <= len(self._usable)

    @property
    def _absent(self) -> str:
        return messages.number_ranges([number for number in range(self._job.nodes) if number not in self._nodes], "node", "nodes")

    @property
    def _farewell(self) -> SignalPlan:
        return ((0.0, signal.SIGTERM), (self._job.grace, signal.SIGKILL))

    def _order(self, now: Generation, why: str, plan: SignalPlan) -> None:
        now.stopping, now.deadline = why, time.monotonic() + plan[-1][0] + UNKILLABLE
        for number in now.running:
            if number in self._nodes:
                self._nodes[number].peer.send(end=now.number, schedule=plan)

    def _processes(self, now: Generation) -> int:
        return len(now.members) * self._job.per_node

    def _at(self, number: int) -> str:
        return f" on node {number} ({self._nodes[number].host})" if self._job.nodes > 1 else ""

    def _table(self, now: Generation, *suspects: int, stalled: bool = True) -> None:
        if self._processes(now) > 1 and now.beats:
            beats = {process: beat | {"age": time.monotonic() - beat["heard"]} for process, beat in now.beats.items()}
            log("\n".join(["who is where:", *messages.progress_table(beats, suspects or messages.suspects(beats) if stalled else ())]))

    def _leave(self) -> None:
        """Tells all agents, and waits until they have hung up: the last act of this node."""
        for node in self._nodes.values():
            node.peer.send(exit=self._status)
        deadline = time.monotonic() + _HELLO
        while any(node.peer.open for node in self._nodes.values()) and time.monotonic() < deadline:
            self._hear()
        self._listener.close()


def log(text: str) -> None:
    """One event, on the launcher's stderr. A log that takes no more, on a full disk or without a reader, ends nothing."""
    with contextlib.suppress(OSError):
        print(f"[launch] {text}", file=sys.stderr, flush=True)
