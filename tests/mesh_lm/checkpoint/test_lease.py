"""The lease of an output: one holder at a time; a dead one is replaced, a live one is not, and one
that was replaced writes no more."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh_lm.checkpoint import commit, lease, manager
from mesh_lm.checkpoint.lease import STALE, Holder, Lease
from mesh_lm.errors import ConfigError, ReplacedError, StorageError

FREE_PID = 2**22 - 1
"""A process id that the kernel gives to none."""


@pytest.fixture(autouse=True)
def frequent_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEW", 0.02)


def remote_holder(**changes: object) -> Holder:
    """A holder on another machine, with a process id that is free here."""
    return dataclasses.replace(
        Holder.this_process(),
        **{"host": "node7", "machine": "another", "pid": FREE_PID, "life": "0badcafe"} | changes,
    )


def current_holder(output: Path) -> Holder:
    holder = lease._decode((output / ".lease").read_bytes())
    assert holder
    return holder


def wait_until(condition: Callable[[], object]) -> None:
    for _ in range(500):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not happen within 5 s")


def test_a_lease_is_taken_renewed_and_released(tmp_path: Path) -> None:
    mine = Lease.acquire(tmp_path)
    wait_until(lambda: current_holder(tmp_path).renewed > 2)
    assert (tmp_path / ".lease").stat().st_size == lease._SIZE, "renewing it needs no space"
    assert (
        current_holder(tmp_path).pid == os.getpid() and current_holder(tmp_path).life == mine.life
    )
    mine.require()
    mine.release()
    mine.release()
    assert not [*tmp_path.iterdir()]
    Lease.acquire(tmp_path).release()


def test_a_live_process_here_is_named_and_refused_at_once(tmp_path: Path) -> None:
    mine = Lease.acquire(tmp_path)
    with pytest.raises(
        ConfigError, match=r"in use by an earlier call in this process, which has not ended; end it"
    ):
        Lease.acquire(tmp_path, wait=lambda seconds: pytest.fail("it waited"))
    mine.require()
    mine.release()
    status = lease._process_status(1)
    assert status
    first = dataclasses.replace(Holder.this_process(), pid=1, started=status.started)
    (tmp_path / ".lease").write_bytes(first.encoded())
    message = (
        r"in use: process 1 on \S+ since \d{4}-\d\d-\d\d .*; end that run, or set output .* delete "
        r".*\.lease"
    )
    with pytest.raises(ConfigError, match=message):
        Lease.acquire(tmp_path, wait=lambda seconds: pytest.fail("it waited"))


def test_a_holder_of_a_later_version_that_renews_is_refused(tmp_path: Path) -> None:
    """Its lease has one more field, or is not understood at all."""
    for text in (json.dumps({**json.loads(remote_holder().encoded()), "more": 1}), "version 2 "):
        n = 0

        def renew(seconds: float, text: str = text) -> None:
            nonlocal n
            n += 1
            assert n < 10
            (tmp_path / ".lease").write_text(
                text.replace('"renewed": 0', f'"renewed": {n}') + " " * n, encoding="utf-8"
            )

        (tmp_path / ".lease").write_text(text, encoding="utf-8")
        with pytest.raises(
            ConfigError,
            match="in use: process 4194303" if "more" in text else "in use: an unknown process",
        ):
            Lease.acquire(tmp_path, wait=renew)


def test_a_disk_that_fails_for_a_moment_costs_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "_PAUSE", 0.01)
    mine = Lease.acquire(tmp_path)
    failures = [OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "away")]
    require = mine.require

    def flaky_require() -> None:
        if failures:
            raise failures.pop()
        require()

    monkeypatch.setattr(mine, "require", flaky_require)
    save = commit.Commit(tmp_path / "7.saving-x", tmp_path / "7", mine)
    (tmp_path / "7.saving-x").mkdir()
    wait_until(lambda: not save.pending)
    save.finish()
    assert save.error is None and not failures and (tmp_path / "7").is_dir()
    mine.release()


@pytest.mark.parametrize("cause", ["killed", "other process with the same id"])
def test_a_dead_process_here_is_replaced_at_once(tmp_path: Path, cause: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    holder = Holder.this_process()
    status = lease._process_status(child.pid)
    assert status
    holder = dataclasses.replace(
        holder, pid=child.pid, started=status.started - (cause != "killed"), life="0badcafe"
    )
    (tmp_path / ".lease").write_bytes(holder.encoded())
    if cause == "killed":
        assert holder.alive
        child.kill()
        wait_until(lambda: not holder.alive)  # a zombie until it is waited for
    mine = Lease.acquire(tmp_path, wait=lambda seconds: pytest.fail("it waited"))
    assert current_holder(tmp_path).life == mine.life
    mine.release()
    child.kill()
    child.communicate()


def test_a_silent_holder_on_another_machine_is_replaced_after_a_bounded_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".lease").write_bytes(remote_holder().encoded())
    waited: list[float] = []
    mine = Lease.acquire(tmp_path, wait=waited.append)
    assert sum(waited) == STALE and current_holder(tmp_path).life == mine.life
    output = capsys.readouterr().out
    assert "in use by process 4194303 on node7 since " in output
    assert "waiting up to 30 s" in output
    mine.release()


def test_a_holder_on_another_machine_that_renews_is_refused(tmp_path: Path) -> None:
    other = remote_holder()
    n = 0

    def renew(seconds: float) -> None:
        nonlocal n
        n += 1
        if n % 5 == 0:
            (tmp_path / ".lease").write_bytes(dataclasses.replace(other, renewed=n).encoded())

    (tmp_path / ".lease").write_bytes(other.encoded())
    with pytest.raises(ConfigError, match="process 4194303 on node7"):
        Lease.acquire(tmp_path, wait=renew)
    assert n == 5
    # status 75: a scheduler may try it again later
    with pytest.raises(StorageError, match="node7"):
        Lease.acquire(tmp_path, patience=60, wait=renew)
    assert n > 60, "a restart waits for the processes of the earlier start"
    assert current_holder(tmp_path).life == other.life


def test_a_restart_gets_the_lease_when_its_predecessor_ends(tmp_path: Path) -> None:
    predecessor = Lease.acquire(tmp_path)
    n_waits = 0

    def wait(seconds: float) -> None:
        nonlocal n_waits
        n_waits += 1
        if n_waits == 3:
            predecessor.release()

    Lease.acquire(tmp_path, patience=60, wait=wait).release()
    assert n_waits == 3


def test_a_commit_between_the_look_at_the_lease_and_its_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is suspended there and replaced can no longer name its save, not even while the
    other one is removing it."""
    saving = tmp_path / "7.saving-old"
    saving.mkdir()
    (saving / "arrays").write_text("complete", encoding="utf-8")
    rmtree = shutil.rmtree
    removed: list[str] = []

    def remove(path: Path, **options: Any) -> None:
        removed.append(path.name.partition("-")[0])
        with pytest.raises(FileNotFoundError):
            os.rename(saving, tmp_path / "7")  # the suspended run wakes up
        rmtree(path, **options)

    monkeypatch.setattr(manager.shutil, "rmtree", remove)
    manager._prepare_directory(tmp_path)
    assert removed == ["7.removed"] and not [*tmp_path.iterdir()]


