"""Whether to try again after a failure, how long to wait before that, and which nodes to leave
out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mesh_lm.launch.job import Job

_LONGEST_PAUSE = 60.0


class Restarts:
    """Counts the restarts in a row that brought no new checkpoint, and the nodes whose workers
    failed first.

    Attributes:
      newest: step of the newest checkpoint, as process 0 reports it; -1: none. It falls when a run
        rolls back.
      futile: restarts in a row that brought no new checkpoint.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.newest = -1
        self.futile = 0
        self._newest_at_failure = -1  # `newest` at the last failure
        # node -> how often its workers failed first since the last new checkpoint
        self._failures = Counter[int]()

    def after_failure(self, culprit: int | None) -> float | None:
        """Returns the seconds to wait before the next attempt, or None to give up.

        culprit: the node whose worker failed first.
        """
        if self.newest != self._newest_at_failure:
            self._newest_at_failure = self.newest
            self.futile = 0
            self._failures.clear()
        if culprit is not None:
            self._failures[culprit] += 1
        if self.futile >= self._job.restarts:
            return None
        # The first restart is immediate; the pauses before the others double.
        pause = min(_LONGEST_PAUSE, 2.0 ** (self.futile - 1)) if self.futile else 0.0
        self.futile += 1
        return pause

    def failing(self, number: int) -> bool:
        """Whether a node's workers failed first repeatedly. Node 0, the controller's, never is."""
        return number > 0 and self._failures[number] > 1

    def usable(self, nodes: Iterable[int]) -> list[int]:
        """The nodes that may compute, the best first.

        Nodes that fail repeatedly are left out if the others are enough.
        """
        reliable = [number for number in sorted(nodes) if not self.failing(number)]
        failing = [number for number in sorted(nodes) if self.failing(number)]
        return reliable if len(reliable) >= self._job.least else reliable + failing
