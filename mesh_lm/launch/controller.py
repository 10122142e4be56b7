"""Node 0's view of a run: which nodes are connected, when their workers start and stop, and whether
to restart.

All workers of a *generation* start together, and when one of them is gone all others are ended,
because JAX's processes cannot continue without each other. Nothing here touches a process: agents
(`mesh_lm.launch.agent`) do, one on each node, this one included.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from typing import Any

from mesh_lm.errors import number_ranges
from mesh_lm.launch import messages
from mesh_lm.launch.generation import (
    AT_ONCE,
    CRASHED,
    FEWER,
    IDLE,
    UNKILLABLE,
    Generation,
    SignalPlan,
    log,
)
from mesh_lm.launch.job import Job
from mesh_lm.launch.nodes import Node, Nodes
from mesh_lm.launch.restarts import Restarts
from mesh_lm.network import protocol
from mesh_lm.network.exit_status import (
    EXIT_CANNOT,
    EXIT_FEWER,
    EXIT_PREEMPTED,
    EXIT_REPLACED,
    EXIT_STALLED,
    EXIT_USAGE,
)
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import Peer

_TICK = 0.05
_HELLO = 5.0
"""Seconds within which a caller must have introduced itself, and an agent must hang up at the
end."""
_CALLERS = 128
"""Connections that may wait for that; the oldest is closed first. Their buffers hold 256 bytes
each."""
_PRESENT = 3.0
"""Seconds of silence after which another launcher may take a node's place. Launchers say something
at least once a second."""
_FINAL = (EXIT_CANNOT, EXIT_USAGE)
"""Statuses after which a restart would not help, if all processes agree."""
_END = "have nothing to save, and end at once"
_FIRST = 10.0
"""Seconds that the first start waits for nodes with lower numbers if spares could take their
places."""
_LOOK = 60.0
"""Seconds between two searches for stragglers, and between two lines about strangers."""
PURPOSE = "launcher"
"""What the conversations of launchers are about (`Channel`)."""


class Controller:
    """Runs a job to its end: `run` returns its status. It talks to agents through `listener`
    only.
    """

    def __init__(self, job: Job, listener: socket.socket, secret: Secret) -> None:
        """secret: what the agents must know."""
        self._job, self._listener, self._secret = job, listener, secret
        self._nodes = Nodes(job)
        self._callers: list[Peer] = []
        self._seen: set[int] = set()  # nodes that have been connected
        self._second = ""  # the last second launcher of a node
        # connections refused since that was last printed, and when it was
        self._strangers, self._told = 0, -_LOOK
        self._now: Generation | None = None
        self._count = 0
        self._begun = 0  # generations that came as far as their checkpoints
        self._restarts = Restarts(job)
        self._expected = job.size  # nodes to wait for: as many as the last generation had
        # (a, b): when a nodes are connected, b are enough
        self._enough: tuple[int, int] = (job.size, job.size)
        self._complete = 0.0  # when there were first enough nodes for the first start
        self._waiting = True  # whether the log has yet to say for which nodes the next start waits
        self._not_before, self._since, self._patience = 0.0, time.monotonic(), job.first_wait
        self._stop = False
        self._pinged, self._heard = 0.0, time.monotonic()
        self._status: int | None = None
        self._listener.setblocking(False)

    def run(self) -> int:
        """Runs until the job has ended, and returns its status."""
        if self._job.nodes > 1:
            log(
                f"waiting for {self._job.nodes} nodes at {self._job.rendezvous}, for up to "
                f"{self._patience:g} s"
            )
        while self._status is None:
            self._hear()
            if self._now is None:
                self._gather()
            else:
                self._watch(self._now)
        self._leave()
        return self._status

    # Messages from agents.

    def _hear(self) -> None:
        """Accepts connections, handles messages, drops nodes that are gone or silent, and sends
        heartbeats.
        """
        time.sleep(_TICK)
        before, self._heard = self._heard, time.monotonic()
        paused = self._heard - before > self._job.pause
        for number, node in [*self._nodes.items()]:
            for message in node.peer.receive(excused=paused):
                if self._nodes.get(number) is node:  # an earlier message may have cost it its place
                    self._take(number, message)
            if self._nodes.get(number) is not node:
                continue
            if not node.peer.open:
                self._lose(
                    number,
                    f"was refused: {node.peer.refused}" if node.peer.refused else messages.GONE,
                )
            elif node.peer.silence > self._job.heartbeat:
                self._lose(
                    number,
                    (
                        f"sent no heartbeat for {node.peer.silence:.0f} s: its machine, its "
                        "launcher or the network is down"
                    ),
                )
        self._admit()
        if time.monotonic() - self._pinged > min(1.0, self._job.heartbeat / 4):
            self._pinged = time.monotonic()
            for node in self._nodes.values():
                node.peer.send()
            self._nodes.check_unhealthy(self._now.running if self._now else ())

    def _admit(self) -> None:
        """Accepts connections, and hears those that have not introduced themselves."""
        with contextlib.suppress(OSError):
            for _ in range(_CALLERS):
                self._callers.append(
                    Peer(self._listener.accept()[0], self._secret, PURPOSE, serves=True)
                )
        for caller in self._callers[:-_CALLERS]:
            caller.close()
        self._callers = self._callers[-_CALLERS:]
        for caller in [*self._callers]:
            received = caller.receive()
            if not received and caller.open and caller.age < _HELLO:
                continue
            self._callers.remove(caller)
            if received and caller.open:
                self._welcome(caller, *received)
            else:
                caller.close()
                self._refused(caller)

    def _refused(self, caller: Peer) -> None:
        """Logs connections that were refused, at most once a minute."""
        if not caller.refused:  # it closed the connection itself, as a probe does
            return
        self._strangers += 1
        if time.monotonic() - self._told >= _LOOK:
            log(
                f"refused {self._strangers} connection{'s' * (self._strangers > 1)}, the last from "
                f"{caller.address}: {caller.refused}"
            )
            self._strangers, self._told = 0, time.monotonic()

    def _welcome(self, caller: Peer, hello: dict[str, Any], *rest: dict[str, Any]) -> None:
        """Admits a new agent, or one that reconnects; refuses one that was started differently, or
        whose node is connected.
        """
        try:
            protocol.require(hello, protocol.HELLO, *protocol.HELLO)
        except ValueError as error:
            log(f"refused a launcher at {caller.address}: {error}")
            return caller.close()
        number, host, expected = hello["node"], hello["host"], self._job.digests()
        if not 0 <= number < self._job.nodes:
            differing = ["node"]
        else:
            differing = sorted(
                name
                for name in {*expected, *hello["job"]}
                if expected.get(name) != hello["job"].get(name)
            )
        if differing:
            caller.send(exit=EXIT_CANNOT, refused="differs", fields=differing)
            caller.close()
            return log(
                f"node {number} ({host}) was started differently from node 0: "
                f"{self._job.explained(differing)}"
            )
        known = self._nodes.get(number)
        if (
            known
            and known.life != hello["life"]
            and known.peer.open
            and known.peer.silence < _PRESENT
        ):
            caller.send(refused="busy", host=known.host)
            caller.close()
            if hello["life"] != self._second:  # it tries again, and need not be named again
                log(
                    f"refused a second launcher of node {number} on {host}: the one on "
                    f"{known.host} is connected"
                )
            self._second = hello["life"]
            return
        if known:
            self._lose(number, "reconnected: its first connection is dropped")
        self._nodes[number] = Node(caller, host, hello["life"])
        caller.send(**({} if self._status is None else {"exit": self._status}))
        if self._job.nodes > 1 and self._count:
            full = self._now is not None and len(self._now.members) == self._job.size
            log(
                f"node {number} ({host}) is "
                f"{'back' if number in self._seen else 'connected'}{', and stands by' if full else ''}"
            )
        self._seen.add(number)
        if self._status is None:
            self._nodes.check(number)
        for message in rest:
            if number in self._nodes:
                self._take(number, message)

    def _take(self, number: int, message: dict[str, Any]) -> None:
        """Handles one message of a node. Messages about an older generation are ignored, and so are
        processes of other nodes.
        """
        try:
            protocol.require(message, protocol.REPORT)
        except ValueError as error:
            return self._lose(number, f"sent a message that is not understood: {error}")
        if "stop" in message:
            self._stop_all(message["stop"], at_once=message.get("at_once", False))
        if "checked" in message:
            self._nodes.take(number, message)
        now = self._now
        if now is None or message.get("generation") != now.number or number not in now.members:
            return
        own = now.processes_of(number)
        for process, beat in message.get("beats", {}).items():
            if int(process) not in own:
                continue
            now.beats[int(process)] = beat | {"heard": time.monotonic() - beat["age"]}
            if int(process) == 0 and beat["saved"] >= 0:
                self._restarts.newest = beat["saved"]
        now.fewer = message.get("fewer", 0) or now.fewer
        if message.get("silent") in own:
            self._silent(now, number, message["silent"], message.get("seconds", 0.0))
        for process, status, sent in message.get("died", ()):
            if process in own:
                self._died(now, number, process, status, sent)
        if message.get("ended"):
            now.running.discard(number)

    # Reactions to failures and signals.

    def _lose(self, number: int, how: str) -> None:
        node, now = self._nodes.pop(number), self._now
        node.peer.close()
        if self._status is not None:
            return
        log(f"node {number} ({node.host}) {how}")
        if now and number in now.members:
            now.running.discard(number)
            if now.failure is None:
                now.fail(EXIT_STALLED)
                self._order(now, "crash", CRASHED)
                now.log_progress(*now.processes_of(number))

    def _silent(self, now: Generation, number: int, process: int, seconds: float) -> None:
        if now.failure is None:
            log(
                f"process {process}{self._at(number)} "
                f"{messages.describe_silence(seconds, self._job.start, process not in now.beats)}"
            )
            now.fail(EXIT_STALLED, number)
            now.log_progress(process)
        self._order(now, "crash", AT_ONCE)

    def _died(self, now: Generation, number: int, process: int, status: int, sent: int) -> None:
        """Records how a process ended. The first to die is the cause, unless it was a victim of one
        that dies right after.
        """
        # Slurm's may come before its launcher's
        on_request = self._stop and now.stopping != "crash" and status == -signal.SIGTERM
        was_asked = now.stopping in ("signal", "grow") and sent == signal.SIGTERM
        if sent and not on_request and not was_asked:
            return
        now.statuses[process] = status
        if status in (0, EXIT_FEWER):
            return
        how = messages.describe_exit(
            status, now.n_processes, has_trained=now.has_trained(process), was_asked=was_asked
        )
        what = f"process {process}{self._at(number)} {how}"
        if on_request or status == EXIT_PREEMPTED or (status == -sent and now.stopping != "crash"):
            if not now.stopping:
                log(f"{what}; the others are asked to do the same")
                self._order(now, "signal", self._farewell)
            return
        if was_asked and now.failure is None and (status < 0 or now.cut_short):
            if not now.cut_short:  # the others wait for it, and fail in its place
                log(f"{what}, which counts as its stop")
                now.cut_short = True
                if now.nothing_to_save():
                    self._order(now, now.stopping, CRASHED)
            return
        if now.failure is None:
            log(what)
            stalled = status in (EXIT_STALLED, -signal.SIGABRT)
            if early := now.left_early():  # the others wait for it, and fail in its place
                names = number_ranges(early)
                log(
                    f"{names} had ended with status 0 before that: if the run was not complete, "
                    "this is the cause"
                )
            now.fail(
                status, now.node_of(early[0]) if early and stalled else None if early else number
            )
            now.log_progress(*early, stalled=stalled)
            self._order(now, "crash", CRASHED)
        elif status != now.failure and status < 0 and status != -signal.SIGABRT:
            log(f"{what}, which may be the cause")
            now.fail(status, number)
        elif (
            now.failure in _FINAL and status not in _FINAL
        ):  # a victim's config error must not hide the crash that caused it
            now.fail(status, number)

    def _stop_all(self, how: str, *, at_once: bool) -> None:
        """Ends the run because a launcher got a signal."""
        if self._stop and not at_once:
            return
        now, self._stop = self._now, True
        idle = now is not None and not now.stopping and now.nothing_to_save()
        log(
            f"{how}: the workers {'are killed' if at_once else _END if idle else f'save and exit, within {self._job.grace:g} s'}"
        )
        if now and (at_once or now.stopping != "crash"):
            now.idle = idle
            self._order(now, "signal", AT_ONCE if at_once else IDLE if idle else self._farewell)

    def _watch(self, now: Generation) -> None:
        """Ends a generation that hangs or could be larger, and concludes one that has ended."""
        if now.fewer and not now.stopping:
            self._order(now, "fewer", FEWER)
        for number in [*now.running] if time.monotonic() > now.deadline else ():
            self._lose(
                number,
                (
                    f"has workers that SIGKILL did not end within {UNKILLABLE:g} s: they hang in "
                    "its kernel"
                ),
            )
        if not now.running:
            self._now = None
            self._conclude(now)
            return
        if not now.stopping and self._could_grow(now):
            there = len(self._nodes.healthy())
            log(
                f"{there} nodes are connected and {len(now.members)} in use: the workers save, and "
                "restart on more nodes"
            )
            self._order(now, "grow", self._farewell)
        now.log_stragglers(_LOOK)

    def _order(self, now: Generation, why: str, plan: SignalPlan) -> None:
        """Has the agents end the generation's workers."""
        now.stopping, now.deadline = why, time.monotonic() + plan[-1][0] + UNKILLABLE
        for number in now.running:
            if number in self._nodes:
                self._nodes[number].peer.send(end=now.number, schedule=plan)

    # After a generation, and before the next.

    def _conclude(self, now: Generation) -> None:
        """Decides, when all its workers are gone, whether the run has ended or what comes next."""
        self._begun += any(beat["phase"] != "start" for beat in now.beats.values())
        statuses = {*now.statuses.values()}
        if statuses == {0} and now.all_ended:
            self._status = 0
        elif self._stop:
            killed = messages.shell_status(-signal.SIGKILL if now.failure is None else now.failure)
            self._status = EXIT_PREEMPTED if now.saved_and_left() else killed
        elif now.failure is None and now.stopping == "grow":
            self._nodes.check_all()
            self._again(0.0)
        elif now.fewer and EXIT_FEWER in statuses:
            self._enough, self._expected = (len(now.members), now.fewer), now.fewer
            log(
                f"{now.fewer} of {len(now.members)} nodes are enough for the largest mesh; the "
                "others wait"
            )
            self._again(0.0)
        elif now.failure is None and EXIT_PREEMPTED in statuses:
            self._status = EXIT_PREEMPTED
        elif (
            EXIT_REPLACED in statuses
        ):  # of process 0 alone, which holds the output; the others were its victims
            self._status = EXIT_CANNOT
        elif (
            now.failure in _FINAL
            and statuses <= {*_FINAL}
            and (now.all_ended or self._restarts.newest < 0)
        ):
            # if only one process of a run that has worked says so, it is more likely an accident
            self._status = now.failure
        else:
            self._retry(now)

    def _retry(self, now: Generation) -> None:
        """Restarts, or gives up after too many restarts without a new checkpoint."""
        pause = self._restarts.after_failure(now.culprit)
        futile, newest = self._restarts.futile, self._restarts.newest
        if pause is None:
            log(
                f"giving up after {futile} restarts without a new checkpoint"
                if futile
                else "giving up: --restarts=0"
            )
            self._status = messages.shell_status(
                EXIT_STALLED if now.failure is None else now.failure
            )
            return
        where = now.restarts_from(newest)
        log(
            f"restart {futile} of {self._job.restarts} {where}, "
            f"{f'in {pause:g} s' if pause else 'immediately'}"
        )
        self._nodes.check_all()
        self._again(pause)

    def _again(self, pause: float) -> None:
        self._not_before = time.monotonic() + pause
        self._since, self._patience, self._waiting = self._not_before, self._job.rejoin, True

    def _gather(self) -> None:
        """Starts a generation when enough healthy nodes are connected."""
        if self._stop:
            self._status = EXIT_PREEMPTED
            return
        now, there = time.monotonic(), len(self._nodes.healthy())
        late = now - self._since > self._patience
        if self._nodes.pending:
            return
        if (
            now < self._not_before
            or 0 not in self._nodes
            or there < (self._job.least if late else self._expected)
        ):
            self._wait(late)
            return
        self._complete = self._complete or now
        if (
            self._count == 0
            and not late
            and not {*range(self._job.size)} <= {*self._nodes}
            and now - self._complete < _FIRST
        ):
            return
        usable = self._restarts.usable(self._nodes.healthy())
        members = self._nodes.place(usable, self._wanted(len(usable)), self._restarts.failing)
        self._count, self._expected = self._count + 1, len(members)
        self._now = Generation(self._count, members, {*members}, self._job.per_node)
        self._now.looked = (now, {})
        if len(members) < self._job.size:
            log(
                f"continuing with {len(members)} of {self._job.size} nodes: "
                f"{', '.join(map(str, members))}"
            )
        coordinator = self._nodes.coordinator()
        for rank, number in enumerate(members):
            self._nodes[number].peer.send(
                start=self._count, coordinator=coordinator, count=self._now.n_processes,
                first=rank * self._job.per_node,
                nodes=len(members), begun=self._begun,
            )  # fmt: skip

    def _wait(self, late: bool) -> None:
        """Logs once for which nodes the next start waits, or gives up if it is late."""
        absent, unhealthy = self._nodes.absent(), self._nodes.unhealthy()
        if late:
            away = [f"{absent} did not connect within {self._patience:g} s"] if absent else []
            needed = f"at least {self._job.least} are needed, and node 0"
            log(
                f"giving up: {', '.join([*away, *unhealthy])}; "
                f"{needed}{'; --health=off starts without checks' if unhealthy else ''}"
            )
            self._status = EXIT_STALLED
        elif (
            self._waiting
            and len(self._nodes.healthy()) < self._expected
            and (self._count or not absent)
        ):
            what = [
                f"waiting for {absent or 'a healthy node'}, for up to {self._patience:g} s",
                *unhealthy,
            ]
            log("; ".join(what))
            self._waiting = False

    def _wanted(self, there: int) -> int:
        """How many of `there` healthy nodes a run would use."""
        there, (most, enough) = min(there, self._job.size), self._enough
        return enough if enough <= there <= most else there

    def _could_grow(self, now: Generation) -> bool:
        return (
            len(now.members)
            < self._wanted(self._job.size)
            <= len(self._restarts.usable(self._nodes.healthy()))
        )

    @property
    def _farewell(self) -> SignalPlan:
        return ((0.0, signal.SIGTERM), (self._job.grace, signal.SIGKILL))

    def _at(self, number: int) -> str:
        return f" on node {number} ({self._nodes[number].host})" if self._job.nodes > 1 else ""

    def _leave(self) -> None:
        """Tells all agents to exit, and waits until they have hung up."""
        for node in self._nodes.values():
            node.peer.send(exit=self._status)
        deadline = time.monotonic() + _HELLO
        while any(node.peer.open for node in self._nodes.values()) and time.monotonic() < deadline:
            self._hear()
        self._listener.close()
