"""F20: a node is lost with its disk. Its local checkpoints were copied to the other node, so the
run resumes from the newest local step.

Two network namespaces stand in for the hosts. Each has a file system of its own for local
checkpoints, at the same path, which is gone as soon as its processes are.
"""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from fault.job import STEPS, Job, arguments, certificates

pytestmark = pytest.mark.fault
LOCAL = 2


def test_f20_lost_nodes(
    hosts: tuple[str, str], data: Path, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """Node 1 is killed after step 8, then node 0 after step 12, and each is replaced by a host with
    an empty disk. The output has steps 5 and 10 only. The run ends with the bits of an undisturbed
    one."""
    (disk := tmp_path / "disk").mkdir()
    settings = arguments(
        data, tmp_path / "run", checkpoint__local=disk, checkpoint__local_every=LOCAL,
        checkpoint__local_copies=1,
        health__stall=60, health__heartbeat=60,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:

        def node(i: int, name: str) -> Job:
            own_disk = ["sh", "-c", f'mount -t tmpfs tmpfs {disk} && exec "$@"', "sh"]
            where = [
                "--nodes=2",
                f"--node={i}",
                "--rendezvous=10.77.0.1:9876",
                "--rejoin=240",
                "--heartbeat=60",
            ]
            prefix = ["ip", "netns", "exec", hosts[i], *own_disk]
            secret = {"MESH_LM_SECRET": "the secret of these two hosts", "MESH_LM_PACE": "0.7"}
            return stack.enter_context(
                Job(tmp_path / name, settings, workers=1, options=where, prefix=prefix, **secret)
            )

        jobs = [node(i, f"faults-{i}") for i in range(2)]
        logs = []
        for lost, step in ((1, 9), (0, 13)):
            jobs[0].wait(f"step {step:2}/")
            for pid in [jobs[lost].process.pid, *jobs[lost].pids()]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            jobs[lost].process.wait()
            logs.append(jobs[lost].log)
            jobs[lost] = node(lost, f"faults-new-{lost}")
        assert [job.ended() for job in jobs] == [0, 0], "\n".join(job.log for job in jobs)
    first, last = logs[1], jobs[0].log  # of node 0, before and after it was lost
    for log, lost, step in ((first, 1, 8), (last, 0, 12)):
        assert (
            f"newer than the output's checkpoints; fetched from other nodes: process {lost}\n"
            in log
        ), log
        assert f"resumed at step {step} " in log, log
    assert not any(
        word in log
        for log in (first, last, jobs[1].log)
        for word in ("could not be copied", "not used", "was refused")
    )
    assert certificates(last)[STEPS] == undisturbed[STEPS], last
