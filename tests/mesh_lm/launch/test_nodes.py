"""Several launchers, as on several nodes, with dummy workers: nodes that die, hang, return, or do
not."""

import re
import signal
import socket
import time
from pathlib import Path

import pytest
from processes import ended

from tests.mesh_lm.launch.launchers import SECRET, SLOW, dies, life, lives, nodes


def test_two_nodes_are_one_run(tmp_path: Path) -> None:
    with nodes(2, tmp_path, "--per-node=2", "exit=0") as ((first, second), _):
        outs = [ended(first), ended(second)]
        assert first.returncode == second.returncode == 0, outs
    environments = [lives(tmp_path, process)[0] for process in range(4)]
    assert [variables["MESH_LM_PROCESS_INDEX"] for variables in environments] == [
        "0",
        "1",
        "2",
        "3",
    ]
    assert len({variables["MESH_LM_COORDINATOR"] for variables in environments}) == 1
    assert all(
        variables["MESH_LM_PROCESSES"] == "4" and variables["MESH_LM_NODES"] == "2"
        for variables in environments
    )
    (secret,) = {variables["MESH_LM_SECRET"] for variables in environments}
    assert secret != SECRET
    assert not any(secret in out or SECRET in out for out in outs), (
        "the workers have one of their own"
    )
    assert not any(
        "MESH_LM_NODE" in variables
        or "MESH_LM_RENDEZVOUS" in variables
        or "MESH_LM_ELASTIC" in variables
        for variables in environments
    )


def test_a_worker_that_dies_on_one_node_ends_all_and_all_begin_again(tmp_path: Path) -> None:
    with nodes(2, tmp_path, "", "saved=3 1@1:kill 1@wait") as ((first, second), _):
        outs = [ended(first), ended(second)]
        assert first.returncode == second.returncode == 0, outs
        assert "process 1 on node 1 (" in outs[0]
        assert "was killed by SIGKILL" in outs[0]
        assert "restart 1 of 3 from its newest checkpoint (step 3 or later)" in outs[0]
    assert len(lives(tmp_path, 0)) == len(lives(tmp_path, 1)) == 2
    starts = [record["at"] for record in lives(tmp_path)]
    assert 2 < starts[1] - starts[0] < 2 + 1 + SLOW, "SIGTERM comes after 2 s, and is obeyed"


def test_a_mistake_ends_all_nodes_for_good(tmp_path: Path) -> None:
    with nodes(2, tmp_path, "", "exit=1") as ((first, second), _):
        outs = [ended(first), ended(second)]
        assert first.returncode == second.returncode == 1, outs
    assert len(lives(tmp_path, 0)) == 1


def test_a_launcher_that_is_killed_comes_back(tmp_path: Path) -> None:
    with nodes(2, tmp_path, "", "step=4 1@wait exit=0") as ((first, second), again):
        orphan = life(tmp_path, 1, 1, second)["pid"]
        life(tmp_path, 1, 0, first)
        second.kill()
        assert dies(orphan, 5)
        third = again(1)
        outs = [ended(first), ended(third)]
        assert first.returncode == third.returncode == 0, outs
        assert "is gone: its launcher exited, or closed the connection" in outs[0]
        assert "node 1 (" in outs[0]
        assert ") is back" in outs[0]
    assert len(lives(tmp_path, 1)) == 2


def test_node_0_that_is_killed_comes_back(tmp_path: Path) -> None:
    """Node 0's launcher has the controller: the other node ends its workers, waits, and joins the
    new one."""
    with nodes(2, tmp_path, "", "1:wait exit=0") as ((first, second), again):
        orphan = life(tmp_path, 1, 1, second)["pid"]
        first.kill()
        assert dies(orphan, 5)
        (tmp_path / "life-1-1").unlink()
        third = again(0)
        new_worker = life(tmp_path, 1, 1, second)["pid"]
        assert new_worker != orphan
        third.send_signal(signal.SIGTERM)
        outs = [ended(third), ended(second)]
        assert third.returncode == second.returncode == 99, outs
        assert "node 1: the controller on node 0 is gone; reconnecting, for up to 300 s" in outs[1]


@pytest.mark.slow
def test_a_stopped_node_is_done_without_until_it_is_back(tmp_path: Path) -> None:
    """Missing heartbeats reveal the stopped node; the run continues on one node, and on both when
    the other wakes: nothing is lost."""
    with nodes(2, tmp_path, "--heartbeat=1.5 --rejoin=1 --min-nodes=1", "1@wait 2@wait exit=0") as (
        (first, second),
        _,
    ):
        first_life = life(tmp_path, 1, 1, second)
        second.send_signal(signal.SIGSTOP)
        second_life = life(tmp_path, 2, 0, first)
        assert second_life["MESH_LM_PROCESSES"] == "1"
        assert second_life["MESH_LM_NODES"] == "1"
        assert second_life["MESH_LM_ELASTIC"] == "2"
        assert second_life["at"] - first_life["at"] < 1.5 + 5 + 1 + SLOW, (
            "heartbeat + 5 s, and the second that it waits for the node"
        )
        second.send_signal(signal.SIGCONT)
        assert dies(first_life["pid"], 5)
        outs = [ended(first), ended(second)]
        assert first.returncode == second.returncode == 0, outs
        assert re.search(
            r"sent no heartbeat for \d s: its machine, its launcher or the network is down", outs[0]
        )
        assert "continuing with 1 of 2 nodes: 0" in outs[0]
        assert (
            "2 nodes are connected and 1 in use: the workers save, and restart on more nodes"
            in outs[0]
        )
        assert outs[0].count("] restart ") == 1, "growing is not a restart"
    assert life(tmp_path, 3, 1, first)["MESH_LM_NODES"] == "2"


