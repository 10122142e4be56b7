"""The agent of one node: it starts and ends its workers when the controller says so, and reports
how they do.

It obeys one controller, on node 0, over one connection. If the connection is lost, it kills its
workers and tries to reconnect.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from mesh_lm.launch import health
from mesh_lm.launch.controller import PURPOSE
from mesh_lm.launch.generation import KILL_PLAN, UNKILLABLE, SignalPlan, log
from mesh_lm.launch.job import VARIABLES as JOB_VARIABLES
from mesh_lm.launch.job import Job
from mesh_lm.launch.worker import Worker
from mesh_lm.network import process_slot, protocol
from mesh_lm.network.environment import BEGUN, ELASTIC, GENERATION, LEAST, SECRET, SECRET_FILE
from mesh_lm.network.exit_status import EXIT_PREEMPTED, EXIT_STALLED
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import LOOPBACK, QUIET, Peer, free_port

_TICK = 0.05
_RETRY = 0.5
_HANDSHAKE = 10.0
"""Seconds within which the controller must have proved that it belongs to the job."""


@dataclasses.dataclass
class Disconnected:
    """The state in which this node looks for its controller.

    Workers of an earlier connection are being killed.
    """

    since: float
    """The time at which it began (time.monotonic)."""
    patience: float
    """Seconds after which this node gives up."""
    obstacle: str = ""
    """Why it could not connect, for the log."""


@dataclasses.dataclass
class Connected:
    """The state in which a controller tells this node what to do."""

    peer: Peer
    """The controller."""
    previous: Disconnected
    """The state to which this node returns if the controller never answers."""
    answered: bool = False
    """Whether the controller has said anything but a refusal."""
    check: int | None = None
    """The number of the health check whose result it awaits; None: none."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """The state after the job, or after this node has given up."""

    status: int


State = Disconnected | Connected | Ended
"""Disconnected -> Connected: a controller listens (`_reconnect`).
Disconnected -> Ended: a signal, or patience is over (`_reconnect`).
Connected -> Disconnected: the connection is lost (`_disconnect`); the workers are killed.
Connected -> Ended: the controller says so (`_obey`).
"""


class Agent:
    """Runs this node's part of a job to its end: `run` returns the job's status.

    It must run in the main thread, to receive signals. Linux kills the workers when the thread that
    started them ends, so no worker outlives its agent.
    """

    def __init__(
        self,
        job: Job,
        address: tuple[str, int],
        secret: Secret,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """address: the controller's. secret: what the controller must know, too.

        Raises ConfigError if the GPUs of this node cannot be divided equally among its workers.
        """
        self._job = job
        self._address = address
        self._secret = secret
        self._environment = environment
        self._life = secrets.token_hex(8)
        self._devices = [job.devices_of(local, environment) for local in range(job.per_node)]
        self._state: State = Disconnected(time.monotonic(), job.first_wait)
        self._last_tick = time.monotonic()

        self._pending_signals: list[int] = []
        self._stop_requested = False
        self._interrupted = False  # by SIGINT

        self._wait_logged = False  # whether the log says that this node waits
        self._last_refusal = ""  # the last one in the log

        self._workers: dict[int, Worker] = {}  # by process
        self._generation = 0
        self._plan: SignalPlan = ()
        self._plan_began = 0.0
        self._last_report = 0.0

        self._checks = health.checks(job, environment)
        self._examination: health.Examination | None = None  # the last one
        self._doubts: set[str] = set()  # checks of which the log says that they are in doubt

    def run(self) -> int:
        """Runs until the job has ended, and returns its status."""
        old_handlers = {}
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                old_handlers[number] = signal.signal(number, self._catch)
        try:
            while not isinstance(self._state, Ended):
                self._tick()
                time.sleep(_TICK)
        finally:
            self._signal_workers(KILL_PLAN)
            if self._peer:
                self._peer.close()
            for number, handler in old_handlers.items():
                signal.signal(number, handler)
        return self._state.status

    @property
    def _peer(self) -> Peer | None:
        """The controller, if it is connected."""
        return self._state.peer if isinstance(self._state, Connected) else None

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._pending_signals.append(number)

    def _tick(self) -> None:
        self._forward_signals()
        previous_tick = self._last_tick
        self._last_tick = time.monotonic()
        # After a pause of this process itself, the silence of others proves nothing.
        paused = self._last_tick - previous_tick > self._job.pause
        if isinstance(self._state, Connected):
            self._state = self._serve(self._state, excused=paused)
        elif isinstance(self._state, Disconnected):
            self._state = self._reconnect(self._state)
        self._watch_workers(excused=paused)
        self._report_health()
        self._signal_workers(self._plan)

    def _forward_signals(self) -> None:
        """Forwards signals to all nodes, through the controller.

        A second SIGINT kills the workers.
        """
        signals = self._pending_signals
        self._pending_signals = []
        for number in signals:
            at_once = number == signal.SIGINT and self._interrupted
            self._interrupted |= number == signal.SIGINT
            if at_once:
                self._begin_plan(KILL_PLAN)
            if self._peer:
                self._peer.send(stop=signal.Signals(number).name, at_once=at_once)
            self._stop_requested = True

    # The connection to the controller.

    @property
    def _controller(self) -> str:
        return f"the controller at {self._address[0]}:{self._address[1]}"

    def _reconnect(self, disconnected: Disconnected) -> State:
        """Tries to connect, once the workers of an earlier connection have ended."""
        waited = time.monotonic() - disconnected.since
        if self._workers:
            if waited <= max(disconnected.patience, UNKILLABLE):
                return disconnected
            log(
                f"node {self._job.node} is giving up: SIGKILL does not end its workers, which hang "
                "in the kernel"
            )
            return Ended(EXIT_STALLED)
        if self._stop_requested:
            return Ended(EXIT_PREEMPTED)  # no controller is connected that could decide this
        if waited > disconnected.patience:
            log(
                f"node {self._job.node} is giving up: no answer from {self._controller} within "
                f"{disconnected.patience:g} s{disconnected.obstacle}"
            )
            return Ended(EXIT_STALLED)
        if waited > QUIET and not self._wait_logged:
            log(
                f"node {self._job.node} waits for {self._controller}, for up to "
                f"{disconnected.patience:g} s"
            )
            self._wait_logged = True
        try:
            connection = socket.create_connection(self._address, timeout=_RETRY)
            peer = Peer(connection, self._secret, PURPOSE, serves=False)
        except OSError as error:
            disconnected.obstacle = f" ({error})"
            time.sleep(_RETRY)
            return disconnected
        peer.send(
            hello="mesh_lm",
            node=self._job.node,
            life=self._life,
            host=socket.gethostname(),
            job=self._job.digests(),
        )
        return Connected(peer, disconnected)

    def _serve(self, connected: Connected, *, excused: bool) -> State:
        """Carries out the messages that have arrived, and drops a connection that is lost.

        excused: the controller's silence proves nothing, because this process was paused itself.
        """
        controller = connected.peer
        for message in controller.receive(excused=excused):
            ended = self._obey(connected, message)
            if ended:
                controller.close()
                return ended
        unproven = not controller.proven and controller.age > _HANDSHAKE
        if unproven or not controller.open or controller.silence > self._job.heartbeat:
            return self._disconnect(connected)
        return connected

    def _disconnect(self, connected: Connected) -> Disconnected:
        controller = connected.peer
        silence = f"sent nothing for {controller.silence:.0f} s"
        event = silence if controller.open else "is gone"
        if controller.refused:
            self._log_refusal(
                connected,
                f"{self._controller} was refused: {controller.refused}; give all nodes of this run "
                "the same secret (docs/multi_host.md)",
            )
        controller.close()
        disconnected = connected.previous
        if connected.answered:  # so the time to reconnect starts now
            log(
                f"node {self._job.node}: the controller on node 0 {event}; reconnecting, for up to "
                f"{self._job.rejoin:g} s"
            )
            disconnected = Disconnected(time.monotonic(), self._job.rejoin)
        self._begin_plan(KILL_PLAN)
        time.sleep(_RETRY)
        return disconnected

    def _log_refusal(self, connected: Connected, reason: str) -> None:
        """Logs once why this node is refused, and that it tries again."""
        disconnected = connected.previous
        if reason != self._last_refusal:
            log(
                f"node {self._job.node}: {reason}; trying again, for up to "
                f"{disconnected.patience:g} s"
            )
        self._last_refusal = reason
        disconnected.obstacle = f" ({reason})"

    def _obey(self, connected: Connected, message: dict[str, Any]) -> Ended | None:
        """Carries out one message of the controller. Returns the end of the job if it says so."""
        try:
            self._require_understood(message)
        except ValueError as error:
            log(
                f"node {self._job.node}: the controller sent a message that is not understood: "
                f"{error}"
            )
            connected.peer.close()
            return None
        if message.get("refused") == "busy":
            self._log_refusal(
                connected,
                f"another launcher of node {self._job.node} is connected, on "
                f"{message.get('host')}; each launcher needs its own --node",
            )
            return None
        connected.answered = True
        if "start" in message:
            self._start_workers(message)
        elif message.get("end") == self._generation:
            plan = message.get("schedule", KILL_PLAN)
            self._begin_plan(tuple((seconds, number) for seconds, number in plan))
        elif "check" in message:
            connected.check = message["check"]
            self._examination = health.Examination(self._checks, previous=self._examination)
        elif "exit" in message:
            if message.get("refused"):
                fields = self._job.explained(message.get("fields", ()))
                log(f"node {self._job.node} was started differently from node 0: {fields}")
            return Ended(message["exit"])
        return None

    def _require_understood(self, message: dict[str, Any]) -> None:
        """Raises ValueError for a message that another version of mesh_lm would send."""
        is_start = "start" in message
        protocol.require(message, protocol.ORDER, *(protocol.START if is_start else ()))
        if is_start and message["first"] + self._job.per_node > message["count"]:
            raise ValueError("first and count do not leave room for this node's processes")

    # Health checks.

    def _report_health(self) -> None:
        """Reports the result of a health check once it is complete.

        Logs, once each, the checks that could not be done.
        """
        connected = self._state
        if not isinstance(connected, Connected) or connected.check is None:
            return
        assert self._examination is not None  # it was started for this check
        findings = self._examination.findings()
        if findings is None:
            return
        for finding in findings:
            if finding.outcome == "unknown" and finding.check not in self._doubts:
                self._doubts.add(finding.check)
                log(
                    f"node {self._job.node} takes part, with a warning of the health check "
                    f"'{finding.check}': {finding.text}"
                )
        report: dict[str, Any] = {
            "checked": connected.check,
            "port": free_port(LOOPBACK if self._job.nodes == 1 else ""),
            "findings": [finding._asdict() for finding in findings if finding.outcome == "failed"],
        }
        if self._checks.n_gpus is not None:
            report["gpus"] = self._checks.n_gpus
        connected.check = None
        connected.peer.send(**report)

    # The workers.

    def _start_workers(self, order: dict[str, Any]) -> None:
        self._generation = order["start"]
        self._plan = ()
        environment = self._worker_environment(order)
        for local, devices in enumerate(self._devices):
            index = order["first"] + local
            variables = {process_slot.VARIABLES["index"]: str(index)}
            if devices:
                variables[process_slot.LOCAL_DEVICES] = devices
            self._workers[index] = Worker(
                self._job.command, environment | variables, index, relay=order["count"] > 1
            )

    def _worker_environment(self, order: dict[str, Any]) -> dict[str, str]:
        """Returns the variables that all workers of this node share."""
        environment = {**self._environment}
        for name in (*JOB_VARIABLES.values(), SECRET_FILE):
            environment.pop(name, None)
        environment |= {
            process_slot.VARIABLES["coordinator"]: order["coordinator"],
            process_slot.VARIABLES["processes"]: str(order["count"]),
            GENERATION: str(self._generation),
            BEGUN: str(order["begun"]),
            JOB_VARIABLES["nodes"]: str(order["nodes"]),
            SECRET: self._secret.derived("workers", str(self._generation)).text(),
        }
        if self._job.devices:
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self._job.devices)}
        if self._job.least < self._job.size:
            environment |= {ELASTIC: str(self._job.size), LEAST: str(self._job.least)}
        return environment

    def _watch_workers(self, *, excused: bool) -> None:
        """Reports the workers' heartbeats and exits to the controller, at least once a second."""
        died = []
        fewer = 0
        beats = {}
        for index, worker in [*self._workers.items()]:
            worker.read(excused=excused)
            status = worker.status()
            if status is not None:
                died.append((index, status, worker.sent))
                fewer = fewer or worker.nodes
                del self._workers[index]
            elif not self._kill_is_near:
                seconds = worker.silence(self._job.start, self._job.heartbeat)
                if seconds:
                    self._report(silent=index, seconds=seconds)
            if worker.beat:
                beats[index] = worker.beat | {"age": time.monotonic() - worker.last_beat}
        if died or time.monotonic() - self._last_report > min(1.0, self._job.heartbeat / 4):
            self._report(beats=beats, died=died, fewer=fewer, ended=not self._workers)

    def _report(self, **message: Any) -> None:
        if self._peer:
            self._last_report = time.monotonic()
            self._peer.send(generation=self._generation, **message)

    def _begin_plan(self, plan: SignalPlan) -> None:
        self._plan = plan
        self._plan_began = time.monotonic()

    @property
    def _kill_is_near(self) -> bool:
        """Whether the workers are about to be killed anyway."""
        return any(
            number == signal.SIGKILL and seconds < self._job.heartbeat
            for seconds, number in self._plan
        )

    def _signal_workers(self, plan: SignalPlan) -> None:
        """Sends each worker the signal that is due by now, once."""
        elapsed = time.monotonic() - self._plan_began
        due = [number for seconds, number in plan if elapsed >= seconds]
        if not due:
            return
        for worker in self._workers.values():
            if worker.sent != due[-1]:
                worker.signal(due[-1])
