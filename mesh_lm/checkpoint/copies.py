"""Copies of node-local checkpoints on other nodes, so that a run resumes from a local step although
a node, or its disk, is lost.

Processes that see the same files below `checkpoint.local` are one node. Each process sends the
files of a step, once they are complete, to a process of each of the next `checkpoint.local_copies`
nodes, in a ring. A thread does it, and training never waits: if a step is saved before the last one
was sent, only the newest one follows. At a start, a process whose files are missing fetches them
from any node that has them, whatever its number was before.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from mesh_lm import distributed
from mesh_lm.checkpoint.transfer import (
    ARRIVING,
    Conversation,
    TransferFailed,
    receive_step,
    send_step,
)
from mesh_lm.config import LaunchConfig
from mesh_lm.errors import ConfigError
from mesh_lm.network.channel import Refused
from mesh_lm.network.environment import ELASTIC
from mesh_lm.network.process_slot import ProcessSlot, host_and_port
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import LOOPBACK, is_loopback, listen

_CONNECT = 10.0
"""Seconds to wait for a connection."""
_CALLERS = 64
"""Connections that may wait to prove themselves; the oldest is closed first."""
_QUIET = 60.0
"""Seconds between two lines about refused connections."""
_REPEAT = 600.0
"""Seconds between two warnings about copies that do not succeed."""

Place = Callable[[int, int], Path]
"""(step, process) -> the directory of its files on this node."""


class Copies:
    """The copies of one run: this process's server, and the thread that sends its own steps."""

    def __init__(
        self,
        n_copies: int,
        directory: Path,
        launch: LaunchConfig,
        place: Place,
        stored: Callable[[int], None],
    ) -> None:
        """All processes must call it. directory: the run's, on the node's disk. stored: is called
        with a process whose step has arrived.

        Raises ConfigError if there are too few nodes.
        """
        index, nodes = jax.process_index(), nodes_by_disk(directory)
        n_copies = _enough(n_copies, len(nodes))
        with distributed.collective_errors():
            for remains in directory.glob(f"{ARRIVING}*"):
                shutil.rmtree(remains, ignore_errors=True)
            slot = ProcessSlot.of(launch)
            host, known_as = own_address(slot.coordinator if slot else "")
            secret = Secret.shared()
            self._server = Server(secret, host, place, stored, jax.process_count())
        self._addresses = [
            (name, port)
            for name, port in distributed.gather_from_all([known_as, self._server.port])
        ]
        self._secret, self._place = secret, place
        self.node = {*next(members for members in nodes if index in members)}
        """The processes of this node."""
        self.kept_here = self.node | {
            p for p in range(jax.process_count()) if {*receivers(nodes, p, n_copies)} & self.node
        }
        """The processes whose steps this node keeps."""
        targets = [self._addresses[process] for process in receivers(nodes, index, n_copies)]
        self._sender = Sender(secret, targets, lambda step: place(step, index), index)

    def send(self, step: int) -> None:
        """Sends a complete step of this process in the background."""
        self._sender.send(step)

    def fetch(self, step: int, holder: int) -> None:
        """Fetches this process's files of a step from the process that has them. Raises OSError or
        ValueError.
        """
        index = jax.process_index()
        with _connected(self._addresses[holder], self._secret) as conversation:
            conversation.send(get=step, process=index)
            receive_step(
                conversation, conversation.receive("sizes")["sizes"], self._place(step, index)
            )

    def cancel(self) -> None:
        """Gives up what is being sent."""
        self._sender.cancel()

    def close(self) -> None:
        """Gives up what is being sent, and stops listening."""
        self._sender.close()
        self._server.close()


