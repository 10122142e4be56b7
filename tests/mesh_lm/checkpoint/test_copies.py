"""Copies of local checkpoints on another node: whole or absent, from the job's own processes only,
and never in the way of training."""

import contextlib
import os
import resource
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mesh_lm.checkpoint import copies, transfer
from mesh_lm.checkpoint.copies import Sender, Server, own_address, receivers
from mesh_lm.checkpoint.node_local import _holders
from mesh_lm.checkpoint.transfer import FILES, Conversation, TransferFailed
from mesh_lm.network.channel import Channel, Refused
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import LOOPBACK

SIZE = 3 * 2**20 + 17
"""Bytes of a state: more than three pieces."""


class Nodes:
    """Two nodes with a directory each. Process 1 sends to process 0, whose server stores the
    files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.secret = Secret(b"a secret of this job")
        self.stored: list[int] = []
        self.server = Server(
            self.secret,
            LOOPBACK,
            lambda step, process: self.directory("b", step, process),
            self.stored.append,
            2,
        )
        self.senders: list[Sender] = []

    def directory(self, node: str, step: int, process: int = 1) -> Path:
        return self.root / node / "run" / str(step) / f"{process}-of-2"

    def save(self, step: int, node: str = "a") -> Path:
        """Returns the directory of a new step."""
        directory = self.directory(node, step)
        directory.mkdir(parents=True)
        (directory / FILES[0]).write_bytes(bytes([step]) + os.urandom(SIZE - 1))
        (directory / FILES[1]).write_text(f'{{"step": {step}}}', encoding="utf-8")
        return directory

    def sender(self, port: int | None = None, secret: Secret | None = None) -> Sender:
        sender = Sender(
            secret or self.secret,
            [(LOOPBACK, port or self.server.port)],
            lambda step: self.directory("a", step),
            1,
        )
        self.senders.append(sender)
        return sender

    def connect(self, secret: Secret | None = None) -> Conversation:
        connection = socket.create_connection((LOOPBACK, self.server.port), 5)
        return Conversation(connection, secret or self.secret, serves=False)

    def arrived(self) -> list[str]:
        """Returns the names below the receiver's directory, those of remains included."""
        return sorted(path.name for path in (self.root / "b" / "run").glob("*"))

    def settled(self) -> list[str]:
        """Returns `arrived`, once nothing is on its way."""
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if not any(name.startswith("arriving") for name in self.arrived()):
                break
            time.sleep(0.01)
        return self.arrived()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.server.close()
    for sender in nodes.senders:
        sender.close()


def equal(directory: Path, other: Path) -> bool:
    return all((directory / name).read_bytes() == (other / name).read_bytes() for name in FILES)


def test_a_step_arrives_and_comes_back(nodes: Nodes) -> None:
    directory = nodes.save(12)
    copy = nodes.directory("b", 12)
    sender = nodes.sender()
    sender.send(12)
    assert sender.wait(10) and equal(directory, copy) and nodes.arrived() == ["12"]

    original = shutil.copytree(directory, nodes.root / "original")
    shutil.rmtree(directory)
    conversation = nodes.connect()
    conversation.send(get=12, process=1)
    transfer.receive_step(conversation, conversation.receive("sizes")["sizes"], directory)
    assert equal(directory, original)

    directory.joinpath(FILES[0]).write_bytes(b"another life of the same step")
    sender.send(12)
    assert sender.wait(10) and equal(directory, copy), (
        "a step that is saved again replaces its copy"
    )
    assert nodes.stored[:1] == [1], "older copies are removed then"


def test_a_request_that_cannot_be_served_is_a_problem(nodes: Nodes) -> None:
    for request, problem in (
        ({"get": 14, "process": 1}, "step 14 of process 1 is not here"),
        ({"get": 14, "process": 2}, "the request was not understood"),
        ({"put": 14, "process": 1}, "the request was not understood"),
        ({"put": 14, "process": 1, "sizes": [2**52, 1]}, "do not fit into the"),
    ):
        conversation = nodes.connect()
        conversation.send(**request)
        with pytest.raises(TransferFailed, match=problem):
            conversation.receive("sizes")
    for request in (
        {"get": "../14", "process": 1},
        {"get": 14, "process": -1},
        {"put": 1, "process": 1, "sizes": [1]},
    ):
        conversation = nodes.connect()
        conversation.send(**request)
        with pytest.raises(TransferFailed, match="hung up"):
            conversation.receive("sizes")
    assert nodes.settled() == []


Change = Callable[[bytes, int], bytes | None]
"""(piece, number of bytes before it) -> the piece that is passed on; None: the proxy hangs up."""


