"""Two connected network namespaces, which stand in for two hosts."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

HOSTS = (f"meshlm-{os.getpid()}-a", f"meshlm-{os.getpid()}-b")
"""Names that other test runs on this machine do not use."""


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str]]:
    """Two hosts with addresses 10.77.0.1 and 10.77.0.2. Skips if this process may not create
    namespaces."""
    if not shutil.which("ip"):
        pytest.skip("ip is not installed (Debian: iproute2)")
    names = [Path("/etc/netns") / host for host in HOSTS]
    # left by a test run that was killed
    _remove([path for path in Path("/etc/netns").glob("meshlm-*-?") if not _in_use(path)])
    try:
        try:
            for host in HOSTS:
                ip("netns", "add", host)
            ip(
                "link",
                "add",
                "meshlm-v1",
                "netns",
                HOSTS[0],
                "type",
                "veth",
                "peer",
                "name",
                "meshlm-v2",
                "netns",
                HOSTS[1],
            )
            for i, (host, name) in enumerate(zip(HOSTS, names, strict=True), 1):
                ip("-n", host, "addr", "add", f"10.77.0.{i}/24", "dev", f"meshlm-v{i}")
                ip("-n", host, "link", "set", f"meshlm-v{i}", "up")
                ip("-n", host, "link", "set", "lo", "up")
                name.mkdir(parents=True)  # gloo binds to the address of the host's own name
                (name / "hosts").write_text(
                    f"127.0.0.1 localhost\n10.77.0.{i} {socket.gethostname()}\n", encoding="utf-8"
                )
        except (PermissionError, OSError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield HOSTS
    finally:
        _remove(names)


def throttle(host: str, i: int, rate: str) -> None:
    """Limits what host number i (0, 1) sends to this rate, as tc writes it: 50mbit. Skips where tc
    is missing or may not do it."""
    command = f"tc qdisc add dev meshlm-v{i + 1} root tbf rate {rate} burst 64kb latency 400ms"
    done = subprocess.run(
        ["ip", "netns", "exec", host, *command.split()], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no throttled link here: {done.stderr.strip()}")


def sent_bytes(host: str, i: int) -> int:
    """Returns what host number i (0, 1) has sent over its link, headers included."""
    done = subprocess.run(
        ["ip", "-n", host, "-s", "-j", "link", "show", f"meshlm-v{i + 1}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)[0]["stats64"]["tx"]["bytes"]


def _in_use(name: Path) -> bool:
    pid = name.name.split("-")[1]
    return pid != str(os.getpid()) and Path("/proc", pid).exists()


def _remove(names: list[Path]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "del", name.name], capture_output=True)
        shutil.rmtree(name, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir("/etc/netns")
