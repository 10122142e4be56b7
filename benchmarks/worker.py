"""How a task of a GPU suite reports, and how it times: what gpu_worker.py, attention_worker.py and torch_peers.py share. No JAX here."""

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
"""What a bare GPU machine may lack. (rich comes with flax.)"""
ROUNDS = 5
SAMPLE = 0.04
"""Seconds that the calls of one sample take, about."""


def emit(**row: Any) -> None:
    print("ROW", json.dumps(row), flush=True)


@contextlib.contextmanager
def reported(**variant: Any) -> Iterator[None]:
    """An exception becomes a row with an "error", so that the other variants still run."""
    try:
        yield
    except Exception as error:
        emit(**variant, error=f"{type(error).__name__}: {error}"[:600])


def serve(tasks: dict[str, Callable[..., None]], may: tuple[str, ...] = ()) -> None:
    """Does what the command line says. may: packages of NOT_NEEDED that this worker is about."""
    tasks[sys.argv[1]](**json.loads(sys.argv[2]))
    print("MODULES", json.dumps([name for name in NOT_NEEDED if name in sys.modules and name not in may]), flush=True)


@dataclasses.dataclass(frozen=True)
class Times:
    """Seconds a call, one of each sample."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median: what a difference must exceed to be one."""
        return (max(self.samples) - min(self.samples)) / self.median


def rounds(calls: Mapping[Any, Callable[[], Any]], repeats: int = 0, wait: Callable[[Any], Any] | None = None) -> dict[Any, Times]:
    """Seconds of one call of each, by name. They take turns, so that heat and clocks are the same for all.

    A sample is many calls queued at once, so that the host's part is hidden. repeats: calls in a sample; 0: 10 to 200, about SAMPLE s.
    wait: for a call's result; default: jax.block_until_ready.
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
