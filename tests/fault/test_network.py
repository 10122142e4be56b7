"""F15: the network between two hosts fails during a run and recovers. Two connected network
namespaces stand in for hosts."""

import contextlib
import time
from pathlib import Path

import pytest
from fault.hosts import ip
from fault.job import HEARTBEAT, STEPS, Job, arguments, certificates

pytestmark = pytest.mark.fault


def test_f15_a_network_that_fails_and_recovers(
    hosts: tuple[str, str], data: Path, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """Each side ends its processes within a heartbeat and 5 s of the failure; after recovery they
    reconnect and continue."""
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
            assert time.monotonic() - cut < HEARTBEAT + 5 + 4, (
                f"a process outlived the network:\n{first.log}\n{second.log}"
            )
            time.sleep(0.1)
        time.sleep(3)
        ip("-n", hosts[0], "link", "set", "meshlm-v1", "up")
        assert (first.ended(), second.ended()) == (0, 0), f"{first.log}\n{second.log}"
    assert "resumed at step 5 " in first.log, first.log
    assert certificates(first.log)[STEPS] == undisturbed[STEPS], first.log


def _runs(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0]
            != "Z"
        )
    except OSError:
        return False
