"""The choice of the nodes that compute, without launchers: reports of their checks, and nodes whose
workers fail."""

from typing import Any

import pytest

from mesh_lm.launch.job import Job
from mesh_lm.launch.nodes import Node, Nodes
from mesh_lm.launch.restarts import Restarts


class Peer:
    """Stands in for a connection."""

    address = "10.0.0.9"

    def send(self, **message: Any) -> None:
        pass


def connected(count: int, **job: Any) -> Nodes:
    nodes = Nodes(Job(("train.py",), nodes=count, **job))
    for number in range(count):
        nodes[number] = Node(Peer(), f"host{number}", "life")  # type: ignore
        nodes.check(number)
    return nodes


def report(nodes: Nodes, number: int, **message: Any) -> None:
    nodes.take(number, {"checked": nodes[number].check, "port": 5000 + number, **message})


def test_a_node_with_fewer_gpus_than_most_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Its launcher may have started after the GPU was lost, so that it does not miss it."""
    nodes = connected(3)
    for number, gpus in ((2, 7), (0, 8), (1, 8)):
        report(nodes, number, gpus=gpus)
    assert nodes.healthy() == [0, 1]
    log = capsys.readouterr().err
    assert (
        log.count(
            "node 2 (host2) is unhealthy, and is left out: nvidia-smi lists 7 GPUs, but 8 on most "
            "nodes: reboot"
        )
        == 1
    )
    nodes.check(2)
    report(nodes, 2, gpus=8)
    assert nodes.healthy() == [0, 1, 2]
    assert "node 2 (host2) is healthy again" in capsys.readouterr().err
    for number in range(3):
        report(nodes, number)
    assert nodes.healthy() == [0, 1, 2], "no node says how many it has"


def test_spares_replace_nodes_that_fail_repeatedly_as_far_as_they_go() -> None:
    nodes = connected(5, spares=1, restarts=10)
    for number in range(5):
        report(nodes, number)
    assert nodes.place(nodes.healthy(), 4) == [0, 1, 2, 3]
    restarts = Restarts(nodes._job)
    for culprit in (2, 2, 3, 3):
        restarts.after_failure(culprit)
    assert nodes.place(restarts.usable(nodes.healthy()), 4, restarts.failing) == [0, 1, 2, 4], (
        "two fail, and there is one spare"
    )
    assert nodes.place(nodes.healthy(), 4) == [0, 1, 2, 4], "the other nodes keep their places"


def test_the_coordinator_is_a_node_whose_port_is_known() -> None:
    """A node that never reported its checks is not left out, but cannot have process 0."""
    nodes = connected(4, spares=1)
    report(nodes, 0, findings=[{"check": "output", "outcome": "failed", "text": "broken"}])
    nodes[1].answered = True
    report(nodes, 2)
    report(nodes, 3)
    assert nodes.place(nodes.healthy(), 3) == [2, 1, 3]
    assert nodes.coordinator() == "10.0.0.9:5002"