class Server:
    """Accepts connections in a thread. Strangers are refused, and cost 64 threads at most, each for
    `HANDSHAKE` seconds.
    """

    def __init__(
        self, secret: Secret, host: str, place: Place, stored: Callable[[int], None], count: int
    ) -> None:
        """host: the address to listen on, empty for all. count: processes of the run."""
        self._secret, self._place, self._stored, self._count = secret, place, stored, count
        self._listener = listen(0, host)
        self.port: int = self._listener.getsockname()[1]
        self._strangers: list[socket.socket] = []
        self._lock, self._refused, self._told = threading.Lock(), 0, -_QUIET
        threading.Thread(target=self._accept, name="local copies", daemon=True).start()

    def close(self) -> None:
        """Stops listening. Transfers in progress continue."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                time.sleep(0.1)  # too many open files, or the connection is gone already
                continue
            with self._lock:
                self._strangers.append(connection)
                oldest = self._strangers.pop(0) if len(self._strangers) > _CALLERS else None
            if oldest:
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
            try:
                threading.Thread(
                    target=self._serve, args=(connection, str(address[0])), daemon=True
                ).start()
            except RuntimeError:  # the system has no thread left
                connection.close()

    def _serve(self, connection: socket.socket, address: str) -> None:
        with connection, contextlib.suppress(OSError, ValueError):  # the other end knows, and warns
            try:
                conversation = Conversation(connection, self._secret, serves=True)
            except (Refused, TransferFailed) as error:
                return self._refuse(address, error)
            finally:
                with self._lock, contextlib.suppress(ValueError):
                    self._strangers.remove(connection)
            request = conversation.receive("process")
            process = request["process"]
            if process < self._count and "get" in request:
                self._give(conversation, request["get"], process)
            elif process < self._count and "put" in request and "sizes" in request:
                receive_step(conversation, request["sizes"], self._place(request["put"], process))
                self._stored(process)
            else:
                conversation.send(problem="the request was not understood")

    def _give(self, conversation: Conversation, step: int, process: int) -> None:
        try:
            send_step(conversation, self._place(step, process), {"process": process})
        except FileNotFoundError:
            conversation.send(problem=f"step {step} of process {process} is not here")

    def _refuse(self, address: str, error: Exception) -> None:
        with self._lock:
            self._refused += 1
            if time.monotonic() - self._told < _QUIET:
                return
            count, self._refused, self._told = self._refused, 0, time.monotonic()
        many = f"{count} connections" if count > 1 else "a connection"
        _print(
            f"refused {many} for local checkpoints, the last from "
            f"{address.removeprefix('::ffff:')}: {error}"
        )


class Sender:
    """A thread that sends the newest step to the targets. Until that succeeds again, it warns every
    ten minutes.
    """

    def __init__(
        self,
        secret: Secret,
        targets: list[tuple[str, int]],
        place: Callable[[int], Path],
        process: int,
    ) -> None:
        self._secret, self._targets, self._place, self._process = secret, targets, place, process
        self._change = threading.Condition()
        self._next: int | None = None
        self._sending: int | None = None
        self._connection: Conversation | None = None
        self._told, self._closed = -_REPEAT, False
        threading.Thread(target=self._run, name="sending local copies", daemon=True).start()

    def send(self, step: int) -> None:
        """Sends this step next, instead of one that waits."""
        with self._change:
            skipped, self._next = self._next, step
            self._change.notify_all()
            sending = self._sending
        if skipped is not None:
            self._warn(
                (
                    f"step {skipped} was not copied to another node: copying step {sending} took "
                    "longer than checkpoint.local_every steps"
                ),
                (
                    "a lost node means the newest checkpoint in the output until "
                    "checkpoint.local_every is longer than a copy takes"
                ),
            )

    def cancel(self) -> None:
        """Gives up what waits, and what is being sent."""
        with self._change:
            self._next = self._sending = None
            if self._connection:
                self._connection.hang_up()

    def close(self) -> None:
        """Gives up everything, and ends the thread."""
        self.cancel()
        with self._change:
            self._closed = True
            self._change.notify_all()

    def wait(self, seconds: float) -> bool:
        """Returns whether nothing is left to send within this time."""
        with self._change:
            return self._change.wait_for(
                lambda: self._next is None and self._sending is None, seconds
            )

    def _run(self) -> None:
        while True:
            with self._change:
                self._sending = None
                self._change.notify_all()
                self._change.wait_for(lambda: self._next is not None or self._closed)
                step, self._next = self._next, None
                if step is None:
                    return
                self._sending = step
            for target in self._targets:
                try:
                    self._send(step, target)
                    if self._next is None:  # otherwise it does not keep up
                        self._told = -_REPEAT
                except (OSError, ValueError) as error:
                    if self._sending == step:  # otherwise it was cancelled
                        reason = getattr(error, "strerror", None) or error
                        self._warn(
                            f"step {step} could not be copied to the node at {target[0]}: {reason}"
                        )

    def _send(self, step: int, target: tuple[str, int]) -> None:
        with _connected(target, self._secret) as conversation:
            with self._change:
                if self._sending != step:
                    return
                self._connection = conversation
            try:
                send_step(conversation, self._place(step), {"put": step, "process": self._process})
            finally:
                with self._change:
                    self._connection = None

    def _warn(
        self, text: str, then: str = "if this node is lost, the run resumes from an older step"
    ) -> None:
        if time.monotonic() - self._told >= _REPEAT:
            _print(f"warning: {text}; training continues, but {then}")
            self._told = time.monotonic()


@contextlib.contextmanager
def _connected(address: tuple[str, int], secret: Secret) -> Iterator[Conversation]:
    with socket.create_connection(address, _CONNECT) as connection:
        yield Conversation(connection, secret, serves=False)


def nodes_by_disk(directory: Path) -> list[list[int]]:
    """Returns the processes of each node: those that see each other's files in this directory. All
    processes must call it.

    A process that cannot write there is a node of its own.
    """
    index, token = jax.process_index(), secrets.token_hex(8)
    mark = directory / f".here-{index}"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        mark.write_text(token, encoding="utf-8")
    seen = [index]
    for process, other in enumerate(distributed.gather_from_all(token)):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if (directory / f".here-{process}").read_text(encoding="utf-8") == other:
                seen.append(process)
    firsts = distributed.gather_from_all(min(seen))
    with contextlib.suppress(OSError):
        mark.unlink()
    return [
        [process for process, each in enumerate(firsts) if each == first]
        for first in sorted(set(firsts))
    ]


def receivers(nodes: list[list[int]], process: int, n_copies: int) -> list[int]:
    """Returns the processes that keep copies for this one: one of each of the next nodes, so that
    those of a node share the work.
    """
    own = next(number for number, members in enumerate(nodes) if process in members)
    place = nodes[own].index(process)
    following = [nodes[(own + distance) % len(nodes)] for distance in range(1, n_copies + 1)]
    return [members[place % len(members)] for members in following]


def own_address(coordinator: str) -> tuple[str, str]:
    """Returns the address to listen on (empty: all), and the one at which other hosts reach this
    one: where it reaches the coordinator.

    coordinator: host:port; empty if it is not known.
    """
    if not coordinator:
        return "", socket.gethostname()
    host, port = host_and_port(coordinator)
    if is_loopback(host):
        return LOOPBACK, LOOPBACK
    family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # sends nothing
        probe.connect(where)
        own = str(probe.getsockname()[0])
    # the coordinator's own host may know itself as 127.0.1.1
    return ("", host) if is_loopback(own) else (own, own)


def _enough(n_copies: int, n_nodes: int) -> int:
    """Returns the copies that are possible: fewer than asked for only in a run that may continue
    with fewer nodes.
    """
    if n_copies < n_nodes:
        return n_copies
    if os.environ.get(ELASTIC):
        distributed.print_on_process0(
            f"warning: checkpoint.local_copies={n_copies}, but only {n_nodes} nodes are left: "
            f"local checkpoints have {n_nodes - 1} copies"
        )
        return n_nodes - 1
    fix = f"set it to {n_nodes - 1}" + (
        "" if n_nodes > 1 else ", or checkpoint.local to a directory on each node's own disk"
    )
    why = "processes that see the same files in checkpoint.local count as one node"
    raise ConfigError(
        f"checkpoint.local_copies={n_copies} needs {n_copies + 1} nodes, but this run has "
        f"{n_nodes} ({why}); {fix}"
    )


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on a full disk
        print(f"{distributed.log_prefix()}{line}", flush=True)
