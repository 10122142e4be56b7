"""Spare nodes and unhealthy nodes, with launchers of dummy workers: who is left out, and who takes
which place."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from processes import ended

from mesh_lm.network import environment
from tests.mesh_lm.launch.launchers import dies, life, lives, nodes


@pytest.fixture
def site(tmp_path: Path) -> str:
    """The option for a check that fails on node N while there is a file unhealthy-N, with its text
    as the reason."""
    script = tmp_path / "check.sh"
    script.write_text(
        (
            f"#!/bin/sh\nfound={tmp_path}/unhealthy-$MESH_LM_NODE\necho checking\n[ ! -e $found ] "
            "|| ! cat $found\n"
        ),
        encoding="utf-8",
    )
    script.chmod(0o755)
    return f"--health=quick --health-command={script}"


def unhealthy(directory: Path, node: int) -> None:
    (directory / f"unhealthy-{node}").write_text(f"fan {node} has stopped\n", encoding="utf-8")


@pytest.mark.slow
def test_a_spare_replaces_a_node_that_is_killed(tmp_path: Path) -> None:
    """It gets the place of the lost node, at once; the lost node's launcher comes back as a
    spare."""
    with nodes(3, tmp_path, "--spares=1 --restarts=5", "step=4 1@wait 2@wait exit=0") as (
        (first, second, third),
        again,
    ):
        worker = life(tmp_path, 1, 1, second)["pid"]
        assert life(tmp_path, 1, 0, first)["MESH_LM_NODES"] == "2"
        assert not (tmp_path / "life-1-2").exists()
        second.kill()
        assert dies(worker, 5)
        life(tmp_path, 2, 1, third)
        back = again(1)
        os.kill(life(tmp_path, 2, 0, first)["pid"], signal.SIGKILL)
        outs = [ended(launcher) for launcher in (first, third, back)]
        assert [launcher.returncode for launcher in (first, third, back)] == [0, 0, 0], outs
    assert re.search(r"node 2 (\(.*\) is connected, and )?stands by", outs[0]), outs[0]
    assert "waiting for node" not in outs[0], outs[0]
    assert outs[0].count("takes the place of node 1") == outs[0].count("takes the place") == 1, (
        outs[0]
    )
    assert "node 1 stands by" in outs[0], outs[0]
    sizes = [
        {key: record[key] for key in ("MESH_LM_PROCESSES", "MESH_LM_NODES")}
        for record in lives(tmp_path, 1)
    ]
    assert sizes == [{"MESH_LM_PROCESSES": "2", "MESH_LM_NODES": "2"}] * 3
    assert not any(environment.ELASTIC in record for record in lives(tmp_path)), (
        "the mesh stays as it is"
    )


@pytest.mark.parametrize(
    "node", [0, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.exhaustive])]
)
def test_an_unhealthy_node_is_left_out_at_the_start(tmp_path: Path, site: str, node: int) -> None:
    """So is node 0: another node runs process 0 then, and is the address at which the processes
    meet."""
    unhealthy(tmp_path, node)
    with nodes(3, tmp_path, f"--spares=1 {site}", "exit=0") as (launchers, _):
        outs = [ended(launcher) for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0, 0, 0], outs
    launcher_pids = [
        [record["launcher"] for record in lives(tmp_path, process)] for process in (0, 1)
    ]
    assert launcher_pids == [[launchers[i].pid] for i in range(3) if i != node], outs
    assert f"node {node} (" in outs[0], outs[0]
    assert f"is unhealthy, and is left out: command: fan {node} has stopped" in outs[0], outs[0]


@pytest.mark.slow
def test_a_node_that_is_unhealthy_after_a_failure_is_replaced(tmp_path: Path, site: str) -> None:
    with nodes(3, tmp_path, f"--spares=1 {site}", "step=4 1@wait exit=0") as (
        (first, second, third),
        _,
    ):
        worker = life(tmp_path, 1, 1, second)["pid"]
        life(tmp_path, 1, 0, first)
        unhealthy(tmp_path, 1)
        os.kill(worker, signal.SIGKILL)
        outs = [ended(launcher) for launcher in (first, second, third)]
        assert [launcher.returncode for launcher in (first, second, third)] == [0, 0, 0], outs
    assert [record["launcher"] for record in lives(tmp_path, 1)] == [second.pid, third.pid]
    assert "is unhealthy, and is left out: command: fan 1 has stopped" in outs[0], outs[0]
    assert "takes the place of node 1" in outs[0], outs[0]


def test_without_a_spare_the_run_waits_and_ends(tmp_path: Path, site: str) -> None:
    """It waits until the node is healthy again, and ends with its name where it is not."""
    with nodes(2, tmp_path, f"--rejoin=1 {site}", "step=4 wait") as ((first, second), _):
        worker = life(tmp_path, 1, 1, second)["pid"]
        life(tmp_path, 1, 0, first)
        unhealthy(tmp_path, 1)
        os.kill(worker, signal.SIGKILL)
        outs = [ended(first), ended(second)]
        assert first.returncode == second.returncode == 75, outs
    assert re.search(
        (
            r"waiting for a healthy node, for up to 1 s; node 1 \(.*\) is unhealthy \(command: fan "
            r"1 "
            r"has"
        ),
        outs[0],
    ), outs[0]
    assert "giving up: node 1 (" in outs[0], outs[0]
    assert "is unhealthy (command: fan 1 has stopped); at least 2 are needed" in outs[0], outs[0]
    assert len(lives(tmp_path, 0)) == 1


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_on_fewer_nodes_leaves_an_unhealthy_one_out(tmp_path: Path, site: str) -> None:
    unhealthy(tmp_path, 1)
    with nodes(2, tmp_path, f"--min-nodes=1 --start=4 {site}", "exit=0") as (launchers, _):
        outs = [ended(launcher) for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0, 0], outs
    assert "continuing with 1 of 2 nodes: 0" in outs[0], outs[0]
    assert (
        json.loads((tmp_path / "life-1-0").read_text(encoding="utf-8"))[environment.ELASTIC] == "2"
    )
