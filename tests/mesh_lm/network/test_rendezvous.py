"""The rendezvous, with threads in place of processes."""

import contextlib
import copy
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import PATIENCE

from mesh_lm.errors import ConfigError
from mesh_lm.network import rendezvous
from mesh_lm.network.process_slot import ProcessSlot
from mesh_lm.network.rendezvous import RendezvousFailed, meet
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import free_port

SECRET = Secret.new()
RUN = {"config": {"seed": 0, "train": {"steps": 5}}, "code": {"mesh_lm/training/step.py": "0123"}}


def outcomes(
    slots: list[ProcessSlot],
    descriptions: list[dict],
    timeout: float = PATIENCE,
    late: tuple[int, ...] = (),
) -> list[str]:
    """Returns each process's error; empty if there is none."""

    def outcome(slot: ProcessSlot, description: dict) -> str:
        time.sleep(0.7 if slot.index in late else 0)
        try:
            meet(slot, timeout, description, SECRET)
        except ConfigError as error:
            assert isinstance(error, RendezvousFailed) == any(
                sign in str(error) for sign in ("did not connect", "found no", "cannot listen")
            ), error
            return str(error)
        return ""

    with ThreadPoolExecutor(len(slots)) as pool:
        return list(pool.map(outcome, slots, descriptions))


def slots(count: int, *indices: int) -> list[ProcessSlot]:
    address = f"127.0.0.1:{free_port()}"
    return [ProcessSlot(address, count, index) for index in (indices or range(count))]


def test_they_meet_again_and_again_at_one_address() -> None:
    """JAX listens on the port right after; a lingering socket would prevent it."""
    three = slots(3)
    for _ in range(3):
        assert outcomes(three, [RUN] * 3) == ["", "", ""]
        with socket.create_server(three[0].address):
            pass


def test_visitors_may_come_first() -> None:
    three = slots(3)
    with ThreadPoolExecutor(3) as pool:
        visits = [pool.submit(meet, slot, 20, RUN, SECRET) for slot in three[1:]]
        time.sleep(0.5)
        meet(three[0], 20, RUN, SECRET)
        assert [visit.result() for visit in visits] == [None, None]


def test_who_waits_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so once, when there was no answer for a while."""
    monkeypatch.setattr(rendezvous, "QUIET", 0.1)
    address = slots(3)[0].coordinator
    for index, whom in ((0, "processes 1-2 of 3"), (1, "process 0")):
        with pytest.raises(RendezvousFailed):
            meet(ProcessSlot(address, 3, index), 0.6, RUN, SECRET)
        assert (
            capsys.readouterr().err
            == f"process {index} waits for {whom} at {address}, for up to 0.6 s\n"
        )
    assert outcomes(slots(2), [RUN] * 2) == ["", ""]
    assert not capsys.readouterr().err


def test_a_difference_is_named_on_every_process() -> None:
    other = copy.deepcopy(RUN)
    other["config"]["train"]["steps"] = 6
    other["code"]["mesh_lm/training/step.py"] = "4567"
    other["code"]["mine.py"] = "89ab"
    three = slots(3)
    errors = outcomes(three, [RUN, RUN, other], late=(1,))
    assert errors[0] == errors[1] == errors[2]
    assert "process 2 on " in errors[0]
    assert "does not match process 0 on" in errors[0]
    assert (
        "  - config.train.steps: 5 on process 0, 6 there\n  - code.mesh_lm/training/step.py: 0123 "
        "on process 0, 4567 there\n"
    ) in errors[0]
    assert "  - code.mine.py: None on process 0, 89ab there\n" in errors[0]


def test_another_count_or_the_same_index_twice() -> None:
    first, second = slots(2)
    errors = outcomes([first, ProcessSlot(second.coordinator, 3, 1)], [RUN, RUN])
    assert errors[0] == errors[1] == "process 1 expects 3 processes, process 0 expects 2"
    first, *_ = slots(3)
    twin = ProcessSlot(first.coordinator, 3, 1)
    assert (
        "two processes have the index 1 of 3; each needs its own launch.index"
        in outcomes([first, twin, twin], [RUN] * 3)[0]
    )


def test_who_does_not_come_is_named() -> None:
    some = slots(4, 0, 2)
    errors = outcomes(some, [RUN, RUN], timeout=2)
    assert errors[0] == errors[1]
    assert errors[0].startswith(
        f"processes 1, 3 of 4 did not connect to {some[0].coordinator} within 2 s; see their logs"
    )


def test_nobody_at_the_coordinators_address() -> None:
    (slot,) = slots(2, 1)
    (error,) = outcomes([slot], [RUN], timeout=0.5)
    assert error.startswith(f"process 1 found no process 0 at {slot.coordinator} within 0.5 s")
    assert "correct launch.coordinator" in error


def test_a_port_in_use() -> None:
    first, _ = slots(2)
    with socket.create_server(first.address):
        (error,) = outcomes([first], [RUN], timeout=0.5)
    assert "choose a free port for launch.coordinator" in error
    assert error.startswith(
        f"process 0 cannot listen on port {first.address[1]}: Address already in use"
    )


def test_strangers_are_ignored() -> None:
    two = slots(2)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(meet, two[0], 20, RUN, SECRET)
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{}", b""):
            deadline = time.monotonic() + PATIENCE
            while True:
                try:
                    with socket.create_connection(two[0].address) as stranger:
                        stranger.sendall(data)
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < deadline
        meet(two[1], 20, RUN, SECRET)
        meeting.result()


def test_strangers_hold_nobody_up() -> None:
    """Silence, a byte now and then, a nested message and another secret take neither a place nor
    time; an index out of range is named."""
    two = slots(2)
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stack:
        meeting = pool.submit(meet, two[0], 2, RUN, SECRET)
        strangers = [stack.enter_context(connected(two[0])) for _ in range(6)]
        strangers[0].sendall(b"[" * 200_000)
        strangers[1].sendall(b"\xff" * 200 + b"\n")
        wrong = pool.submit(meet, two[1], 1, RUN, Secret.new())
        start = time.monotonic()
        while not meeting.done() and time.monotonic() - start < PATIENCE:
            with contextlib.suppress(OSError):
                strangers[2].sendall(b"m")
            time.sleep(0.1)
        assert time.monotonic() - start < 2 + 5
        with pytest.raises(
            RendezvousFailed,
            match=(
                r"process 1 of 2 did not connect .*the last connection that was refused came from "
                r"127"
            ),
        ) as e:
            meeting.result()
        assert "another secret" in str(e.value)
        with pytest.raises(
            RendezvousFailed, match=r"found no process 0 .*start all processes with the same secret"
        ):
            wrong.result()
    assert (
        "has the index 7 of 2; launch.index must be 0 to 1"
        in outcomes([two[0], ProcessSlot(two[0].coordinator, 2, 7)], [RUN, RUN])[0]
    )


def connected(slot: ProcessSlot) -> socket.socket:
    """Returns a connection to process 0, once that listens."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection(slot.address)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_run_on_one_host_listens_there_only() -> None:
    two = slots(2)
    with ThreadPoolExecutor(1) as pool:
        meeting = pool.submit(meet, two[0], 20, RUN, SECRET)
        connected(two[0]).close()
        port = f"{two[0].address[1]:04X}"
        listening = []
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/net/{table}").read_text(encoding="utf-8").splitlines():
                address, _, state = line.split()[1:4]
                if state == "0A" and address.endswith(f":{port}"):
                    listening.append(address)
        assert listening == [f"0100007F:{port}"]
        meet(two[1], 20, RUN, SECRET)
        meeting.result()