def proxy(port: int, change: Change) -> int:
    """Returns a port that passes changed pieces on to `port`."""
    listener = socket.create_server((LOOPBACK, 0))

    def pass_on(source: socket.socket, target: socket.socket, change: Change) -> None:
        n = 0
        with contextlib.suppress(OSError):
            while True:
                piece = source.recv(2**16)
                changed = change(piece, n)
                if not piece or changed is None:
                    break
                target.sendall(changed)
                n += len(piece)
        for connection in (source, target):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        client, _ = listener.accept()
        server = socket.create_connection((LOOPBACK, port))
        threading.Thread(
            target=pass_on, args=(server, client, lambda piece, n: piece), daemon=True
        ).start()
        pass_on(client, server, change)

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


def test_a_slow_disk_at_the_receiver(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes to the disk while the files arrive, and the sender waits longer for that than for a
    piece."""
    synced: list[int] = []

    def slow(descriptor: int) -> None:
        synced.append(descriptor)
        time.sleep(0.4)

    monkeypatch.setattr(transfer, "SILENCE", 0.3)
    monkeypatch.setattr(transfer.os, "fsync", slow)
    nodes.save(12)
    sender = nodes.sender()
    sender.send(12)
    assert sender.wait(10) and nodes.arrived() == ["12"] and len(synced) == 3
    monkeypatch.setattr(transfer.os, "fsync", synced.append)
    monkeypatch.setattr(transfer, "_SYNCED", 2**20)
    sender.send(12)
    assert sender.wait(10) and len(synced) > 3 + 3


def flip(piece: bytes, n: int) -> bytes:
    """Flips one bit in the middle of the files."""
    index = 2**20 - n
    if not 0 <= index < len(piece):
        return piece
    return piece[:index] + bytes([piece[index] ^ 4]) + piece[index + 1 :]


def test_a_damaged_stream_is_not_stored(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    nodes.save(12)
    sender = nodes.sender(proxy(nodes.server.port, flip))
    sender.send(12)
    assert sender.wait(10) and nodes.settled() == [] and nodes.stored == []
    assert (
        "warning: step 12 could not be copied to the node at 127.0.0.1: the files arrived with "
        "other bytes than were sent; "
    ) in capsys.readouterr().out


def test_a_peer_that_dies_half_way_leaves_nothing(
    nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.save(12)
    sender = nodes.sender(proxy(nodes.server.port, lambda piece, n: piece if n < 2**20 else None))
    sender.send(12)
    assert sender.wait(10) and nodes.settled() == []
    assert "warning: step 12 could not be copied" in capsys.readouterr().out
    nodes.save(14)
    sender.send(14)  # nothing listens any more
    assert sender.wait(10) and capsys.readouterr().out == "", "said once, until it works again"


def test_a_silent_peer_holds_nobody_up(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A save returns at once, steps that waited are skipped, and the newest one follows."""
    monkeypatch.setattr(transfer, "HANDSHAKE", 1.0)
    deaf = socket.create_server((LOOPBACK, 0))
    sender = nodes.sender(deaf.getsockname()[1])
    for step in (12, 14, 16):
        nodes.save(step)
    started_at = time.monotonic()
    sender.send(12)
    while sender._sending is None:
        time.sleep(0.001)
    sender.send(14)
    sender.send(16)
    assert time.monotonic() - started_at < 0.5
    assert sender.wait(10)
    output = capsys.readouterr().out
    assert (
        "warning: step 14 was not copied to another node: copying step 12 took longer than "
        "checkpoint.local_every steps; "
    ) in output
    assert (
        "a lost node means the newest checkpoint in the output until checkpoint.local_every is "
        "longer than a copy takes"
    ) in output
    assert output.count("warning") == 1
    monkeypatch.setattr(copies, "_WARNING_INTERVAL", 0.0)
    sender.send(16)
    assert sender.wait(10) and capsys.readouterr().out.count("warning") == 1, "it is repeated"


def test_what_was_rolled_back_is_given_up(nodes: Nodes, capsys: pytest.CaptureFixture[str]) -> None:
    with (nodes.save(12) / FILES[0]).open("r+b") as file:
        file.truncate(2**26)  # more than the system keeps for a connection
    started = threading.Event()
    cancelled = threading.Event()

    def stuck(piece: bytes, n: int) -> bytes:
        if n > 2**18:
            started.set()
            cancelled.wait(10)
        return piece

    sender = nodes.sender(proxy(nodes.server.port, stuck))
    sender.send(12)
    assert started.wait(10)
    sender.cancel()
    cancelled.set()
    assert sender.wait(10) and nodes.settled() == [] and capsys.readouterr().out == ""


def test_a_process_without_the_secret_is_refused(
    nodes: Nodes, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.save(12)
    sender = nodes.sender(secret=Secret(b"the secret of another job"))
    sender.send(12)
    assert sender.wait(10) and nodes.arrived() == []
    output = capsys.readouterr().out
    assert "could not be copied to the node at 127.0.0.1: it does not accept this secret" in output
    deadline = time.monotonic() + 10
    # The server's thread prints it.
    while "it has another secret" not in output and time.monotonic() < deadline:
        time.sleep(0.01)
        output += capsys.readouterr().out
    refusal = (
        "refused a connection for local checkpoints, the last from 127.0.0.1: it has another "
        "secret than this end"
    )
    assert output.count(refusal) == 1
    for _ in range(20):
        with pytest.raises((Refused, TransferFailed)):
            nodes.connect(Secret(b"the secret of another job"))
    assert "refused" not in capsys.readouterr().out, "one line a minute"


def test_the_secret_of_another_purpose_is_not_enough(nodes: Nodes) -> None:
    """What was recorded from a launcher's conversation cannot be used here."""
    channel = Channel(nodes.secret, "rendezvous", serves=False)
    with (
        socket.create_connection((LOOPBACK, nodes.server.port), 5) as connection,
        pytest.raises(Refused),
    ):
        while True:
            connection.sendall(channel.outgoing)
            channel.outgoing = b""
            channel.feed(connection.recv(4096) or b"refused\n")
    assert not channel.proven


def test_strangers_cannot_keep_the_job_out(nodes: Nodes) -> None:
    """300 connections send nothing, or too much: the step arrives meanwhile, and few threads are
    used."""
    greetings = [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 5000, b"[" * 2000 + b"\n"]
    strangers = [socket.create_connection((LOOPBACK, nodes.server.port), 5) for _ in range(300)]
    for n, stranger in enumerate(strangers):
        with contextlib.suppress(OSError):  # it was the oldest of too many
            stranger.sendall(greetings[n % 4])
    directory = nodes.save(12)
    sender = nodes.sender()
    sender.send(12)
    assert sender.wait(10) and equal(directory, nodes.directory("b", 12))
    assert threading.active_count() < copies._CALLERS + 40
    for stranger in strangers:
        stranger.close()


def test_a_full_disk_at_the_receiver(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Known before anything is sent, or found while the files are written: the sender warns with
    the reason, and nothing remains."""
    nodes.save(12)
    sender = nodes.sender()
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard_limit))
    try:
        sender.send(12)
        assert sender.wait(10)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
    assert (
        "could not be copied to the node at 127.0.0.1: File too large; training continues"
        in capsys.readouterr().out
    )
    assert nodes.settled() == []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("usage", (), {"free": SIZE}))
    other = nodes.sender()
    other.send(12)
    assert other.wait(10) and nodes.settled() == []
    assert f"{SIZE + 12} bytes do not fit into the {SIZE} that are free" in capsys.readouterr().out
    monkeypatch.undo()
    other.send(12)
    assert other.wait(10) and nodes.arrived() == ["12"]
    assert equal(nodes.directory("a", 12), nodes.directory("b", 12))


def test_the_ring() -> None:
    nodes = [[0, 1], [2, 3], [4]]
    assert [receivers(nodes, process, 1) for process in range(5)] == [[2], [3], [4], [4], [0]]
    assert [receivers(nodes, process, 2) for process in range(5)] == [
        [2, 4],
        [3, 4],
        [4, 0],
        [4, 1],
        [0, 2],
    ]


def test_holders_of_steps() -> None:
    """Its own files come first; a step of which one process's files are nowhere is not offered."""
    listings = [[[12, [0, 2]], [14, [0]]], [[12, [1, 0]], [14, [1, 0]]], [[14, [1]]]]
    assert _holders(listings) == {12: [0, 1, 0]}
    assert _holders([[], [[12, [0, 1]]]]) == {12: [1, 1]}, (
        "its node may have another number than before"
    )
    assert _holders([[[12, [0]]], []]) == {} and _holders([[]]) == {}


def test_the_address_to_listen_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("127.0.0.1:9876") == own_address("localhost:9876") == (LOOPBACK, LOOPBACK)
    assert own_address("") == ("", socket.gethostname())
    addresses = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("127.0.1.1", 9876))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: addresses)
    assert own_address("node0:9876") == ("", "node0"), (
        "the coordinator's own host, which has a loopback address for its name"
    )