def test_a_node_that_stays_away_ends_the_run(tmp_path: Path) -> None:
    with nodes(2, tmp_path, "--rejoin=0.5", "wait") as ((first, second), _):
        life(tmp_path, 1, 1, second)
        second.kill()
        out = ended(first)
        assert first.returncode == 75, out
        assert "giving up: node 1 did not connect within 0.5 s; at least 2 are needed" in out, out


@pytest.mark.slow
def test_a_node_that_is_gone_is_waited_for_once(tmp_path: Path) -> None:
    """Otherwise each later restart would wait for it again."""
    with nodes(2, tmp_path, "--rejoin=3 --min-nodes=1", "1@wait 2@kill exit=0") as (
        (first, second),
        _,
    ):
        life(tmp_path, 1, 0, first)
        life(tmp_path, 1, 1, second)
        second.kill()
        out = ended(first)
        assert first.returncode == 0, out
        assert out.count("waiting for node 1, for up to 3 s") == 1, out
    starts = [record["at"] for record in lives(tmp_path)]
    assert len(starts) == 3
    assert starts[1] - starts[0] > 3


def test_a_controller_that_stays_away_ends_a_node(tmp_path: Path) -> None:
    with nodes(2, tmp_path, "--rejoin=0.5", "wait") as ((first, second), _):
        life(tmp_path, 1, 1, second)
        first.kill()
        out = ended(second)
        assert second.returncode == 75, out
        assert "node 1 is giving up: no answer from the controller at 127.0.0.1:" in out, out


def test_fewer_nodes_are_enough(tmp_path: Path) -> None:
    """Workers whose mesh fills two of three nodes report it once; after that, and after a crash,
    two are started and one is spare."""
    with nodes(
        3, tmp_path, "--min-nodes=1 --rejoin=1", "1@fewer=2 1@exit=76 2@1:kill 2@wait exit=0"
    ) as (launchers, _):
        outs = [ended(launcher) for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [0, 0, 0], outs
        assert "2 of 3 nodes are enough for the largest mesh; the others wait" in outs[0], outs[0]
        assert "restart 1 of 3" in outs[0]
    assert [len(lives(tmp_path, process)) for process in range(3)] == [3, 3, 1]
    assert lives(tmp_path)[1]["MESH_LM_NODES"] == "2"


@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_to_one_node_ends_all(tmp_path: Path, node: int) -> None:
    with nodes(2, tmp_path, "", "wait") as (launchers, _):
        life(tmp_path, 1, 0, launchers[0])
        life(tmp_path, 1, 1, launchers[1])
        launchers[node].send_signal(signal.SIGTERM)
        outs = [ended(launcher) for launcher in launchers]
        assert [launcher.returncode for launcher in launchers] == [99, 99], outs


def test_a_signal_before_the_run_begins(tmp_path: Path) -> None:
    """SIGTERM to a node that waits for node 0, and to node 0 while it waits for others: nothing was
    lost."""
    with nodes(2, tmp_path, "", "wait") as ((first, second), _):
        first.kill()
        time.sleep(0.5)
        second.send_signal(signal.SIGTERM)
        out = ended(second)
        # the latter if Python had not started yet
        assert second.returncode in (99, -signal.SIGTERM), out
    with nodes(2, tmp_path, "", "wait") as ((first, second), _):
        second.kill()
        time.sleep(0.5)
        first.send_signal(signal.SIGTERM)
        out = ended(first)
        assert first.returncode in (99, -signal.SIGTERM), out


def test_a_node_with_another_secret_is_refused(tmp_path: Path) -> None:
    with nodes(2, tmp_path, "", "exit=0") as ((first, second), again):
        second.kill()
        stranger = again(1, "--start=2", secret="another secret of these tests")
        out = ended(stranger)
        assert stranger.returncode == 75, out
        assert out.count("was refused: it does not accept this secret; give all nodes") == 2, out
        third = again(1)
        outs = [ended(first), ended(third)]
        assert first.returncode == third.returncode == 0, outs
        refusal = "the last from 127.0.0.1: it has another secret than this end"
        assert f"refused 1 connection, {refusal}" in outs[0], outs[0]


def test_nodes_that_differ_are_told(tmp_path: Path) -> None:
    with nodes(2, tmp_path, "", "exit=0") as ((first, second), again):
        second.kill()
        other = again(1, "--per-node=2")
        out = ended(other)
        assert other.returncode == 1, out
        assert "node 1 was started differently from node 0: per-node (2 here)" in out, out
        third = again(1)
        outs = [ended(first), ended(third)]
        assert first.returncode == third.returncode == 0, outs
        assert re.search(
            r"node 1 \(.*\) was started differently from node 0: per-node \(1 here\)", outs[0]
        ), outs[0]


def test_strangers_and_a_taken_port(tmp_path: Path) -> None:
    with nodes(2, tmp_path, "", "exit=0") as ((first, second), again):
        second.kill()
        port = int(str(first.args).partition("--rendezvous=127.0.0.1:")[2].partition("'")[0])
        deadline = time.monotonic() + 20
        for data in (
            b"GET / HTTP/1.1\r\n\r\n",
            b"[]\n",
            b'{"hello": "mesh_lm"}\n',
            b'{"hello": "mesh_lm", "node": 1, "job": 3}\n',
            b"\xff\n",
            b"",
        ):
            while True:
                try:
                    with socket.create_connection(("127.0.0.1", port)) as stranger:
                        stranger.sendall(data)
                        time.sleep(0.1)
                    break
                except ConnectionRefusedError:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
        late = again(0)
        assert "choose a free port" in ended(late)
        assert late.returncode == 1
        third = again(1)
        outs = [ended(first), ended(third)]
        assert first.returncode == third.returncode == 0, outs
