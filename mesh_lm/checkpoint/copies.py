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

_CONNECT_TIMEOUT = 10.0
"""Seconds to wait for a connection."""
_CALLERS = 64
"""Connections that may wait to prove themselves; the oldest is closed first."""
_REFUSAL_INTERVAL = 60.0
"""Seconds between two lines about refused connections."""
_WARNING_INTERVAL = 600.0
"""Seconds between two warnings about copies that do not succeed."""
_ACCEPT_RETRY = 0.1
"""Seconds until a connection is accepted again after an error."""

StepDirectory = Callable[[int, int], Path]
"""(step, process) -> the directory of its files on this node."""
Address = tuple[str, int]
"""Host and port."""


class Copies:
    """The copies of one run: this process's server, and the thread that sends its own steps."""

    def __init__(
        self,
        n_copies: int,
        directory: Path,
        launch: LaunchConfig,
        step_directory: StepDirectory,
        on_stored: Callable[[int], None],
    ) -> None:
        """Starts the server and the sender. All processes must call it.

        Args:
          directory: the run's, on the node's disk.
          on_stored: is called with a process whose step has arrived.

        Raises:
          ConfigError: there are too few nodes.
        """
        index = jax.process_index()
        n_processes = jax.process_count()
        nodes = nodes_by_disk(directory)
        n_copies = _possible_copies(n_copies, len(nodes))
        with distributed.collective_errors():
            for remains in directory.glob(f"{ARRIVING}*"):
                shutil.rmtree(remains, ignore_errors=True)
            slot = ProcessSlot.of(launch)
            listen_address, known_as = own_address(slot.coordinator if slot else "")
            secret = Secret.shared()
            self._server = Server(secret, listen_address, step_directory, on_stored, n_processes)
        addresses = distributed.gather_from_all([known_as, self._server.port])
        self._addresses: list[Address] = [(host, port) for host, port in addresses]
        self._secret = secret
        self._step_directory = step_directory

        self.node = {*next(members for members in nodes if index in members)}
        """The processes of this node."""
        self.stored_processes = set(self.node)
        """The processes whose steps this node keeps: its own, and those that send theirs here."""
        for process in range(n_processes):
            if self.node.intersection(receivers(nodes, process, n_copies)):
                self.stored_processes.add(process)

        targets = [self._addresses[process] for process in receivers(nodes, index, n_copies)]
        self._sender = Sender(secret, targets, lambda step: step_directory(step, index), index)

    def send(self, step: int) -> None:
        """Sends a complete step of this process in the background."""
        self._sender.send(step)

    def fetch(self, step: int, holder: int) -> None:
        """Fetches this process's files of a step from the process that has them.

        Raises OSError or ValueError.
        """
        index = jax.process_index()
        with _connected(self._addresses[holder], self._secret) as conversation:
            conversation.send(get=step, process=index)
            sizes = conversation.receive("sizes")["sizes"]
            receive_step(conversation, sizes, self._step_directory(step, index))

    def cancel(self) -> None:
        """Gives up what is being sent."""
        self._sender.cancel()

    def close(self) -> None:
        """Gives up what is being sent, and stops listening."""
        self._sender.close()
        self._server.close()


class Server:
    """Accepts connections in a thread, and stores and sends steps.

    Strangers are refused, and cost 64 threads at most, each for `HANDSHAKE` seconds.
    """

    def __init__(
        self,
        secret: Secret,
        host: str,
        step_directory: StepDirectory,
        on_stored: Callable[[int], None],
        n_processes: int,
    ) -> None:
        """host: the address to listen on, empty for all. n_processes: those of the run."""
        self._secret = secret
        self._step_directory = step_directory
        self._on_stored = on_stored
        self._n_processes = n_processes
        self._lock = threading.Lock()  # of the fields below; each connection has a thread
        self._unproven: list[socket.socket] = []  # oldest first
        self._n_refused = 0  # since that was last logged
        self._refusal_logged = -_REFUSAL_INTERVAL
        self._listener = listen(0, host)
        self.port: int = self._listener.getsockname()[1]
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
                    return  # closed
                time.sleep(_ACCEPT_RETRY)  # too many open files, or the connection is gone already
                continue
            with self._lock:
                self._unproven.append(connection)
                oldest = self._unproven.pop(0) if len(self._unproven) > _CALLERS else None
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
                self._log_refusal(address, error)
                return
            finally:
                with self._lock, contextlib.suppress(ValueError):
                    self._unproven.remove(connection)

            request = conversation.receive("process")
            process = request["process"]
            if process < self._n_processes and "get" in request:
                self._send(conversation, request["get"], process)
            elif process < self._n_processes and "put" in request and "sizes" in request:
                directory = self._step_directory(request["put"], process)
                receive_step(conversation, request["sizes"], directory)
                self._on_stored(process)
            else:
                conversation.send(problem="the request was not understood")

    def _send(self, conversation: Conversation, step: int, process: int) -> None:
        try:
            send_step(conversation, self._step_directory(step, process), {"process": process})
        except FileNotFoundError:
            conversation.send(problem=f"step {step} of process {process} is not here")

    def _log_refusal(self, address: str, error: Exception) -> None:
        with self._lock:
            self._n_refused += 1
            if time.monotonic() - self._refusal_logged < _REFUSAL_INTERVAL:
                return
            n_refused = self._n_refused
            self._n_refused = 0
            self._refusal_logged = time.monotonic()
        connections = f"{n_refused} connections" if n_refused > 1 else "a connection"
        _print(
            f"refused {connections} for local checkpoints, the last from "
            f"{address.removeprefix('::ffff:')}: {error}"
        )


