"""The controller with fake agents, and an agent with a fake controller, for cases that are rare
with real processes."""

import contextlib
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import pytest
from processes import PATIENCE

from mesh_lm.launch import agent, controller, nodes
from mesh_lm.launch.job import Job
from mesh_lm.launch.worker import Worker
from mesh_lm.network import wire
from mesh_lm.network.secret import Secret

SECRET = Secret.new()


class Speaker:
    """A fake agent that speaks the controller's protocol."""

    def __init__(self, job: Job, address: tuple[str, int], node: int) -> None:
        self.peer = wire.Peer(
            socket.create_connection(address), SECRET, controller.PURPOSE, serves=False
        )
        self.peer.send(
            hello="mesh_lm", node=node, life=f"{id(self)}", host=f"n{node}", job=job.digests()
        )
        self.received: list[dict[str, Any]] = []
        # its hello is sent when the controller has proved itself
        while not self.peer.proven and self.peer.open:
            self.received += self.peer.receive()
            time.sleep(0.01)

    def hears(self, key: str) -> dict[str, Any]:
        """Returns the next message with that key, and drops earlier ones."""
        deadline = time.monotonic() + PATIENCE
        while self.peer.open:
            messages = self.received + self.peer.receive()
            self.received = []
            for message in messages:
                if key in message:
                    return message
            assert time.monotonic() < deadline, key
            time.sleep(0.01)
        raise ConnectionError(key)

    def dies(self, life: int, *died: tuple[int, int, int], **fields: object) -> None:
        """Reports that its workers ended. died: (process, status, the signal that it was sent) of
        each."""
        self.peer.send(generation=life, died=died, ended=True, **fields)


def exit_statuses(speakers: Collection[Speaker]) -> list[int]:
    """Returns the statuses with which agents are told to exit. They hang up then."""
    statuses = [speaker.hears("exit")["exit"] for speaker in speakers]
    for speaker in speakers:
        speaker.peer.close()
    return statuses


Run = Callable[..., tuple[partial[Speaker], Callable[[], int]]]


@pytest.fixture
def run() -> Iterator[Run]:
    """Returns a function that starts a job's controller, and returns (a function that makes a
    node's agent, one that awaits its status)."""
    threads = []

    def begin(**options: Any) -> tuple[partial[Speaker], Callable[[], int]]:
        job = Job(("train.py",), rendezvous="127.0.0.1:1", **{"health": "off"} | options)
        statuses: list[int] = []
        listener = wire.listen(0, "127.0.0.1")
        address = listener.getsockname()

        def control() -> None:
            statuses.append(controller.Controller(job, listener, SECRET).run())

        thread = threading.Thread(target=control, daemon=True)
        threads.append(thread)
        thread.start()

        def status() -> int:
            thread.join(PATIENCE)
            return statuses[0]

        return partial(Speaker, job, address), status

    yield begin
    for thread in threads:
        thread.join(PATIENCE)


def test_workers_that_sigkill_does_not_end_are_done_without(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "UNKILLABLE", 0.3)
    speaker, status = run(nodes=2, min_nodes=1, rejoin=0.2)
    good = speaker(0)
    bad = speaker(1)
    assert good.hears("start")["nodes"] == bad.hears("start")["nodes"] == 2
    bad.peer.send(generation=1, silent=1, seconds=30)
    good.dies(1, (0, -signal.SIGKILL, signal.SIGKILL))
    assert good.hears("start")["nodes"] == 1
    with pytest.raises(ConnectionError):
        bad.hears("start")
    good.dies(2, (0, 0, 0))
    assert good.hears("exit")["exit"] == 0
    good.peer.close()
    assert status() == 0


