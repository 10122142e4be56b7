"""A rendezvous of the run's processes before `jax.distributed.initialize`, for the sake of clear
errors.

JAX itself aborts without a Python error if a process never connects, and hangs if they run
different programs. Here process 0 listens at the coordinator's address, receives from each of the
others what it runs, compares, and sends all of them the outcome. Both ends prove first that they
know the job's secret (`mesh_lm.network.channel`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import sys
import time
from typing import Any, NamedTuple

from mesh_lm.errors import ConfigError, listed, number_ranges
from mesh_lm.network import protocol
from mesh_lm.network.process_slot import ProcessSlot
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import LOOPBACK, QUIET, Peer, is_loopback, listen

Description = dict[str, Any]
"""Values that must be the same on every process, as nested dicts of JSON values
(`mesh_lm.distributed.description`)."""

_MAGIC = "mesh_lm"
_PURPOSE = "rendezvous"
_SAME = "start all processes with the same secret (docs/multi_host.md)"
_TEXT = 2**16
"""Characters of a problem that are sent."""
_TICK = 0.01
_RETRY = 0.2
_GRACE = 10.0
"""Seconds in which processes that are late still receive an error, and in which all must hang
up."""
_HANDSHAKE = 10.0
"""Seconds within which the other end must have introduced itself."""
_CALLERS = 128
"""Connections that may wait for that; the oldest is closed first."""


class RendezvousFailed(ConfigError):
    """The processes did not find each other; another attempt may succeed."""


def meet(slot: ProcessSlot, timeout: float, description: Description, secret: Secret) -> None:
    """Returns when all processes are connected and run the same program; takes at most `timeout`
    seconds, whoever else connects.

    Raises on every connected process. RendezvousFailed: nothing answers at the coordinator's
    address, its port is taken, or processes did not connect. ConfigError: two have the same index,
    an index is out of range, or another process count, or a different description.
    """
    introduction = {
        "magic": _MAGIC,
        "count": slot.count,
        "index": slot.index,
        "host": socket.gethostname(),
        "description": description,
    }
    introduction = json.loads(json.dumps(introduction, default=repr))  # as the others will see it
    meeting = _Meeting(slot, timeout, time.monotonic() + timeout, introduction, secret)
    outcome = _host(meeting) if slot.index == 0 else _visit(meeting)
    if not outcome.problem:
        return
    if outcome.absent:
        raise RendezvousFailed(outcome.problem)
    raise ConfigError(outcome.problem)


@dataclasses.dataclass(frozen=True)
class _Meeting:
    """A rendezvous, as one process knows it."""

    slot: ProcessSlot
    timeout: float
    """Seconds that all processes have to connect."""
    deadline: float
    """The end of that time (time.monotonic)."""
    introduction: dict[str, Any]
    """This process's message to process 0 (`protocol.PRESENTED`)."""
    secret: Secret


class _Outcome(NamedTuple):
    problem: str
    """Why the run cannot start; empty: it can."""
    absent: bool
    """Whether the cause is that a process is absent, so that another attempt may succeed."""


# Process 0's side.


def _host(meeting: _Meeting) -> _Outcome:
    host, port = meeting.slot.address
    address = ""  # all addresses of this machine
    if is_loopback(host):
        address = LOOPBACK if host == "localhost" else host
    try:
        listener = listen(port, address, meeting.slot.count)
    except OSError as error:
        return _Outcome(
            f"process 0 cannot listen on port {port}: {error.strerror}; choose a free port for "
            "launch.coordinator",
            absent=True,
        )
    guests = _Guests(listener, meeting)
    try:
        outcome = _receive_all(meeting, guests)
        guests.dismiss(outcome)
        return outcome
    finally:
        guests.close()


