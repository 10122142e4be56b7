"""F15: the network between two hosts fails during a run and recovers. Two connected network namespaces stand in for hosts."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault.job import HEARTBEAT, STEPS, Job, arguments, certificates

pytestmark = pytest.mark.fault
HOSTS = ("meshlm-a", "meshlm-b")


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Two hosts with addresses 10.77.0.1 and 10.77.0.2. Skips if this process may not create namespaces."""
    if not shutil.which("ip"):
        pytest.skip("ip is not installed (Debian: iproute2)")
    names = [Path("/etc/netns") / host for host in HOSTS]
    _remove(names)  # left by a test run that was killed
    try:
        try:
            for host in HOSTS:
                ip("netns", "add", host)
            ip("link", "add", "meshlm-v1", "netns", HOSTS[0], "type", "veth", "peer", "name", "meshlm-v2", "netns", HOSTS[1])
            for i, (host, name) in enumerate(zip(HOSTS, names, strict=True), 1):
                ip("-n", host, "addr", "add", f"10.77.0.{i}/24", "dev", f"meshlm-v{i}")
                ip("-n", host, "link", "set", f"meshlm-v{i}", "up")
                ip("-n", host, "link", "set", "lo", "up")
                name.mkdir(parents=True)  # gloo binds to the address of the host's own name
                (name / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.{i} {socket.gethostname()}\n")
        except (PermissionError, OSError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield HOSTS
    finally:
        _remove(names)


def test_f15_a_network_that_fails_and_recovers(hosts: tuple[str, str], data: Path, undisturbed: dict[int, str], tmp_path: Path) -> None:
    """Each side ends its processes within a heartbeat and 5 s of the failure; after recovery they reconnect and continue."""
    settings = arguments(data, tmp_path / "run")
    where = ["--nodes=2", "--rendezvous=10.77.0.1:9876", "--rejoin=120"]
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                Job(
                    tmp_path / "faults", settings, workers=1, MESH_LM_PACE="0.3",
                    options=[*where, f"--node={i}"], prefix=["ip", "netns", "exec", host],
                )
            )
            for i, host in enumerate(hosts)
        )  # fmt: skip
        first.wait("step  7/")
        workers = [pid for job in (first, second) for pid in job.pids()]
        ip("-n", hosts[0], "link", "set", "meshlm-v1", "down")
        cut = time.monotonic()
        while any(_runs(pid) for pid in workers):
            assert time.monotonic() - cut < HEARTBEAT + 5 + 4, f"a process outlived the network:\n{first.log}\n{second.log}"
            time.sleep(0.1)
        time.sleep(3)
        ip("-n", hosts[0], "link", "set", "meshlm-v1", "up")
        assert (first.ended(), second.ended()) == (0, 0), f"{first.log}\n{second.log}"
    assert "resumed at step 5 " in first.log, first.log
    assert certificates(first.log)[STEPS] == undisturbed[STEPS], first.log


def _remove(names: list[Path]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name.name], capture_output=True)
        shutil.rmtree(name, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir("/etc/netns")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
