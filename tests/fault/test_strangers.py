"""10,000 fuzzed messages to a launcher and to a worker that waits for the others: neither dies, and
the run ends as it should."""

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import PATIENCE, ended

from mesh_lm.launch import controller
from mesh_lm.launch.job import Job
from mesh_lm.network.process_slot import ProcessSlot
from mesh_lm.network.rendezvous import meet
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import Peer, free_port
from tests.mesh_lm.launch.launchers import SECRET, lives, nodes

pytestmark = pytest.mark.fault
KEY = Secret.shared({"MESH_LM_SECRET": SECRET})
AT_ONCE = 32
NAMES = ("hello", "node", "life", "host", "job", "generation", "beats", "died", "fewer", "ended", "silent", "seconds", "stop", "at_once",
         "magic", "count", "index", "description", "start", "exit", "problem")  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> object:
    """Returns any JSON value, often one that a careless reader dies of."""
    kinds = [
        None,
        True,
        -1,
        10**18,
        10**400,
        1e308,
        float("nan"),
        float("inf"),
        "",
        "\x00\n\x1b[2J",
        "x" * 5000,
        [],
        {},
        "SIGKILL",
    ]
    if depth < 4 and rng.random() < 0.4:
        if rng.random() < 0.5:
            return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
        return {
            rng.choice([*NAMES, "0", "-1", "x"]): value(rng, depth + 1)
            for _ in range(rng.randrange(4))
        }
    return rng.choice(kinds)


def bodies(rng: random.Random) -> Iterator[bytes]:
    """Yields messages without end."""
    while True:
        message = json.dumps(
            {name: value(rng) for name in rng.sample(NAMES, rng.randrange(1, 6))}
        ).encode()
        kind = rng.randrange(6)
        if kind == 0:
            message = b"[" * rng.randrange(1, 200_000)
        elif kind == 1:
            message = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 400)))
        elif kind == 2:
            message = message[: rng.randrange(len(message))]
        yield message


def unsigned(rng: random.Random, address: tuple[str, int], count: int, sent: list[str]) -> None:
    """Sends `count` messages without the secret: before a greeting, after it, and lines of another
    connection. Notes each in `sent`."""
    recorded, wanted = b"", bodies(rng)
    for _ in range(count):
        body, kind = next(wanted), rng.randrange(4)
        with (
            contextlib.suppress(OSError),
            socket.create_connection(address, timeout=30) as stranger,
        ):
            sent.append("unsigned")
            stranger.settimeout(0.2)
            if kind:
                stranger.sendall(b"mesh_lm 1 %032x\n" % rng.getrandbits(128))
            if kind == 1:
                body = b"%064x " % rng.getrandbits(256) + body
            elif kind == 2:
                body = recorded
            stranger.sendall(body + b"\n" * rng.randrange(2))
            if kind == 3:
                recorded = stranger.recv(4096)


def signed(
    rng: random.Random,
    address: tuple[str, int],
    purpose: str,
    count: int,
    sent: list[str],
    first: dict[str, object],
) -> None:
    """Sends `count` messages with the secret, each in a connection of its own, after `first` if
    that is not empty. Notes each in `sent`."""
    wanted = bodies(rng)
    for _ in range(count):
        peer = Peer(socket.create_connection(address, timeout=30), KEY, purpose, serves=False)
        while peer.open and not peer.proven and peer.age < 10:
            peer.receive()
            time.sleep(0.005)
        if peer.proven:
            if first:
                peer.send(**first)
            peer._channel._seal(next(wanted).replace(b"\n", b" "))
            peer._write()
            sent.append("signed")
            time.sleep(0.01)
        peer.close()


def all_at_once(*tasks: threading.Thread) -> None:
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(PATIENCE)
        assert not task.is_alive()


def test_a_launcher_survives(tmp_path: Path) -> None:
    """4,000 messages of strangers and 2,000 that are signed, as another version of mesh_lm would
    send them; then node 1 connects."""
    with nodes(2, tmp_path, "", "exit=0") as ((first, second), again):
        second.kill()
        address = (
            "127.0.0.1",
            int(str(first.args).partition("--rendezvous=127.0.0.1:")[2].partition("'")[0]),
        )
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                socket.create_connection(address).close()
                break
            except OSError:
                time.sleep(0.05)
        digests = Job((), nodes=2).digests()
        hello = {"hello": "mesh_lm", "node": 1, "life": "fuzz", "host": "fuzz", "job": digests}
        sent: list[str] = []
        tasks = [
            threading.Thread(
                target=unsigned, args=(random.Random(i), address, 4200 // AT_ONCE, sent)
            )
            for i in range(AT_ONCE)
        ]
        tasks += [
            threading.Thread(
                target=signed,
                args=(random.Random(i), address, controller.PURPOSE, 2200 // AT_ONCE, sent, said),
            )
            for i, said in enumerate([hello, {}] * (AT_ONCE // 2))
        ]
        all_at_once(*tasks)
        assert sent.count("unsigned") >= 4000 and sent.count("signed") >= 2000
        assert first.poll() is None, first.communicate()[0]
        third = again(1)
        outs = [ended(first), ended(third)]
    assert first.returncode == third.returncode == 0, outs
    assert "Traceback" not in outs[0] and len(lives(tmp_path)) == 1


def test_a_worker_that_waits_survives() -> None:
    """3,000 messages of strangers and 1,000 that are signed, and are no process of the run; then
    the other process connects."""
    address = ("127.0.0.1", free_port())
    first, second = (ProcessSlot(f"{address[0]}:{address[1]}", 2, index) for index in (0, 1))
    errors: list[BaseException] = []

    def host() -> None:
        try:
            meet(first, PATIENCE, {}, KEY)
        except BaseException as error:
            errors.append(error)

    waiting = threading.Thread(target=host)
    waiting.start()
    time.sleep(0.5)
    sent: list[str] = []
    tasks = [
        threading.Thread(target=unsigned, args=(random.Random(i), address, 3200 // AT_ONCE, sent))
        for i in range(AT_ONCE)
    ]
    signing = [
        (random.Random(i), address, "rendezvous", 1100 // AT_ONCE, sent, {}) for i in range(AT_ONCE)
    ]
    all_at_once(*tasks, *(threading.Thread(target=signed, args=arguments) for arguments in signing))
    assert sent.count("unsigned") >= 3000 and sent.count("signed") >= 1000
    assert waiting.is_alive() and not errors
    meet(second, 60, {}, KEY)
    waiting.join(60)
    assert not waiting.is_alive() and not errors