def _receive_all(meeting: _Meeting, guests: _Guests) -> _Outcome:
    """Waits until all processes have presented themselves, or the time is over."""
    slot = meeting.slot
    n_others = slot.count - 1
    deadline = meeting.deadline
    quiet_until = time.monotonic() + QUIET
    wait_logged = False
    while guests.n_presented < n_others and time.monotonic() <= deadline:
        time.sleep(_TICK)
        guests.poll()
        if time.monotonic() > quiet_until and not wait_logged and guests.n_presented < n_others:
            _say(
                f"process 0 waits for {guests.absent()} of {slot.count} at {slot.coordinator}, for "
                f"up to {meeting.timeout:g} s"
            )
            wait_logged = True
        if guests.problem:  # processes that are late should receive it too
            deadline = min(deadline, time.monotonic() + _GRACE)

    if guests.problem:
        return _Outcome(guests.problem, absent=False)
    if guests.n_presented < n_others:
        return _Outcome(
            f"{guests.absent()} of {slot.count} did not connect to {slot.coordinator} within "
            f"{meeting.timeout:g} s; see their logs, check launch.processes, and that they can "
            f"reach that address{guests.refused}",
            absent=True,
        )
    lost = guests.lost()
    if lost:
        return _Outcome(
            f"{number_ranges(lost)} of {slot.count} connected to {slot.coordinator} and "
            "disconnected; see their logs",
            absent=True,
        )
    return _Outcome("", absent=False)


class _Guests:
    """The other processes, as process 0 sees them.

    Attributes:
      problem: why the run cannot start; empty: nothing is known.
      refused: what to add to a message about absent processes.
    """

    def __init__(self, listener: socket.socket, meeting: _Meeting) -> None:
        self._listener = listener
        self._meeting = meeting
        self._n_processes = meeting.slot.count
        self._callers: list[Peer] = []  # connections that have not presented themselves
        self._peer_by_index: dict[int, Peer] = {}
        self._unwanted: list[Peer] = []  # processes that may not take part
        self.problem = ""
        self.refused = ""
        listener.setblocking(False)

    @property
    def n_presented(self) -> int:
        """The number of processes that presented themselves.

        Those that may not take part are included.
        """
        return len(self._peer_by_index) + len(self._unwanted)

    def poll(self) -> None:
        """Accepts connections, and reads what has arrived."""
        with contextlib.suppress(OSError):
            for _ in range(_CALLERS):
                connection, _address = self._listener.accept()
                peer = Peer(connection, self._meeting.secret, _PURPOSE, serves=True)
                self._callers.append(peer)
        limit = max(_CALLERS, 2 * self._n_processes)
        for caller in self._callers[:-limit]:
            caller.close()
        self._callers = self._callers[-limit:]

        for caller in [*self._callers]:
            received = caller.receive()
            if received:
                self._callers.remove(caller)
                self._present(caller, received[0])
            elif not caller.open or caller.age > _HANDSHAKE:
                self._callers.remove(caller)
                caller.close()
                if caller.refused:
                    self._record_refusal(caller)

    def _record_refusal(self, caller: Peer) -> None:
        if not self.refused:
            _warn(
                f"process 0 refused a connection from {caller.address}: {caller.refused}; {_SAME}"
            )
        self.refused = (
            f"; the last connection that was refused came from {caller.address}: {caller.refused}"
        )

    def _present(self, caller: Peer, other: dict[str, Any]) -> None:
        """Takes a process's introduction."""
        try:
            protocol.require(other, protocol.PRESENTED, *protocol.PRESENTED)
        except ValueError as error:
            self.refused = f"; a process at {caller.address} was not understood: {error}"
            caller.close()
            return
        index = other["index"]
        twin = self._peer_by_index.get(index)
        if twin:
            twin.receive()  # it may have hung up, to try again
        if not 0 < index < self._n_processes:
            self._unwanted.append(caller)
            self.problem = (
                f"a process on {other['host']} has the index {index} of {self._n_processes}; "
                f"launch.index must be 0 to {self._n_processes - 1}"
            )
        elif twin and twin.open:
            self._unwanted.append(caller)
            self.problem = (
                f"two processes have the index {index} of {other['count']}; each needs its own "
                "launch.index"
            )
        else:
            self._peer_by_index[index] = caller
        self.problem = self.problem or _difference(self._meeting.introduction, other)

    def absent(self) -> str:
        """Returns the processes that have not presented themselves, as text."""
        return number_ranges(sorted({*range(1, self._n_processes)} - self._peer_by_index.keys()))

    def lost(self) -> list[int]:
        """Returns the processes that have hung up."""
        for peer in self._peer_by_index.values():
            peer.receive()
        return sorted(index for index, peer in self._peer_by_index.items() if not peer.open)

    def dismiss(self, outcome: _Outcome) -> None:
        """Sends all processes the outcome.

        They hang up first, so that no socket on this port lingers when JAX binds it.
        """
        guests = [*self._peer_by_index.values(), *self._unwanted]
        for guest in guests:
            guest.send(problem=outcome.problem[:_TEXT], absent=outcome.absent)
        deadline = time.monotonic() + _GRACE
        while any(guest.open for guest in guests) and time.monotonic() < deadline:
            time.sleep(_TICK)
            for guest in guests:
                guest.receive()

    def close(self) -> None:
        """Closes all connections."""
        for peer in [*self._peer_by_index.values(), *self._unwanted, *self._callers]:
            peer.close()
        self._listener.close()


