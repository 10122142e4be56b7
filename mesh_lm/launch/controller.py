"""Node 0's view of a run: which nodes are connected, when their workers start and stop, and whether
to restart.

All workers of a *generation* start together, and when one of them is gone all others are ended,
because JAX's processes cannot continue without each other. Nothing here touches a process: agents
(`mesh_lm.launch.agent`) do, one on each node, this one included.

When a node is lost, `_poll` notices it (a closed connection, or --heartbeat), `_lose` orders the
end, agents end their workers and report that, and `_conclude` and `_restart` go back to `Waiting`.
There `_start_if_ready` takes a spare, or the node when it returns, or after --rejoin what is left,
at least --min-nodes, and `_start` begins the next generation, whose workers restore the newest
checkpoint. When node 0 is lost there is no controller: see `Agent._disconnect`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import time
from typing import Any, NamedTuple

from mesh_lm.errors import number_ranges
from mesh_lm.launch import messages
from mesh_lm.launch.generation import (
    CRASH_PLAN,
    FEWER_PLAN,
    IDLE_PLAN,
    KILL_PLAN,
    UNKILLABLE,
    EndReason,
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
"""Seconds within which a caller must introduce itself, and an agent must hang up at the end."""
_CALLERS = 128
"""Callers that may wait. The oldest is closed first. Their buffers hold 256 bytes each."""
_PRESENT = 3.0
"""Seconds of silence after which another launcher may take a node's place. Launchers say something
at least once a second."""
_FINAL = (EXIT_CANNOT, EXIT_USAGE)
"""Statuses after which a restart would not help, if all processes agree."""
_FIRST = 10.0
"""Seconds that the first start waits for nodes with lower numbers if spares could replace them."""
_LOOK = 60.0
"""Seconds between two searches for stragglers, and between two lines about refused connections."""
PURPOSE = "launcher"
"""What the conversations of launchers are about (`Channel`)."""


@dataclasses.dataclass
class Waiting:
    """The state between two generations, and before the first: no workers run."""

    earliest: float
    """The time from which the next generation may start; in the future during a back-off."""
    patience: float
    """Seconds after `earliest` that missing nodes have to connect."""
    announced: bool = False
    """Whether the log says which nodes are missing."""

    @property
    def is_late(self) -> bool:
        """Whether patience is over."""
        return time.monotonic() - self.earliest > self.patience


@dataclasses.dataclass(frozen=True)
class Finished:
    """The state after the last generation, in which agents exit."""

    status: int


State = Waiting | Generation | Finished
"""Waiting -> Generation: enough healthy nodes are connected (`_start_if_ready`).
Waiting -> Finished: a signal, or patience is over.
Generation -> Waiting: all its workers have ended, and it is restarted (`_conclude`).
Generation -> Finished: all its workers have ended, and a restart would be no use (`_conclude`).
"""


class _MeshLimit(NamedTuple):
    """A report of a generation: the largest mesh on `available` nodes needs only `needed` ones."""

    available: int
    needed: int


class Controller:
    """Runs a job to its end: `run` returns its status. It talks to agents through `listener` only.

    Messages of agents only record what happened, and order the end of a generation. All changes of
    the state are in `run`.
    """

    def __init__(self, job: Job, listener: socket.socket, secret: Secret) -> None:
        """secret: what the agents must know."""
        self._job = job
        self._nodes = Nodes(job)
        self._restarts = Restarts(job)

        self._state: State = Waiting(time.monotonic(), job.first_wait)
        self._stop_requested = False
        self._n_generations = 0
        self._n_generations_begun = 0  # that came as far as their checkpoints
        self._n_expected = job.size  # nodes to wait for: as many as the last generation had
        self._mesh_limit = _MeshLimit(job.size, job.size)
        self._complete_since = 0.0  # when there were first enough nodes for the first start

        self._listener = listener
        self._listener.setblocking(False)
        self._secret = secret
        self._callers: list[Peer] = []  # connections that have not introduced themselves
        self._n_refused = 0  # connections refused since that was last logged
        self._refused_logged_at = -_LOOK
        self._last_duplicate = ""  # the last second launcher of a node
        self._ever_connected: set[int] = set()  # numbers of nodes
        self._last_poll = time.monotonic()
        self._last_heartbeat = 0.0

    def run(self) -> int:
        """Runs until the job has ended, and returns its status."""
        if self._job.nodes > 1:
            log(
                f"waiting for {self._job.nodes} nodes at {self._job.rendezvous}, for up to "
                f"{self._job.first_wait:g} s"
            )
        while not isinstance(self._state, Finished):
            self._poll()
            if isinstance(self._state, Waiting):
                self._state = self._start_if_ready(self._state)
            else:
                self._state = self._supervise(self._state)
        self._dismiss_agents(self._state.status)
        return self._state.status

    @property
    def _generation(self) -> Generation | None:
        """The generation whose workers run."""
        return self._state if isinstance(self._state, Generation) else None

    # Connections and messages.

    def _poll(self) -> None:
        """Handles messages and new connections, drops lost nodes, and sends heartbeats."""
        time.sleep(_TICK)
        previous_poll = self._last_poll
        self._last_poll = time.monotonic()
        # After a pause of this process itself, the silence of others proves nothing.
        paused = self._last_poll - previous_poll > self._job.pause
        for number, node in [*self._nodes.items()]:
            for message in node.peer.receive(excused=paused):
                if self._nodes.get(number) is node:  # an earlier message may have cost it its place
                    self._handle(number, message)
            if self._nodes.get(number) is not node:
                continue
            if not node.peer.open:
                refused = node.peer.refused
                self._lose(number, f"was refused: {refused}" if refused else messages.GONE)
            elif node.peer.silence > self._job.heartbeat:
                self._lose(
                    number,
                    f"sent no heartbeat for {node.peer.silence:.0f} s: its machine, its launcher "
                    "or the network is down",
                )
        self._accept()
        self._send_heartbeats()

    def _send_heartbeats(self) -> None:
        interval = min(1.0, self._job.heartbeat / 4)
        if time.monotonic() - self._last_heartbeat <= interval:
            return
        self._last_heartbeat = time.monotonic()
        for node in self._nodes.values():
            node.peer.send()
        generation = self._generation
        self._nodes.check_unhealthy(generation.running if generation else ())

    def _accept(self) -> None:
        """Accepts connections, and admits or refuses those that have introduced themselves."""
        with contextlib.suppress(OSError):
            for _ in range(_CALLERS):
                connection, _address = self._listener.accept()
                self._callers.append(Peer(connection, self._secret, PURPOSE, serves=True))
        for caller in self._callers[:-_CALLERS]:
            caller.close()
        self._callers = self._callers[-_CALLERS:]

        for caller in [*self._callers]:
            received = caller.receive()
            if not received and caller.open and caller.age < _HELLO:
                continue
            self._callers.remove(caller)
            if received and caller.open:
                hello, *extra = received
                self._admit(caller, hello, extra)
            else:
                caller.close()
                self._log_refusal(caller)

    def _log_refusal(self, caller: Peer) -> None:
        """Logs connections that were refused, at most once a minute."""
        if not caller.refused:  # it closed the connection itself, as a probe does
            return
        self._n_refused += 1
        if time.monotonic() - self._refused_logged_at < _LOOK:
            return
        plural = "s" if self._n_refused > 1 else ""
        log(
            f"refused {self._n_refused} connection{plural}, the last from {caller.address}: "
            f"{caller.refused}"
        )
        self._n_refused = 0
        self._refused_logged_at = time.monotonic()

    def _admit(self, caller: Peer, hello: dict[str, Any], extra: list[dict[str, Any]]) -> None:
        """Admits a new agent, or one that reconnects.

        Refuses one that was started differently, or whose node is connected already. extra: the
        messages that came with its hello.
        """
        try:
            protocol.require(hello, protocol.HELLO, *protocol.HELLO)
        except ValueError as error:
            log(f"refused a launcher at {caller.address}: {error}")
            caller.close()
            return
        number = hello["node"]
        host = hello["host"]
        differing = self._differing_options(hello)
        if differing:
            caller.send(exit=EXIT_CANNOT, refused="differs", fields=differing)
            caller.close()
            log(
                f"node {number} ({host}) was started differently from node 0: "
                f"{self._job.explained(differing)}"
            )
            return

        node = self._nodes.get(number)
        if node:
            is_present = node.peer.open and node.peer.silence < _PRESENT
            if node.life != hello["life"] and is_present:
                self._refuse_duplicate(caller, hello, node)
                return
            self._lose(number, "reconnected: its first connection is dropped")

        self._nodes[number] = Node(caller, host, hello["life"])
        if isinstance(self._state, Finished):
            caller.send(exit=self._state.status)
        else:
            caller.send()
        if self._job.nodes > 1 and self._n_generations:
            self._log_connected(number, host)
        self._ever_connected.add(number)
        if not isinstance(self._state, Finished):
            self._nodes.check(number)
        for message in extra:
            if number in self._nodes:
                self._handle(number, message)

    def _differing_options(self, hello: dict[str, Any]) -> list[str]:
        """The options of a launcher that differ from those of node 0."""
        if not 0 <= hello["node"] < self._job.nodes:
            return ["node"]
        expected = self._job.digests()
        names = {*expected, *hello["job"]}
        return sorted(name for name in names if expected.get(name) != hello["job"].get(name))

    def _refuse_duplicate(self, caller: Peer, hello: dict[str, Any], node: Node) -> None:
        """Refuses a second launcher of a node that is connected."""
        caller.send(refused="busy", host=node.host)
        caller.close()
        if hello["life"] != self._last_duplicate:  # it tries again, and is logged once
            log(
                f"refused a second launcher of node {hello['node']} on {hello['host']}: the one on "
                f"{node.host} is connected"
            )
        self._last_duplicate = hello["life"]

    def _log_connected(self, number: int, host: str) -> None:
        generation = self._generation
        is_spare = generation is not None and len(generation.members) == self._job.size
        log(
            f"node {number} ({host}) is {'back' if number in self._ever_connected else 'connected'}"
            f"{', and stands by' if is_spare else ''}"
        )

    def _handle(self, number: int, message: dict[str, Any]) -> None:
        """Handles one message of a node.

        Messages about an older generation are ignored, and so are processes of other nodes.
        """
        try:
            protocol.require(message, protocol.REPORT)
        except ValueError as error:
            self._lose(number, f"sent a message that is not understood: {error}")
            return
        if "stop" in message:
            self._request_stop(message["stop"], at_once=message.get("at_once", False))
        if "checked" in message:
            self._nodes.take(number, message)

        generation = self._generation
        if generation is None or message.get("generation") != generation.number:
            return
        if number not in generation.members:
            return
        processes = generation.processes_of(number)
        for process, beat in message.get("beats", {}).items():
            if int(process) in processes:
                self._record_beat(generation, int(process), beat)
        generation.fewer = message.get("fewer", 0) or generation.fewer
        if message.get("silent") in processes:
            self._process_silent(generation, number, message["silent"], message.get("seconds", 0.0))
        for process, status, sent in message.get("died", ()):
            if process in processes:
                self._process_died(generation, number, process, status, sent)
        if message.get("ended"):
            generation.running.discard(number)

    def _record_beat(self, generation: Generation, process: int, beat: dict[str, Any]) -> None:
        generation.beats[process] = messages.Beat(
            step=beat["step"],
            phase=beat["phase"],
            since=beat["since"],
            saved=beat["saved"],
            seconds=beat["seconds"],
            received_at=time.monotonic() - beat["age"],
        )
        if process == 0 and beat["saved"] >= 0:
            self._restarts.newest = beat["saved"]

    # Failures and signals: they order the end of a generation, which then ends by itself.

    def _lose(self, number: int, reason: str) -> None:
        """Drops a node. If it is part of the generation, that ends."""
        node = self._nodes.pop(number)
        node.peer.close()
        if isinstance(self._state, Finished):
            return
        log(f"node {number} ({node.host}) {reason}")
        generation = self._generation
        if generation is None or number not in generation.members:
            return
        generation.running.discard(number)
        if generation.failure is None:
            # Without a culprit: the node is gone, so that there is none to leave out.
            generation.fail(EXIT_STALLED)
            self._order_end(generation, EndReason.CRASH, CRASH_PLAN)
            generation.log_progress(*generation.processes_of(number))

    def _process_silent(
        self, generation: Generation, number: int, process: int, seconds: float
    ) -> None:
        if generation.failure is None:
            is_first = process not in generation.beats
            silence = messages.describe_silence(seconds, self._job.start, is_first)
            log(f"process {process}{self._on_node(number)} {silence}")
            generation.fail(EXIT_STALLED, number)
            generation.log_progress(process)
        self._order_end(generation, EndReason.CRASH, KILL_PLAN)

    def _process_died(
        self, generation: Generation, number: int, process: int, status: int, sent: int
    ) -> None:
        """Records how a process ended.

        The first to die is the cause, unless it was a victim of one that dies right after. sent:
        the last signal that its agent sent to it; 0: none.
        """
        crashed = generation.end_reason is EndReason.CRASH
        # Slurm's SIGTERM may reach a worker before its launcher's does.
        is_slurm_stop = self._stop_requested and not crashed and status == -signal.SIGTERM
        was_asked = (
            generation.end_reason in (EndReason.SIGNAL, EndReason.GROW) and sent == signal.SIGTERM
        )
        if sent and not is_slurm_stop and not was_asked:
            return  # its agent has ended it, so that its status tells nothing
        generation.statuses[process] = status
        if status in (0, EXIT_FEWER):
            return

        ending = messages.describe_exit(
            status,
            generation.n_processes,
            has_trained=generation.has_trained(process),
            was_asked=was_asked,
        )
        event = f"process {process}{self._on_node(number)} {ending}"
        if is_slurm_stop or status == EXIT_PREEMPTED or (status == -sent and not crashed):
            if generation.end_reason is None:
                log(f"{event}; the others are asked to do the same")
                self._order_end(generation, EndReason.SIGNAL, self._save_plan)
            return
        if was_asked and generation.failure is None and (status < 0 or generation.cut_short):
            self._cut_short(generation, event)
            return

        if generation.failure is None:
            log(event)
            self._first_failure(generation, number, status)
        elif status != generation.failure and status < 0 and status != -signal.SIGABRT:
            log(f"{event}, which may be the cause")
            generation.fail(status, number)
        elif generation.failure in _FINAL and status not in _FINAL:
            # A victim's config error must not hide the crash that caused it.
            generation.fail(status, number)

    def _cut_short(self, generation: Generation, event: str) -> None:
        """Counts the death of a process that was asked to stop as its stop."""
        if generation.cut_short:  # the others wait for the first one, and fail in its place
            return
        log(f"{event}, which counts as its stop")
        generation.cut_short = True
        if generation.nothing_to_save():
            assert generation.end_reason is not None  # it was asked to stop
            self._order_end(generation, generation.end_reason, CRASH_PLAN)

    def _first_failure(self, generation: Generation, number: int, status: int) -> None:
        """Decides which node is to blame for the first failure, and ends the generation."""
        stalled = status in (EXIT_STALLED, -signal.SIGABRT)
        culprit: int | None = number
        # The others wait for processes that have ended with status 0, and fail in their place.
        early = generation.left_early()
        if early:
            culprit = generation.node_of(early[0]) if stalled else None
            log(
                f"{number_ranges(early)} had ended with status 0 before that: if the run was not "
                "complete, this is the cause"
            )
        generation.fail(status, culprit)
        generation.log_progress(*early, stalled=stalled)
        self._order_end(generation, EndReason.CRASH, CRASH_PLAN)

    def _request_stop(self, cause: str, *, at_once: bool) -> None:
        """Ends the run because a launcher got a signal."""
        if self._stop_requested and not at_once:
            return
        self._stop_requested = True
        generation = self._generation
        idle = (
            generation is not None
            and generation.end_reason is None
            and generation.nothing_to_save()
        )
        if at_once:
            log(f"{cause}: the workers are killed")
            plan = KILL_PLAN
        elif idle:
            log(f"{cause}: the workers have nothing to save, and end at once")
            plan = IDLE_PLAN
        else:
            log(f"{cause}: the workers save and exit, within {self._job.grace:g} s")
            plan = self._save_plan
        if generation and (at_once or generation.end_reason is not EndReason.CRASH):
            generation.idle = idle
            self._order_end(generation, EndReason.SIGNAL, plan)

    def _order_end(self, generation: Generation, reason: EndReason, plan: SignalPlan) -> None:
        """Has the agents end the generation's workers."""
        last_signal, _ = plan[-1]
        generation.end_reason = reason
        generation.deadline = time.monotonic() + last_signal + UNKILLABLE
        for number in generation.running:
            if number in self._nodes:
                self._nodes[number].peer.send(end=generation.number, schedule=plan)

    # While a generation runs.

    def _supervise(self, generation: Generation) -> State:
        """Ends a generation that hangs or could be larger. Returns the next state once it ended."""
        if generation.fewer and generation.end_reason is None:
            self._order_end(generation, EndReason.FEWER, FEWER_PLAN)
        if time.monotonic() > generation.deadline:
            for number in [*generation.running]:
                self._lose(
                    number,
                    f"has workers that SIGKILL did not end within {UNKILLABLE:g} s: they hang in "
                    "its kernel",
                )
        if not generation.running:
            return self._conclude(generation)
        if generation.end_reason is None and self._could_grow(generation):
            log(
                f"{len(self._nodes.healthy())} nodes are connected and {len(generation.members)} "
                "in use: the workers save, and restart on more nodes"
            )
            self._order_end(generation, EndReason.GROW, self._save_plan)
        generation.log_stragglers(_LOOK)
        return generation

    def _conclude(self, generation: Generation) -> State:
        """Decides, when all workers are gone, whether the run has ended or what comes next."""
        if generation.has_begun():
            self._n_generations_begun += 1
        statuses = {*generation.statuses.values()}
        failure = generation.failure

        if statuses == {0} and generation.all_ended:
            return Finished(0)
        if self._stop_requested:
            if generation.saved_and_left():
                return Finished(EXIT_PREEMPTED)
            return Finished(messages.shell_status(-signal.SIGKILL if failure is None else failure))
        if failure is None and generation.end_reason is EndReason.GROW:
            self._nodes.check_all()
            return self._wait_again(0.0)
        if generation.fewer and EXIT_FEWER in statuses:
            self._mesh_limit = _MeshLimit(len(generation.members), generation.fewer)
            self._n_expected = generation.fewer
            log(
                f"{generation.fewer} of {len(generation.members)} nodes are enough for the largest "
                "mesh; the others wait"
            )
            return self._wait_again(0.0)
        if failure is None and EXIT_PREEMPTED in statuses:
            return Finished(EXIT_PREEMPTED)
        # Of process 0 alone, which holds the output. The others were its victims.
        if EXIT_REPLACED in statuses:
            return Finished(EXIT_CANNOT)
        # If only one process of a run that has worked says so, it is more likely an accident.
        all_agree = generation.all_ended or self._restarts.newest < 0
        if failure is not None and failure in _FINAL and statuses <= {*_FINAL} and all_agree:
            return Finished(failure)
        return self._restart(generation)

    def _restart(self, generation: Generation) -> State:
        """Restarts, or gives up after too many restarts without a new checkpoint."""
        pause = self._restarts.after_failure(generation.culprit)
        n_futile = self._restarts.futile
        if pause is None:
            if n_futile:
                log(f"giving up after {n_futile} restarts without a new checkpoint")
            else:
                log("giving up: --restarts=0")
            failure = EXIT_STALLED if generation.failure is None else generation.failure
            return Finished(messages.shell_status(failure))
        log(
            f"restart {n_futile} of {self._job.restarts} "
            f"{generation.restarts_from(self._restarts.newest)}, "
            f"{f'in {pause:g} s' if pause else 'immediately'}"
        )
        self._nodes.check_all()
        return self._wait_again(pause)

    def _wait_again(self, pause: float) -> Waiting:
        return Waiting(time.monotonic() + pause, self._job.rejoin)

    # While no generation runs.

    def _start_if_ready(self, waiting: Waiting) -> State:
        """Starts a generation if enough healthy nodes are connected, or gives up if it is late."""
        if self._stop_requested:
            return Finished(EXIT_PREEMPTED)
        if self._nodes.pending:  # reports of health checks
            return waiting
        late = waiting.is_late
        n_required = self._job.least if late else self._n_expected
        is_enough = 0 in self._nodes and len(self._nodes.healthy()) >= n_required
        if not is_enough or time.monotonic() < waiting.earliest:
            if late:
                return self._give_up(waiting)
            self._announce(waiting)
            return waiting
        if not late and self._awaits_preferred_nodes():
            return waiting
        return self._start()

    def _awaits_preferred_nodes(self) -> bool:
        """Whether the first start waits some more, so that spares are spares.

        Nodes with high numbers are spares, and may connect first.
        """
        if self._n_generations:
            return False
        self._complete_since = self._complete_since or time.monotonic()
        preferred = {*range(self._job.size)}
        return not preferred <= {*self._nodes} and time.monotonic() - self._complete_since < _FIRST

    def _start(self) -> Generation:
        """Has the agents of the best nodes start the workers of a new generation."""
        usable = self._restarts.usable(self._nodes.healthy())
        n_members = self._n_wanted(len(usable))
        members = self._nodes.place(usable, n_members, self._restarts.failing)
        if len(members) < self._job.size:
            log(
                f"continuing with {len(members)} of {self._job.size} nodes: "
                f"{', '.join(map(str, members))}"
            )
        self._n_generations += 1
        self._n_expected = len(members)
        generation = Generation(self._n_generations, members, self._job.per_node)
        coordinator = self._nodes.coordinator()
        for rank, number in enumerate(members):
            self._nodes[number].peer.send(
                start=generation.number,
                coordinator=coordinator,
                count=generation.n_processes,
                first=rank * self._job.per_node,
                nodes=len(members),
                begun=self._n_generations_begun,
            )
        return generation

    def _announce(self, waiting: Waiting) -> None:
        """Logs once which nodes the next start waits for."""
        absent = self._nodes.absent()
        # Before the first start, `run` has logged that it waits for all nodes.
        is_known = not self._n_generations and bool(absent)
        is_short = len(self._nodes.healthy()) < self._n_expected
        if waiting.announced or is_known or not is_short:
            return
        waiting.announced = True
        missing = f"waiting for {absent or 'a healthy node'}, for up to {waiting.patience:g} s"
        log("; ".join([missing, *self._nodes.unhealthy()]))

    def _give_up(self, waiting: Waiting) -> Finished:
        """Logs why the next start is impossible."""
        reasons = self._nodes.unhealthy()
        hint = "; --health=off starts without checks" if reasons else ""
        absent = self._nodes.absent()
        if absent:
            reasons = [f"{absent} did not connect within {waiting.patience:g} s", *reasons]
        log(
            f"giving up: {', '.join(reasons)}; at least {self._job.least} are needed, and node 0"
            f"{hint}"
        )
        return Finished(EXIT_STALLED)

    def _n_wanted(self, n_available: int) -> int:
        """The number of the available healthy nodes that a generation would use."""
        n_available = min(n_available, self._job.size)
        limit = self._mesh_limit
        return limit.needed if limit.needed <= n_available <= limit.available else n_available

    def _could_grow(self, generation: Generation) -> bool:
        n_wanted = self._n_wanted(self._job.size)
        n_usable = len(self._restarts.usable(self._nodes.healthy()))
        return len(generation.members) < n_wanted <= n_usable

    @property
    def _save_plan(self) -> SignalPlan:
        """The signals after which workers save and exit, and are killed if they do not."""
        return ((0.0, signal.SIGTERM), (self._job.grace, signal.SIGKILL))

    def _on_node(self, number: int) -> str:
        return f" on node {number} ({self._nodes[number].host})" if self._job.nodes > 1 else ""

    # At the end.

    def _dismiss_agents(self, status: int) -> None:
        """Tells all agents to exit, and waits until they have hung up."""
        for node in self._nodes.values():
            node.peer.send(exit=status)
        deadline = time.monotonic() + _HELLO
        while any(node.peer.open for node in self._nodes.values()) and time.monotonic() < deadline:
            self._poll()
        self._listener.close()