class Sender:
    """A thread that sends the newest step to the targets.

    Until that succeeds again, it warns every ten minutes.
    """

    def __init__(
        self,
        secret: Secret,
        targets: list[Address],
        step_directory: Callable[[int], Path],
        process: int,
    ) -> None:
        self._secret = secret
        self._targets = targets
        self._step_directory = step_directory
        self._process = process
        self._last_warning = -_WARNING_INTERVAL
        self._change = threading.Condition()  # of the fields below
        self._next_step: int | None = None
        self._sending: int | None = None
        self._connection: Conversation | None = None
        self._closed = False
        threading.Thread(target=self._run, name="sending local copies", daemon=True).start()

    def send(self, step: int) -> None:
        """Sends this step next, instead of one that waits."""
        with self._change:
            skipped = self._next_step
            self._next_step = step
            self._change.notify_all()
            sending = self._sending
        if skipped is not None:
            self._warn(
                f"step {skipped} was not copied to another node: copying step {sending} took "
                "longer than checkpoint.local_every steps",
                "a lost node means the newest checkpoint in the output until "
                "checkpoint.local_every is longer than a copy takes",
            )

    def cancel(self) -> None:
        """Gives up what waits, and what is being sent."""
        with self._change:
            self._next_step = None
            self._sending = None
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
                lambda: self._next_step is None and self._sending is None, seconds
            )

    def _run(self) -> None:
        while True:
            with self._change:
                self._sending = None
                self._change.notify_all()  # for `wait`
                self._change.wait_for(lambda: self._next_step is not None or self._closed)
                step = self._next_step
                self._next_step = None
                if step is None:
                    return  # closed
                self._sending = step
            for target in self._targets:
                try:
                    self._send(step, target)
                    if self._next_step is None:  # otherwise it does not keep up
                        self._last_warning = -_WARNING_INTERVAL
                except (OSError, ValueError) as error:
                    if self._sending != step:
                        continue  # it was cancelled
                    reason = getattr(error, "strerror", None) or error
                    self._warn(
                        f"step {step} could not be copied to the node at {target[0]}: {reason}",
                        "if this node is lost, the run resumes from an older step",
                    )

    def _send(self, step: int, target: Address) -> None:
        with _connected(target, self._secret) as conversation:
            with self._change:
                if self._sending != step:
                    return  # it was cancelled
                self._connection = conversation
            try:
                fields = {"put": step, "process": self._process}
                send_step(conversation, self._step_directory(step), fields)
            finally:
                with self._change:
                    self._connection = None

    def _warn(self, problem: str, consequence: str) -> None:
        if time.monotonic() - self._last_warning >= _WARNING_INTERVAL:
            _print(f"warning: {problem}; training continues, but {consequence}")
            self._last_warning = time.monotonic()


@contextlib.contextmanager
def _connected(address: Address, secret: Secret) -> Iterator[Conversation]:
    with socket.create_connection(address, _CONNECT_TIMEOUT) as connection:
        yield Conversation(connection, secret, serves=False)


def nodes_by_disk(directory: Path) -> list[list[int]]:
    """Returns the processes of each node: those that see each other's files in this directory.

    All processes must call it. A process that cannot write there is a node of its own.
    """
    index = jax.process_index()
    token = secrets.token_hex(8)
    mark = directory / f".here-{index}"
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        mark.write_text(token, encoding="utf-8")
    members = [index]
    for process, other_token in enumerate(distributed.gather_from_all(token)):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            other_mark = directory / f".here-{process}"
            if other_mark.read_text(encoding="utf-8") == other_token:
                members.append(process)
    # All have read the marks when this returns.
    first_members = distributed.gather_from_all(min(members))
    with contextlib.suppress(OSError):
        mark.unlink()
    return [
        [process for process, first in enumerate(first_members) if first == node]
        for node in sorted(set(first_members))
    ]


def receivers(nodes: list[list[int]], process: int, n_copies: int) -> list[int]:
    """Returns the processes that keep copies for this one: one of each of the next nodes.

    So the processes of a node share the work.
    """
    node = next(number for number, members in enumerate(nodes) if process in members)
    position = nodes[node].index(process)
    following = [nodes[(node + distance) % len(nodes)] for distance in range(1, n_copies + 1)]
    return [members[position % len(members)] for members in following]


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
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # of a datagram socket: sends nothing
        local_address = str(probe.getsockname()[0])
    if is_loopback(local_address):
        return "", host  # the coordinator's own host may know itself as 127.0.1.1
    return local_address, local_address


def _possible_copies(n_copies: int, n_nodes: int) -> int:
    """Returns how many copies to make.

    They are fewer than `n_copies` only in a run that may continue with fewer nodes. Raises
    ConfigError if another run has too few nodes.
    """
    if n_copies < n_nodes:
        return n_copies
    if os.environ.get(ELASTIC):
        distributed.print_on_process0(
            f"warning: checkpoint.local_copies={n_copies}, but only {n_nodes} nodes are left: "
            f"local checkpoints have {n_nodes - 1} copies"
        )
        return n_nodes - 1
    other_fix = ", or checkpoint.local to a directory on each node's own disk"
    raise ConfigError(
        f"checkpoint.local_copies={n_copies} needs {n_copies + 1} nodes, but this run has "
        f"{n_nodes} (processes that see the same files in checkpoint.local count as one node); "
        f"set it to {n_nodes - 1}{other_fix if n_nodes == 1 else ''}"
    )


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on a full disk
        print(f"{distributed.log_prefix()}{line}", flush=True)