def test_a_holder_that_was_replaced_writes_no_more(tmp_path: Path) -> None:
    mine = Lease.acquire(tmp_path)
    os.rename(tmp_path / ".lease", tmp_path / "aside")
    (tmp_path / ".lease").write_bytes(remote_holder().encoded())
    wait_until(lambda: mine._lost)
    for check in (mine.raise_if_lost, mine.require):
        with pytest.raises(
            ReplacedError,
            match=r"taken over by process 4194303 on node7 since .*this run writes no more",
        ):
            check()
    mine.release()
    assert current_holder(tmp_path) == remote_holder(since=current_holder(tmp_path).since), (
        "another's lease is not touched"
    )


def test_the_commit_after_a_suspension_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that renews the lease was suspended, too, and has noticed nothing."""
    monkeypatch.setattr(lease, "RENEW", 1000.0)
    mine = Lease.acquire(tmp_path)
    (tmp_path / ".lease").write_bytes(remote_holder().encoded())
    mine.raise_if_lost()
    with pytest.raises(ReplacedError, match="process 4194303 on node7"):
        mine.require()
    mine.release()


@pytest.mark.parametrize(
    "content",
    [None, b"", b"\0" * 512, b"{}", b"[" * 100_000],
    ids=["deleted", "empty", "zeros", "{}", "nested"],
)
def test_a_lease_that_was_deleted_or_damaged_is_written_again(
    tmp_path: Path, content: bytes | None
) -> None:
    mine = Lease.acquire(tmp_path)
    if content is None:
        (tmp_path / ".lease").unlink()
    else:
        (tmp_path / ".lease").write_bytes(content)
    mine.require()
    assert current_holder(tmp_path).life == mine.life
    mine.release()


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 512, b'{"pid": 1}'], ids=["empty", "zeros", "fields missing"]
)
def test_a_damaged_lease_does_not_stop_a_run_for_good(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".lease").write_bytes(content)
    waited: list[float] = []
    Lease.acquire(tmp_path, wait=waited.append).release()
    assert sum(waited) == STALE


def test_a_lease_that_was_renewed_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    stale = remote_holder().encoded()
    renewed = remote_holder(renewed=1).encoded()
    mine = Holder.this_process().encoded()
    path = tmp_path / ".lease"
    path.write_bytes(renewed)
    assert not lease._replace(path, stale, mine)
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == renewed
    assert lease._replace(path, renewed, mine)
    assert [*tmp_path.iterdir()] == [path] and path.read_bytes() == mine


def test_a_successor_that_was_killed_does_not_stop_others(tmp_path: Path) -> None:
    local_holder = dataclasses.replace(Holder.this_process(), pid=FREE_PID)
    for dead, seconds in ((local_holder, 1), (remote_holder(), 2 * STALE + 1)):
        for name in (".lease", ".lease.next"):
            (tmp_path / name).write_bytes(dead.encoded())
        waited: list[float] = []
        Lease.acquire(tmp_path, wait=waited.append).release()
        assert sum(waited) == seconds and not [*tmp_path.iterdir()]


def test_of_many_at_once_one_gets_a_stale_lease(tmp_path: Path) -> None:
    """Twenty threads, which count as one process here, find the same stale lease."""

    def attempt(
        start: threading.Barrier, acquired: list[Lease], refused: list[ConfigError]
    ) -> None:
        start.wait()
        try:
            acquired.append(Lease.acquire(tmp_path, wait=lambda seconds: time.sleep(1e-3)))
        except ConfigError as error:
            refused.append(error)

    for _ in range(10):
        (tmp_path / ".lease").write_bytes(
            dataclasses.replace(Holder.this_process(), pid=FREE_PID, life="0badcafe").encoded()
        )
        acquired: list[Lease] = []
        refused: list[ConfigError] = []
        start = threading.Barrier(20)
        threads = [
            threading.Thread(target=attempt, args=(start, acquired, refused)) for _ in range(20)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(acquired), len(refused)) == (1, 19)
        acquired[0].require()
        acquired[0].release()
