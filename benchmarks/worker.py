"""Reporting and timing that gpu_worker.py, attention_worker.py and torch_peers.py share. It does
not import JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpu_lock import last_window, measuring

NOT_NEEDED = ("grain", "tyro", "tokenizers", "tensorboardX", "matplotlib", "torch", "tensorflow")
"""Packages that a bare GPU machine may lack. (rich comes with flax.)"""
PRELOADED = "PRELOADED"
"""Environment variable with those of NOT_NEEDED, separated by commas, that a dry run imports for
all processes."""
ROUNDS = 5
SAMPLE = 0.04
"""Approximate seconds that the calls of one sample take."""
WARM = "GPU_WARM"
"""Environment variable with the seconds of calls before the first sample of a process (default: 1;
a dry run sets 0). Until then the clocks and the power of an idle GPU are still changing."""
_warm_until: list[float] = []
"""When the warm-up of this process ends or has ended, by time.monotonic()."""


def emit(**row: Any) -> None:
    """Prints a row. One that was measured also has the start and the end of the measurement, and
    the host's load average then."""
    window = {**last_window(), **{name: row[name] for name in ("began", "ended") if name in row}}
    if window and "error" not in row:
        row |= {**window, "host_load": os.getloadavg()[0]}
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
    allowed_modules = (*may, *os.environ.get(PRELOADED, "").split(","))
    print(
        "MODULES",
        json.dumps(
            [name for name in NOT_NEEDED if name in sys.modules and name not in allowed_modules]
        ),
        flush=True,
    )


def serve_turns(
    shown: dict[str, Any],
    step: Callable[[], float],
    seconds: float,
    facts: dict[str, Any],
    losses: list[float],
) -> None:
    """Makes a turn of steps for each line "turn" on the standard input, until a line "next", so
    that two processes can take turns.

    shown: the columns that name the variant. step: makes a step and returns its seconds. seconds:
    of a turn, whose first step is not timed (0: one timed step). facts: columns of the first row,
    which says that the step is compiled and warm. losses: those of all steps so far.
    """
    warm_until = time.monotonic() + float(os.environ.get(WARM, "1"))
    step()
    while time.monotonic() < warm_until:
        step()
    emit(**shown, **facts, loss_first=losses[0])
    for line in sys.stdin:
        if line.strip() != "turn":
            return
        with measuring():
            step()
            times = [step()]
            ends = time.monotonic() + seconds - times[0]
            while time.monotonic() < ends:
                times.append(step())
        emit(
            **shown,
            steps=len(times),
            step_ms=1e3 * statistics.median(times),
            slowest_ms=1e3 * max(times),
            loss_last=losses[-1],
        )


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


def rounds(
    calls: Mapping[Any, Callable[[], Any]],
    repeats: int = 0,
    wait: Callable[[Any], Any] | None = None,
) -> dict[Any, Times]:
    """Returns the seconds per call of each, by name. They take turns, so that temperature and
    clocks are the same for all.

    The turns of a round are in random order, so that none is always measured after the same other
    one.

    A sample queues many calls at once, to hide the host's time. repeats: calls in a sample; 0: 10
    to 200, about SAMPLE s. wait: waits for a call's result; default: jax.block_until_ready.
    """
    if wait is None:
        import jax

        wait = jax.block_until_ready

    def sample(call: Callable[[], Any], n: int) -> float:
        start_time = time.perf_counter()
        for _ in range(n):
            out = call()
        wait(out)
        return (time.perf_counter() - start_time) / n

    first = {name: min(sample(call, 1), sample(call, 2)) for name, call in calls.items()}
    counts = {
        name: repeats or min(200, max(10, math.ceil(SAMPLE / seconds)))
        for name, seconds in first.items()
    }
    if not _warm_until:
        _warm_until.append(time.monotonic() + float(os.environ.get(WARM, "1")))
    while time.monotonic() < _warm_until[0]:
        for name, call in calls.items():
            sample(call, counts[name])
    order = random.Random(0)
    samples: dict[Any, list[float]] = {name: [] for name in calls}
    for _ in range(2 if repeats == 1 else ROUNDS):
        for name in order.sample([*calls], len(calls)):
            samples[name].append(sample(calls[name], counts[name]))
    return {name: Times(tuple(seconds)) for name, seconds in samples.items()}


def sustained(call: Callable[[], Any], seconds: float) -> Times:
    """Returns the times of one call, from calls queued for about `seconds` in all. A burst would be
    faster than the GPU sustains."""
    with measuring():
        single_call = rounds({"": call}, 1)[""].median
        return rounds({"": call}, max(2, math.ceil(seconds / ROUNDS / single_call)))[""]
