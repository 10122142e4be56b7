"""F20: a node is lost with its disk. Its local checkpoints were copied to the other node, so the run resumes from the newest local step.

Two network namespaces stand in for the hosts. Each has a file system of its own for local checkpoints, at the same path, which is gone as
soon as its processes are.
"""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from fault.job import EVERY, STEPS, Job, arguments, certificates

pytestmark = pytest.mark.fault
LOCAL = 2


@pytest.mark.parametrize("lost", [1, 0])
def test_f20_a_lost_node(lost: int, hosts: tuple[str, str], data: Path, undisturbed: dict[int, str], tmp_path: Path) -> None:
    """Killed after step 8, of which only local checkpoints exist, and replaced by a host with an empty disk: the bits are those of 8."""
    (disk := tmp_path / "disk").mkdir()
    settings = arguments(
        data, tmp_path / "run", checkpoint__local=disk, checkpoint__local_every=LOCAL, checkpoint__local_copies=1,
        health__stall=60, health__heartbeat=60,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:

        def node(i: int, name: str) -> Job:
            own_disk = ["sh", "-c", f'mount -t tmpfs tmpfs {disk} && exec "$@"', "sh"]
            where = ["--nodes=2", f"--node={i}", "--rendezvous=10.77.0.1:9876", "--rejoin=120", "--heartbeat=60"]
            prefix = ["ip", "netns", "exec", hosts[i], *own_disk]
            secret = {"MESH_LM_SECRET": "the secret of these two hosts", "MESH_LM_PACE": "1"}
            return stack.enter_context(Job(tmp_path / name, settings, workers=1, options=where, prefix=prefix, **secret))

        jobs = [node(i, f"faults-{i}") for i in range(2)]
        jobs[0].wait("step  9/")
        for pid in [jobs[lost].process.pid, *jobs[lost].pids()]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        jobs[lost].process.wait()
        jobs[lost] = node(lost, "faults-new")
        assert [job.ended() for job in jobs] == [0, 0], "\n".join(job.log for job in jobs)
    log = jobs[0].log
    assert f"newer than the output's checkpoints; fetched from other nodes: process {lost}" in log, log
    assert 2 * LOCAL < EVERY < 8 and "resumed at step 8 " in log, log
    assert "could not be copied" not in log + jobs[1].log and "Traceback" not in jobs[lost].log
    assert certificates(log)[STEPS] == undisturbed[STEPS], log
