"""F22: a node is lost for good, and a spare takes its place."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from fault.job import STEPS, Job, arguments, certificates

from mesh_lm.network.wire import free_port

pytestmark = pytest.mark.fault


def test_f22_a_node_that_is_lost_is_replaced_by_a_spare(
    data: Path, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """Three launchers stand for two nodes and a spare. All processes of one node are killed: the
    run goes on at once on the spare, from the shared checkpoint, and ends with the same bits.
    """
    settings = arguments(data, tmp_path / "run")
    where = ["--nodes=3", "--spares=1", f"--rendezvous=127.0.0.1:{free_port()}"]
    with contextlib.ExitStack() as stack:
        first, second, spare = (
            stack.enter_context(
                Job(
                    tmp_path / "faults",
                    settings,
                    workers=1,
                    options=[*where, f"--node={i}"],
                    MESH_LM_PACE="0.3",
                )
            )
            for i in range(3)
        )
        first.wait("step  7/")
        assert not spare.pids(), "it has no worker"
        lost = [second.process.pid, *second.pids()]
        assert len(lost) == 2
        for pid in lost:
            os.kill(pid, signal.SIGKILL)
        assert (first.ended(), spare.ended()) == (0, 0), f"{first.log}\n{spare.log}"
    assert (
        re.search(r"node 2 \(.*\) takes the place of node 1", first.log)
        and "waiting for node" not in first.log
    ), first.log
    assert "resumed at step 5 " in first.log and re.search(
        "restart 1 of 3 .*, immediately", first.log
    ), first.log
    assert certificates(first.log)[STEPS] == undisturbed[STEPS], first.log


def test_f22_node_0_is_unhealthy(
    hosts: tuple[str, str], data: Path, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    """Node 0 and the spare are on one host, node 1 on the other, which then runs process 0: the
    processes meet at its address."""
    settings = arguments(data, tmp_path / "run")
    check = "--health-command=sh -c 'echo the fan has stopped; test $MESH_LM_NODE != 0'"
    where = ["--nodes=3", "--spares=1", "--rendezvous=10.77.0.1:9876", check]
    with contextlib.ExitStack() as stack:
        launchers = [
            stack.enter_context(
                Job(
                    tmp_path / "faults",
                    settings,
                    workers=1,
                    options=[*where, f"--node={i}"],
                    prefix=["ip", "netns", "exec", hosts[i % 2]],
                )
            )
            for i in range(3)
        ]
        logs = [(job.ended(), job.log) for job in launchers]
    assert [status for status, _ in logs] == [0, 0, 0], logs
    assert re.search(
        r"node 0 \(.*\) is unhealthy, and is left out: command: the fan has stopped", logs[0][1]
    ), logs[0][1]
    assert "parameters" in logs[1][1] and "parameters" not in logs[0][1], "process 0 prints this"
    assert certificates(logs[1][1])[STEPS] == undisturbed[STEPS], logs[1][1]
