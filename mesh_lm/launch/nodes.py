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
    """The number of the check that it was last told to do; 0: none."""
    asked: float = -math.inf
    """When that was (time.monotonic)."""
    answered: bool = True
    """Whether it has reported that check."""
    failed: str = ""
    """The checks that it failed."""
    gpus: int | None = None
    """How many GPUs it found; None: it did not say."""
    wrong: str = ""
    """Why it is unhealthy; empty: it is not, as far as is known."""
    port: int = 0
    """A port that was free on it then."""

    @property
    def pending(self) -> bool:
        """Whether its report is still awaited."""
        return not self.answered and time.monotonic() - self.asked < _ANSWER


class Nodes(dict[int, Node]):
    """The connected nodes by their numbers, and the order in which they compute."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job
        self._checks = 0
        self._places: list[int] = []
        self._reported: dict[int, str] = {}

    # Health checks.

    def check(self, number: int) -> None:
        """Tells a node to check its health."""
        if self._job.health != "off":
            node, self._checks = self[number], self._checks + 1
            node.check, node.asked, node.answered = self._checks, time.monotonic(), False
            node.peer.send(check=node.check)

    def check_all(self) -> None:
        """Tells all nodes to check their health."""
        for number in self:
            self.check(number)

    def check_unhealthy(self, busy: Collection[int]) -> None:
        """Checks the unhealthy nodes again, now and then. busy: nodes whose workers run."""
        due = [
            n
            for n, node in self.items()
            if node.wrong and not node.pending and time.monotonic() - node.asked > _AGAIN
        ]
        for number in due:
            if number not in busy:
                self.check(number)

    def take(self, number: int, message: dict[str, Any]) -> None:
        """Handles a report of a node's checks, and logs what has changed. A report of an earlier
        check is ignored.
        """
        node = self[number]
        if message["checked"] != node.check:
            return
        node.answered, node.port = True, message.get("port", 0)
        found = [
            f"{each['check']}: {each['text']}"
            for each in message.get("findings", ())
            if each["outcome"] == "failed"
        ]
        node.failed, node.gpus = "; ".join(found[:_SHOWN]), message.get("gpus")
        self._compare()

    def _compare(self) -> None:
        """Sets which nodes are unhealthy, and logs what has changed. A node also is if it has fewer
        GPUs than most: one is lost.
        """
        counts = Counter(node.gpus for node in self.values() if node.gpus is not None)
        usual = max(counts, key=lambda gpus: (counts[gpus], gpus), default=0)
        for number, node in [
            (number, node) for number, node in sorted(self.items()) if node.answered
        ]:
            node.wrong = node.failed
            if not node.wrong and node.gpus is not None and node.gpus < usual:
                node.wrong = (
                    f"nvidia-smi lists {node.gpus} GPUs, but {usual} on most nodes: reboot the "
                    "node, or replace the missing GPU"
                )
            before, self._reported[number] = self._reported.get(number, ""), node.wrong
            if node.wrong and node.wrong != before:
                log(f"node {number} ({node.host}) is unhealthy, and is left out: {node.wrong}")
            elif before and not node.wrong:
                log(f"node {number} ({node.host}) is healthy again")

    @property
    def pending(self) -> bool:
        """Whether the report of a node that may be healthy is still awaited."""
        return any(node.pending and not node.wrong for node in self.values())

    def healthy(self) -> list[int]:
        """Returns the nodes that can compute."""
        return [
            number for number, node in sorted(self.items()) if not node.wrong and not node.pending
        ]

    # Which nodes compute, and where.

    def place(
        self,
        usable: Sequence[int],
        count: int,
        failing: Callable[[int], bool] = lambda number: False,
    ) -> list[int]:
        """Returns `count` of the usable nodes in the order of their processes. Nodes keep their
        places, and spares take free ones.

        usable: the best first. failing: whether a node is used, and keeps its place, only if no
        other is left.
        """
        before = self._places
        place = {number: place for place, number in enumerate(before)}
        chosen = sorted(
            usable, key=lambda number: (failing(number), place.get(number, len(before)))
        )[:count]
        kept = [number for number in before if number in chosen]
        new = [number for number in chosen if number not in kept]
        self._places = sorted(chosen)
        if len(before) == count:
            spares = iter(new)
            self._places = [number if number in kept else next(spares) for number in before]
            for old, number in zip(before, self._places, strict=True):
                if number != old:
                    log(f"node {number} ({self[number].host}) takes the place of node {old}")
        # usually the first already
        if known := [number for number in self._places if self._can_coordinate(number)]:
            at = self._places.index(known[0])
            self._places[0], self._places[at] = self._places[at], self._places[0]
        if self._job.spares and (
            idle := [number for number in usable if number not in self._places]
        ):
            log(
                f"{number_ranges(idle, 'node', 'nodes')} "
                f"{'stands' if len(idle) == 1 else 'stand'} by"
            )
        return [*self._places]

    def _can_coordinate(self, number: int) -> bool:
        """Whether a free port of a node is known: it has reported its checks, or this is its
        launcher.
        """
        return number == 0 or self[number].port > 0

    def coordinator(self) -> str:
        """Returns host:port for process 0, on the first node that computes."""
        first = self._places[0]
        host = self._job.address[0] if first == 0 else self[first].peer.address
        port = self[first].port if first else free_port(LOOPBACK if self._job.nodes == 1 else "")
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    # For the log.

    def absent(self) -> str:
        """Returns the nodes that are not connected, such as "nodes 1-3"; empty: all are."""
        away = [number for number in range(self._job.nodes) if number not in self]
        return number_ranges(away, "node", "nodes") if away else ""

    def unhealthy(self) -> list[str]:
        """Returns a phrase for each unhealthy node."""
        return [
            f"node {number} ({node.host}) is unhealthy ({node.wrong})"
            for number, node in sorted(self.items())
            if node.wrong
        ]
