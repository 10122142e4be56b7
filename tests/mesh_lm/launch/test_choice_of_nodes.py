"""Which nodes compute, and where, without launchers: reports of their checks, and nodes whose workers fail."""

from typing import Any

import pytest

from mesh_lm.launch.job import Job
from mesh_lm.launch.nodes import Node, Nodes


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
    said = capsys.readouterr().err
    assert said.count("node 2 (host2) is unhealthy, and is left out: nvidia-smi lists 7 GPUs, but 8 on most nodes: reboot") == 1
    nodes.check(2)
    report(nodes, 2, gpus=8)
    assert nodes.healthy() == [0, 1, 2] and "node 2 (host2) is healthy again" in capsys.readouterr().err
    for number in range(3):
        report(nodes, number)
    assert nodes.healthy() == [0, 1, 2], "no node says how many it has"
