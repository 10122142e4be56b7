"""The nodes of a run as the controller sees them: which are connected, which passed their health
checks, and which compute.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from mesh_lm.errors import number_ranges
from mesh_lm.launch.generation import log
from mesh_lm.launch.job import Job
from mesh_lm.network.wire import LOOPBACK, Peer, free_port

_ANSWER = 90.0
"""Seconds within which an agent must report its checks, which have a time limit of their own. A
node without an answer is not left out."""
_AGAIN = 10.0
"""Seconds between two checks of an unhealthy node: it takes part again when it was repaired."""
_SHOWN = 8
"""Failed checks of a node that are shown."""


@dataclasses.dataclass
class Node:
    """A node whose agent is connected."""

    peer: Peer
    host: str
    life: str
    """A random text of its launcher, which stays when that reconnects."""
    check: int = 0
    """The number of its last check; 0: none."""
    checked_at: float = -math.inf
    """The time at which that was ordered (time.monotonic)."""
    answered: bool = True
    """Whether it has reported that check."""
    failed: str = ""
    """The checks that it failed."""
    gpus: int | None = None
    """The number of its GPUs; None: it did not report any."""
    unhealthy_reason: str = ""
    """Why it is unhealthy; empty: it is not, as far as is known."""
    port: int = 0
    """A port that was free on it at the last check."""

    @property
    def pending(self) -> bool:
        """Whether its report is still awaited."""
        return not self.answered and time.monotonic() - self.checked_at < _ANSWER


class Nodes(dict[int, Node]):
    """The connected nodes by their numbers, and the order in which they compute."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._n_checks = 0
        self._compute_nodes: list[
            int
        ] = []  # the nodes that compute, in the order of their processes
        self._logged: dict[int, str] = {}  # node -> its last `unhealthy_reason` in the log

    # Health checks.

    def check(self, number: int) -> None:
        """Tells a node to check its health."""
        if self._job.health == "off":
            return
        self._n_checks += 1
        node = self[number]
        node.check = self._n_checks
        node.checked_at = time.monotonic()
        node.answered = False
        node.peer.send(check=node.check)

    def check_all(self) -> None:
        """Tells all nodes to check their health."""
        for number in self:
            self.check(number)

    def check_unhealthy(self, busy: Collection[int]) -> None:
        """Checks the unhealthy nodes again, now and then. busy: nodes whose workers run."""
        for number, node in self.items():
            if number in busy or not node.unhealthy_reason or node.pending:
                continue
            if time.monotonic() - node.checked_at > _AGAIN:
                self.check(number)

    def take(self, number: int, message: dict[str, Any]) -> None:
        """Handles a report of a node's checks, and logs what has changed.

        A report of an earlier check is ignored.
        """
        node = self[number]
        if message["checked"] != node.check:
            return
        failed = [
            f"{finding['check']}: {finding['text']}"
            for finding in message.get("findings", ())
            if finding["outcome"] == "failed"
        ]
        node.answered = True
        node.port = message.get("port", 0)
        node.failed = "; ".join(failed[:_SHOWN])
        node.gpus = message.get("gpus")
        self._update_health()

    def _update_health(self) -> None:
        """Sets which nodes are unhealthy, and logs what has changed."""
        numbers_of_gpus = Counter(node.gpus for node in self.values() if node.gpus is not None)
        usual = max(numbers_of_gpus, key=lambda n: (numbers_of_gpus[n], n), default=0)
        for number, node in sorted(self.items()):
            if not node.answered:
                continue
            node.unhealthy_reason = node.failed
            # A node that has fewer GPUs than most has lost one, perhaps before its launcher
            # started, so that its own checks do not miss it.
            if not node.failed and node.gpus is not None and node.gpus < usual:
                node.unhealthy_reason = (
                    f"nvidia-smi lists {node.gpus} GPUs, but {usual} on most nodes: reboot the "
                    "node, or replace the missing GPU"
                )
            self._log_health(number, node)

    def _log_health(self, number: int, node: Node) -> None:
        logged = self._logged.get(number, "")
        self._logged[number] = node.unhealthy_reason
        if node.unhealthy_reason and node.unhealthy_reason != logged:
            log(
                f"node {number} ({node.host}) is unhealthy, and is left out: "
                f"{node.unhealthy_reason}"
            )
        elif logged and not node.unhealthy_reason:
            log(f"node {number} ({node.host}) is healthy again")

    @property
    def pending(self) -> bool:
        """Whether the report of a node that may be healthy is still awaited."""
        return any(node.pending and not node.unhealthy_reason for node in self.values())

    def healthy(self) -> list[int]:
        """Returns the nodes that can compute."""
        return [
            number
            for number, node in sorted(self.items())
            if not node.unhealthy_reason and not node.pending
        ]

    # Which nodes compute, and where.

    def place(
        self,
        usable: Sequence[int],
        n_members: int,
        failing: Callable[[int], bool] = lambda number: False,
    ) -> list[int]:
        """Returns the nodes that compute, in the order of their processes.

        Nodes keep their places, and spares take free ones.

        usable: the best first. failing: whether a node is used, and keeps its place, only if no
        other is left.
        """
        old_nodes = self._compute_nodes
        old_position = {number: position for position, number in enumerate(old_nodes)}

        def preference(number: int) -> tuple[bool, int]:
            return failing(number), old_position.get(number, len(old_nodes))

        members = sorted(usable, key=preference)[:n_members]
        if len(old_nodes) == n_members:
            self._compute_nodes = self._replace_missing(old_nodes, members)
        else:
            self._compute_nodes = sorted(members)
        self._put_coordinator_first()
        if self._job.spares:
            idle = [number for number in usable if number not in self._compute_nodes]
            if idle:
                stand = "stands" if len(idle) == 1 else "stand"
                log(f"{number_ranges(idle, 'node', 'nodes')} {stand} by")
        return [*self._compute_nodes]

    def _replace_missing(self, old_nodes: list[int], members: list[int]) -> list[int]:
        """Returns the nodes with new members instead of those that are missing."""
        newcomers = iter([number for number in members if number not in old_nodes])
        compute_nodes = []
        for old in old_nodes:
            if old in members:
                compute_nodes.append(old)
                continue
            number = next(newcomers)
            log(f"node {number} ({self[number].host}) takes the place of node {old}")
            compute_nodes.append(number)
        return compute_nodes

    def _put_coordinator_first(self) -> None:
        """Gives process 0 to a node of which a free port is known; usually it is the first already.

        That is a node that has reported its checks, or node 0, whose launcher this is.
        """
        for position, number in enumerate(self._compute_nodes):
            if number == 0 or self[number].port > 0:
                self._compute_nodes[position] = self._compute_nodes[0]
                self._compute_nodes[0] = number
                return

    def coordinator(self) -> str:
        """Returns host:port for process 0, on the first node that computes."""
        first = self._compute_nodes[0]
        if first == 0:
            host = self._job.address[0]
            port = free_port(LOOPBACK if self._job.nodes == 1 else "")
        else:
            host = self[first].peer.address
            port = self[first].port
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    # For the log.

    def absent(self) -> str:
        """Returns the nodes that are not connected, such as "nodes 1-3"; empty: all are."""
        numbers = [number for number in range(self._job.nodes) if number not in self]
        return number_ranges(numbers, "node", "nodes") if numbers else ""

    def unhealthy(self) -> list[str]:
        """Returns a phrase for each unhealthy node."""
        return [
            f"node {number} ({node.host}) is unhealthy ({node.unhealthy_reason})"
            for number, node in sorted(self.items())
            if node.unhealthy_reason
        ]
