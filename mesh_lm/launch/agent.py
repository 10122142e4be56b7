"""The agent of one node: it starts and ends its workers when the controller says so, and reports
how they do.

It obeys one controller, on node 0, over one connection. If the connection is lost, it kills its
workers and tries to reconnect.
"""

from __future__ import annotations

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
from mesh_lm.launch.generation import AT_ONCE, UNKILLABLE, SignalPlan, log
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


class Agent:
    """Runs this node's part of a job to its end: `run` returns the job's status. It must run in the
    main thread, to receive signals.

    Linux kills the workers when the thread that started them ends, so no worker outlives its agent.
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
        self._job, self._address, self._secret, self._environment = (
            job,
            address,
            secret,
            environment,
        )
        self._life, self._told = secrets.token_hex(8), ""
        self._devices = [job.devices_of(local, environment) for local in range(job.per_node)]
        self._checks, self._check = health.checks(job, environment), 0
        self._examination: health.Examination | None = None
        self._examining = False
        self._doubts: set[str] = set()
        self._peer: Peer | None = None
        self._workers: dict[int, Worker] = {}
        self._generation = 0
        self._plan: SignalPlan = ()
        self._ordered = 0.0
        self._signals: list[int] = []
        self._stop = self._interrupted = False
        self._status: int | None = None
        self._reported, self._ticked, self._welcome = 0.0, time.monotonic(), False
        self._since, self._patience, self._why = time.monotonic(), job.first_wait, ""
        self._silent = True  # whether the log has yet to say for whom this node waits

    def run(self) -> int:
        """Runs until the job has ended, and returns its status."""
        wanted = [
            n
            for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            if signal.getsignal(n) is not signal.SIG_IGN
        ]
        before = {number: signal.signal(number, self._caught) for number in wanted}
        try:
            while self._status is None:
                self._tick()
                time.sleep(_TICK)
        finally:
            self._signal(AT_ONCE)
            if self._peer:
                self._peer.close()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._status

    def _caught(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _tick(self) -> None:
        self._stops()
        before, self._ticked = self._ticked, time.monotonic()
        paused = self._ticked - before > self._job.pause
        if self._peer:
            for message in self._peer.receive(excused=paused):
                self._obey(message)
            late = not self._peer.proven and self._peer.age > _HANDSHAKE
            if self._status is None and (
                late or not self._peer.open or self._peer.silence > self._job.heartbeat
            ):
                self._disconnect()
        elif self._stop and not self._workers:
            self._status = EXIT_PREEMPTED  # no controller is connected that could decide this
        elif not self._workers:
            self._connect()
        elif time.monotonic() - self._since > max(self._patience, UNKILLABLE):
            log(
                f"node {self._job.node} is giving up: SIGKILL does not end its workers, which hang "
                "in the kernel"
            )
            self._status = EXIT_STALLED
        self._look(excused=paused)
        self._examine()
        self._signal(self._plan)

    def _stops(self) -> None:
        """Forwards a signal to all nodes, through the controller. A second SIGINT kills the
        workers.
        """
        signals, self._signals = self._signals, []
        for number in signals:
            at_once = number == signal.SIGINT and self._interrupted
            self._interrupted |= number == signal.SIGINT
            if at_once:
                self._end(AT_ONCE)
            if self._peer:
                self._peer.send(stop=signal.Signals(number).name, at_once=at_once)
            self._stop = True

    # The connection to the controller.

    def _connect(self) -> None:
        if time.monotonic() - self._since > self._patience:
            where = f"the controller at {self._address[0]}:{self._address[1]}"
            log(
                f"node {self._job.node} is giving up: no answer from {where} within "
                f"{self._patience:g} s{self._why}"
            )
            self._status = EXIT_STALLED
            return
        if self._silent and time.monotonic() - self._since > QUIET:
            where = f"the controller at {self._address[0]}:{self._address[1]}"
            log(f"node {self._job.node} waits for {where}, for up to {self._patience:g} s")
            self._silent = False
        try:
            self._peer = Peer(
                socket.create_connection(self._address, timeout=_RETRY),
                self._secret,
                PURPOSE,
                serves=False,
            )
        except OSError as error:
            self._why = f" ({error})"
            time.sleep(_RETRY)
            return
        self._welcome = False
        host = socket.gethostname()
        self._peer.send(
            hello="mesh_lm",
            node=self._job.node,
            life=self._life,
            host=host,
            job=self._job.digests(),
        )

    def _disconnect(self) -> None:
        assert self._peer is not None
        how = "is gone" if not self._peer.open else f"sent nothing for {self._peer.silence:.0f} s"
        if self._peer.refused:
            fix = "give all nodes of this run the same secret (docs/multi_host.md)"
            self._refused(
                f"the controller at {self._address[0]}:{self._address[1]} was refused: "
                f"{self._peer.refused}; {fix}"
            )
        self._peer.close()
        self._peer, self._examining = None, False
        if self._welcome:  # the controller had answered before, so the time to reconnect starts now
            log(
                f"node {self._job.node}: the controller on node 0 {how}; reconnecting, for up to "
                f"{self._job.rejoin:g} s"
            )
            self._since, self._patience = time.monotonic(), self._job.rejoin
        self._end(AT_ONCE)
        time.sleep(_RETRY)

    def _refused(self, why: str) -> None:
        """Logs why this node is refused, once, and that it tries again."""
        if why != self._told:
            log(f"node {self._job.node}: {why}; trying again, for up to {self._patience:g} s")
        self._told, self._why = why, f" ({why})"

    def _obey(self, message: dict[str, Any]) -> None:
        try:
            protocol.require(
                message, protocol.ORDER, *(protocol.START if "start" in message else ())
            )
            if "start" in message and message["first"] + self._job.per_node > message["count"]:
                raise ValueError("first and count do not leave room for this node's processes")
        except ValueError as error:
            assert self._peer is not None  # it has just sent this
            log(
                f"node {self._job.node}: the controller sent a message that is not understood: "
                f"{error}"
            )
            return self._peer.close()
        if message.get("refused") == "busy":
            who = (
                f"another launcher of node {self._job.node} is connected, on {message.get('host')}"
            )
            return self._refused(f"{who}; each launcher needs its own --node")
        self._welcome = True
        if "start" in message:
            self._start(message)
        elif message.get("end") == self._generation:
            self._end(tuple((after, number) for after, number in message.get("schedule", AT_ONCE)))
        elif "check" in message:
            self._check, self._examining = message["check"], True
            self._examination = health.Examination(self._checks, before=self._examination)
        elif "exit" in message:
            self._status = message["exit"]
            if message.get("refused"):
                fields = self._job.explained(message.get("fields", ()))
                log(f"node {self._job.node} was started differently from node 0: {fields}")

    def _examine(self) -> None:
        """Reports the result of a health check when it is there, and logs, once each, what could
        not be checked.
        """
        if (
            not self._peer
            or not self._examining
            or not self._examination
            or (found := self._examination.findings()) is None
        ):
            return
        self._examining = False
        for each in found:
            if each.outcome == "unknown" and each.check not in self._doubts:
                self._doubts.add(each.check)
                log(
                    f"node {self._job.node} takes part, with a warning of the health check "
                    f"'{each.check}': {each.text}"
                )
        failed = [each._asdict() for each in found if each.outcome == "failed"]
        port = free_port(LOOPBACK if self._job.nodes == 1 else "")
        self._peer.send(checked=self._check, port=port, findings=failed, **self._checks.count)

    # The workers.

    def _start(self, order: dict[str, Any]) -> None:
        self._generation, self._plan = order["start"], ()
        hidden = {*JOB_VARIABLES.values(), SECRET_FILE}
        environment = {
            name: value for name, value in self._environment.items() if name not in hidden
        }
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
        for local, devices in enumerate(self._devices):
            index = order["first"] + local
            own = {process_slot.VARIABLES["index"]: str(index)} | (
                {process_slot.LOCAL_DEVICES: devices} if devices else {}
            )
            self._workers[index] = Worker(
                self._job.command, environment | own, index, relay=order["count"] > 1
            )

    def _look(self, *, excused: bool) -> None:
        """Reports the workers' heartbeats and exits to the controller, at least once a second."""
        died, fewer, looked = [], 0, {**self._workers}
        for index, worker in [*self._workers.items()]:
            worker.read(excused=excused)
            if (status := worker.status()) is not None:
                died.append((index, status, worker.sent))
                fewer = fewer or worker.nodes
                del self._workers[index]
            elif not self._kill_is_near and (
                seconds := worker.silence(self._job.start, self._job.heartbeat)
            ):
                self._report(silent=index, seconds=seconds)
        beats = {
            index: worker.beat | {"age": time.monotonic() - worker.heard}
            for index, worker in looked.items()
            if worker.beat
        }
        if died or time.monotonic() - self._reported > min(1.0, self._job.heartbeat / 4):
            self._report(beats=beats, died=died, fewer=fewer, ended=not self._workers)

    def _report(self, **message: Any) -> None:
        if self._peer:
            self._reported = time.monotonic()
            self._peer.send(generation=self._generation, **message)

    def _end(self, plan: SignalPlan) -> None:
        self._plan, self._ordered = plan, time.monotonic()

    @property
    def _kill_is_near(self) -> bool:
        """Returns whether the workers are about to be killed anyway."""
        return any(
            number == signal.SIGKILL and after < self._job.heartbeat for after, number in self._plan
        )

    def _signal(self, plan: SignalPlan) -> None:
        """Sends each worker the signal that is due by now, once."""
        due = [number for after, number in plan if time.monotonic() >= self._ordered + after]
        for worker in self._workers.values():
            if due and worker.sent != due[-1]:
                worker.signal(due[-1])
