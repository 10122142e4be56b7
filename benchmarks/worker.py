"""Reporting and timing that gpu_worker.py, attention_worker.py and torch_peers.py share. It does not import JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

NOT_NEEDED = ("grain", "tyro", "tokenizers", "tensorboardX", "matplotlib", "torch", "tensorflow")
"""Packages that a bare GPU machine may lack. (rich comes with flax.)"""
ROUNDS = 5
SAMPLE = 0.04
"""Approximate seconds that the calls of one sample take."""


def emit(**row: Any) -> None:
    print("ROW", json.dumps(row), flush=True)


@contextlib.contextmanager
def reported(**variant: Any) -> Iterator[None]:
    """Turns an exception into a row with an "error", so that the other variants still run."""
    try:
        yield
    except Exception as error:
        emit(**variant, error=f"{type(error).__name__}: {error}"[:600])


def serve(tasks: dict[str, Callable[..., None]], may: tuple[str, ...] = ()) -> None:
    """Runs the task of the command line. may: packages of NOT_NEEDED that this worker does need."""
    tasks[sys.argv[1]](**json.loads(sys.argv[2]))
    print("MODULES", json.dumps([name for name in NOT_NEEDED if name in sys.modules and name not in may]), flush=True)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds per call, one for each sample."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median. A smaller difference is noise."""
        return (max(self.samples) - min(self.samples)) / self.median


def rounds(calls: Mapping[Any, Callable[[], Any]], repeats: int = 0, wait: Callable[[Any], Any] | None = None) -> dict[Any, Times]:
    """Returns the seconds per call of each, by name. They take turns, so that temperature and clocks are the same for all.

    A sample queues many calls at once, to hide the host's time. repeats: calls in a sample; 0: 10 to 200, about SAMPLE s.
    wait: waits for a call's result; default: jax.block_until_ready.
    """
    if wait is None:
        import jax

        wait = jax.block_until_ready

    def sample(call: Callable[[], Any], n: int) -> float:
        before = time.perf_counter()
        for _ in range(n):
            out = call()
        wait(out)
        return (time.perf_counter() - before) / n

    first = {name: min(sample(call, 1), sample(call, 2)) for name, call in calls.items()}
    counts = {name: repeats or min(200, max(10, math.ceil(SAMPLE / seconds))) for name, seconds in first.items()}
    found = [{name: sample(call, counts[name]) for name, call in calls.items()} for _ in range(2 if repeats == 1 else ROUNDS)]
    return {name: Times(tuple(one[name] for one in found)) for name in calls}