def test_an_agent_whose_workers_do_not_die_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "UNKILLABLE", 0.5)
    monkeypatch.setattr(agent, "_RETRY", 0.1)
    monkeypatch.setattr(Worker, "signal", lambda worker, number: None)
    job = Job(("-c", "import time; time.sleep(600)"), nodes=2, node=1, rejoin=0.1)
    with wire.listen(0, "127.0.0.1") as listener:
        node_agent = agent.Agent(job, listener.getsockname(), SECRET)

        def lose() -> None:
            peer = wire.Peer(listener.accept()[0], SECRET, controller.PURPOSE, serves=True)
            peer.send(start=1, coordinator="127.0.0.1:1", count=2, first=1, nodes=2, begun=0)
            deadline = time.monotonic() + PATIENCE
            while (
                not any("beats" in message for message in peer.receive())
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            peer.close()

        threading.Thread(target=lose, daemon=True).start()
        assert node_agent.run() == 75
        (worker,) = node_agent._workers.values()
        os.killpg(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
        worker.status()


def test_a_node_that_fails_first_again_and_again_is_left_out(run: Run) -> None:
    speaker, status = run(nodes=3, min_nodes=2)
    speakers = [speaker(node) for node in range(3)]
    for life in (1, 2):
        assert [fake.hears("start")["nodes"] for fake in speakers] == [3, 3, 3]
        speakers[1].dies(life, (1, -signal.SIGBUS, 0))
        speakers[2].dies(life, (2, -signal.SIGABRT, 0))
        speakers[0].dies(life, (0, -signal.SIGKILL, signal.SIGKILL))
    orders = [speakers[node].hears("start") for node in (0, 2)]
    assert [(order["nodes"], order["first"]) for order in orders] == [(2, 0), (2, 1)]
    time.sleep(0.3)
    assert not any("end" in message for message in speakers[0].peer.receive()), (
        "it is not taken back at once"
    )
    for process, node in enumerate((0, 2)):
        speakers[node].dies(3, (process, 0, 0))
    assert exit_statuses(speakers) == [0, 0, 0]
    assert status() == 0


def test_nothing_starts_without_node_0(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    speaker, status = run(nodes=2, min_nodes=1, start=0.5)
    alone = speaker(1)
    assert alone.hears("exit")["exit"] == 75
    alone.peer.close()
    assert status() == 75
    assert "node 0 did not connect within 0.5 s" in capfd.readouterr().err


@pytest.mark.parametrize("sent", [0, signal.SIGTERM, signal.SIGKILL])
def test_sigterm_to_all_is_a_farewell(run: Run, sent: int) -> None:
    """Slurm's SIGTERM may reach a worker before its launcher has forwarded it."""
    speaker, status = run(nodes=2)
    speakers = [speaker(node) for node in range(2)]
    for fake in speakers:
        fake.hears("start")
    speakers[1].peer.send(stop="SIGTERM")
    speakers[1].dies(1, (1, -signal.SIGTERM, sent))
    speakers[0].hears("end")
    speakers[0].dies(1, (0, 99, signal.SIGTERM))
    assert exit_statuses(speakers) == [99, 99]
    assert status() == 99


def test_who_comes_when_the_others_leave_is_told(run: Run) -> None:
    speaker, status = run(nodes=2)
    first = speaker(0)
    second = speaker(1)
    first.hears("start")
    second.hears("start")
    second.peer.close()
    first.dies(1, (0, 1, 0))
    assert first.hears("exit")["exit"] == 1
    late = speaker(1)
    assert late.hears("exit")["exit"] == 1
    first.peer.close()
    late.peer.close()
    assert status() == 1


def ends(speaker: Speaker, life: int = 1) -> None:
    """Starts and ends a run on one node."""
    assert speaker.hears("start")["start"] == life
    speaker.dies(life, (0, 0, 0))
    assert speaker.hears("exit")["exit"] == 0
    speaker.peer.close()


def test_who_does_not_know_the_secret_ends_nothing(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood, a nested line, silence, a byte now and then, and a launcher with another secret: the
    run starts, and ends as it should."""
    monkeypatch.setattr(controller, "_HELLO", 0.5)
    speaker, status = run(nodes=1)
    job, address = speaker.args
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(address)) for _ in range(40)]
        for i, stranger in enumerate(strangers):
            with contextlib.suppress(OSError):
                stranger.sendall((b"[" * 200_000 + b"\n", b"x" * 2**20, b"m", b"")[i % 4])
        impostor = wire.Peer(
            socket.create_connection(address), Secret.new(), controller.PURPOSE, serves=False
        )
        impostor.send(hello="mesh_lm", node=0, life="1", host="n", job=job.digests())
        deadline = time.monotonic() + PATIENCE
        while impostor.open and time.monotonic() < deadline:
            impostor.receive()
            time.sleep(0.01)
        assert impostor.refused in ("it does not accept this secret", "")
        start = time.monotonic()
        # a byte at a time does not prolong the time in which it must introduce itself
        with contextlib.suppress(OSError):
            while time.monotonic() - start < PATIENCE:
                strangers[2].sendall(b"m")
                time.sleep(0.05)
        assert time.monotonic() - start < 5
        ends(speaker(0))
    assert status() == 0
    log = capfd.readouterr().err
    assert log.count("refused ") == 1, "at most once a minute"
    assert "train.py" not in log


def test_refusals_are_counted_and_a_probe_hides_none(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second minute has a second line, with the number of those in between; a probe that says
    nothing is not one of them."""
    monkeypatch.setattr(controller, "_LOOK", 1.0)
    speaker, status = run(nodes=1)
    job, address = speaker.args
    start = time.monotonic()
    while time.monotonic() - start < 2.5:
        socket.create_connection(address).close()
        impostor = wire.Peer(
            socket.create_connection(address), Secret.new(), controller.PURPOSE, serves=False
        )
        impostor.send(hello="mesh_lm", node=0, life="1", host="n", job=job.digests())
        while impostor.open:
            impostor.receive()
            time.sleep(0.01)
    ends(speaker(0))
    assert status() == 0
    log = capfd.readouterr().err
    counts = [int(n) for n in re.findall(r"refused (\d+) connections?, the last from", log)]
    assert len(counts) >= 2, counts
    assert counts[0] == 1, counts
    assert counts[1] > 1, counts


def test_a_second_launcher_of_a_node_and_one_that_is_no_node(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    speaker, status = run(nodes=2)
    first = speaker(0)
    second = speaker(1)
    first.hears("start")
    assert speaker(1).hears("refused")["host"] == "n1"
    assert speaker(7).hears("exit") == {"exit": 1, "refused": "differs", "fields": ["node"]}
    again = wire.Peer(
        socket.create_connection(speaker.args[1]), SECRET, controller.PURPOSE, serves=False
    )
    again.send(hello="mesh_lm", node=1, life=3, host="n1", job={})
    while again.open:
        again.receive()
    for process, fake in enumerate((first, second)):
        fake.dies(1, (process, 0, 0))
    assert exit_statuses([first, second]) == [0, 0]
    assert status() == 0
    log = capfd.readouterr().err
    assert "refused a second launcher of node 1 on n1: the one on n1 is connected" in log
    assert "node 7 (n7) was started differently from node 0: node (0 of 2 here)" in log
    assert "fields that are missing or not as expected: life" in log


def test_a_message_that_is_not_understood_costs_its_node_the_connection(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """It may not speak of processes of another node either."""
    speaker, status = run(nodes=2)
    first = speaker(0)
    second = speaker(1)
    for fake in (first, second):
        fake.hears("start")
    second.peer.send(generation=1, died=[[0, 1, 0]], silent=0, seconds=9)  # of node 0
    second.peer.send(generation=1, beats={"0": {"step": "many"}})
    with pytest.raises(ConnectionError):
        second.hears("start")
    first.dies(1, (0, -signal.SIGKILL, signal.SIGKILL))
    first.peer.send(stop="SIGTERM")
    assert first.hears("exit")["exit"] == 75
    first.peer.close()
    status()
    log = capfd.readouterr().err
    assert (
        "node 1 (n1) sent a message that is not understood: fields that are missing or not as "
        "expected: beats"
    ) in log
    assert "process 0" not in log


def test_spares_come_first_and_then_fewer_nodes(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """A spare gets the place of a lost node; without one the run shrinks, and it grows again when a
    lost node is back."""
    speaker, status = run(nodes=4, spares=1, min_nodes=1, rejoin=0.5)
    speakers = {node: speaker(node) for node in (0, 1, 2, 3)}
    life = 0

    def started(*members: int) -> None:
        nonlocal life
        life += 1
        orders = [speakers[node].hears("start") for node in members]
        assert [(order["first"], order["nodes"], order["start"]) for order in orders] == [
            (i, len(members), life) for i in range(len(members))
        ]

    def loses(lost: int, *members: int) -> None:
        speakers.pop(lost).peer.close()
        for rank, node in enumerate(members):
            if node != lost:
                speakers[node].dies(life, (rank, -signal.SIGKILL, signal.SIGKILL))

    started(0, 1, 2)
    loses(1, 0, 1, 2)
    started(0, 3, 2)
    loses(3, 0, 3, 2)
    started(0, 2)
    speakers[3] = speaker(3)
    for rank, node in enumerate((0, 2)):
        speakers[node].hears("end")
        speakers[node].dies(life, (rank, 99, signal.SIGTERM))
    started(0, 2, 3)
    speakers[1] = speaker(1)
    for rank, node in enumerate((0, 2, 3)):
        speakers[node].dies(life, (rank, 0, 0))
    assert exit_statuses(speakers.values()) == [0, 0, 0, 0]
    assert status() == 0
    log = capfd.readouterr().err
    assert "node 3 (n3) takes the place of node 1" in log
    assert log.count("takes the place") == 1
    assert "continuing with 2 of 3 nodes: 0, 2" in log


def test_a_crash_of_a_worker_that_was_asked_to_stop_is_its_stop(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """XLA crashes when a process ends while it compiles. The run grows without counting a restart;
    nothing is said of faulty memory."""
    speaker, status = run(nodes=3, min_nodes=2, start=0.3, restarts=0)
    speakers = [speaker(node) for node in range(2)]
    assert [fake.hears("start")["nodes"] for fake in speakers] == [2, 2]
    speakers.append(speaker(2))
    for fake in speakers[:2]:
        fake.hears("end")
    speakers[1].dies(1, (1, -signal.SIGSEGV, signal.SIGTERM))
    time.sleep(0.2)
    speakers[0].dies(1, (0, 70, signal.SIGTERM))
    assert [fake.hears("start")["nodes"] for fake in speakers] == [3, 3, 3]
    for process, fake in enumerate(speakers):
        fake.dies(2, (process, 0, 0))
    assert exit_statuses(speakers) == [0, 0, 0]
    assert status() == 0
    log = capfd.readouterr().err
    assert (
        "process 1 on node 1 (n1) was killed by SIGSEGV after it was asked to stop, which counts "
        "as its stop"
    ) in log
    assert "memory" not in log
    assert "] restart " not in log


def test_a_node_that_is_repaired_takes_part_again(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is checked again while others run without it. A report of an earlier check is ignored, and
    so is a result that is unknown."""
    monkeypatch.setattr(nodes, "_AGAIN", 0.3)
    speaker, status = run(nodes=2, min_nodes=1, start=0.3, health="all")
    first = speaker(0)
    second = speaker(1)
    doubt = {"check": "gpu", "outcome": "unknown", "text": "no answer"}
    first.peer.send(checked=first.hears("check")["check"], port=1, findings=[doubt])
    first_check = second.hears("check")["check"]
    second.peer.send(
        checked=first_check,
        port=1,
        findings=[doubt | {"outcome": "failed", "text": "GPU 3 is lost"}],
    )
    assert first.hears("start")["nodes"] == 1
    second_check = second.hears("check")["check"]
    second.peer.send(checked=first_check, port=1, findings=[])
    time.sleep(0.3)
    assert not any("end" in message for message in first.peer.receive())
    second.peer.send(checked=second_check, port=1, findings=[])
    first.hears("end")
    first.dies(1, (0, 99, signal.SIGTERM))
    for fake in (first, second):  # also for ports that are free now
        fake.peer.send(checked=fake.hears("check")["check"], port=1, findings=[])
    assert first.hears("start")["nodes"] == second.hears("start")["nodes"] == 2
    for process, fake in enumerate((first, second)):
        fake.dies(2, (process, 0, 0))
    assert exit_statuses([first, second]) == [0, 0]
    assert status() == 0
    log = capfd.readouterr().err
    assert "node 1 (n1) is unhealthy, and is left out: gpu: GPU 3 is lost" in log
    assert "node 1 (n1) is healthy again" in log


def test_another_node_runs_process_0_where_node_0_is_unhealthy(run: Run) -> None:
    """The processes meet there, at a port that was free on it."""
    speaker, status = run(nodes=3, spares=1, health="all")
    speakers = [speaker(node) for node in range(3)]
    for node, fake in enumerate(speakers):
        wrong = [{"check": "gpu", "outcome": "failed", "text": "lost"}] if node == 0 else []
        fake.peer.send(checked=fake.hears("check")["check"], port=4711 + node, findings=wrong)
    orders = [fake.hears("start") for fake in speakers[1:]]
    assert [(order["coordinator"], order["first"], order["nodes"]) for order in orders] == [
        ("127.0.0.1:4712", 0, 2),
        ("127.0.0.1:4712", 1, 2),
    ]
    for process, fake in enumerate(speakers[1:]):
        fake.dies(1, (process, 0, 0))
    assert exit_statuses(speakers) == [0, 0, 0]
    assert status() == 0


def test_a_node_whose_checks_never_end_is_not_left_out(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_ANSWER", 0.3)
    speaker, status = run(nodes=1, health="all")
    ends(speaker(0))
    assert status() == 0