def _difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns a message that lists the first fields in which a process differs from process 0;
    empty if there are none.
    """
    if other["count"] != first["count"]:
        return (
            f"process {other['index']} expects {other['count']} processes, process 0 expects "
            f"{first['count']}"
        )
    lines = _compare(first["description"], other["description"], "")
    if not lines:
        return ""
    head = (
        f"process {other['index']} on {other['host']} does not match process 0 on {first['host']}"
    )
    return listed(head, lines) + "\nstart all of them from the same files with the same arguments"


def _compare(a: Any, b: Any, path: str) -> list[str]:
    """Returns a line for each value that differs. path: the names that lead to `a` and `b`."""
    if not isinstance(a, dict) or not isinstance(b, dict):
        return [] if json.dumps(a) == json.dumps(b) else [f"{path}: {a} on process 0, {b} there"]
    lines = []
    for key in dict.fromkeys([*a, *b]):
        lines += _compare(a.get(key), b.get(key), f"{path}.{key}" if path else key)
    return lines


# The other processes' side.


def _visit(meeting: _Meeting) -> _Outcome:
    slot = meeting.slot
    obstacle = "it did not answer"
    quiet_until = time.monotonic() + QUIET
    wait_logged = False
    while True:
        try:
            with contextlib.closing(_connect(meeting)) as host:
                outcome = _await_outcome(host, meeting)
                if outcome:
                    return outcome
                if host.refused:
                    if host.refused not in obstacle:
                        _warn(
                            f"process {slot.index} found something at {slot.coordinator}, but "
                            f"{host.refused}; {_SAME}; trying again"
                        )
                    obstacle = f"{host.refused}: {_SAME}"
                elif not host.open:
                    obstacle = "it hung up"
        except (OSError, ValueError) as error:
            obstacle = str(error)
        if time.monotonic() > quiet_until and not wait_logged:
            _say(
                f"process {slot.index} waits for process 0 at {slot.coordinator}, for up to "
                f"{meeting.timeout:g} s"
            )
            wait_logged = True
        if time.monotonic() > meeting.deadline:
            return _Outcome(
                f"process {slot.index} found no process 0 at {slot.coordinator} within "
                f"{meeting.timeout:g} s ({obstacle}); start it, or correct launch.coordinator",
                absent=True,
            )
        time.sleep(_RETRY)


def _connect(meeting: _Meeting) -> Peer:
    """Returns process 0, to which this process has introduced itself."""
    seconds = max(0.01, meeting.deadline - time.monotonic())
    connection = socket.create_connection(meeting.slot.address, timeout=seconds)
    host = Peer(connection, meeting.secret, _PURPOSE, serves=False)
    host.send(**meeting.introduction)
    return host


def _await_outcome(host: Peer, meeting: _Meeting) -> _Outcome | None:
    """Returns the answer of process 0; None if it does not answer.

    Raises ValueError if the answer is not understood.
    """
    deadline = meeting.deadline + _GRACE + _HANDSHAKE
    while host.open and time.monotonic() < deadline:
        if not host.proven and host.age >= _HANDSHAKE:
            return None
        time.sleep(_TICK)
        for answer in host.receive():
            protocol.require(answer, protocol.OUTCOME, *protocol.OUTCOME)
            return _Outcome(answer["problem"], answer["absent"])
    return None


def _warn(text: str) -> None:
    """Prints what may keep this process waiting until its time is over."""
    _say(f"warning: {text}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
