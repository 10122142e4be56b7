"""One step's trace, as jax.profiler writes it, summed by the kinds of the lab's timeline. Standard
library only."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from record import Row

KINDS: tuple[tuple[str, str], ...] = (
    ("all-reduce", r"all[-_]?reduce"),
    ("all-gather", r"all[-_]?gather"),
    ("reduce-scatter", r"reduce[-_]?scatter"),
    ("all-to-all", r"all[-_]?to[-_]?all"),
    ("collective-permute", r"collective[-_]?permute|nccl\w*sendrecv"),
    ("collective", r"nccl"),
    ("attention", r"attention|sdpa|fmha"),
    ("matmul", r"gemm|nvjet|cublas|cutlass|xmma|splitk|matmul|\bdot\b|_dot\b|\bdot_"),
    ("copy", r"memcpy|memset|copy|transpose"),
)
"""Kind of the lab's timeline -> what the names of its kernels have, or else those of their HLO
operations. The first that matches counts; all others are elementwise."""
ELEMENTWISE = "elementwise"


class Kernel(NamedTuple):
    """A kernel, or a copy, that ran once."""

    name: str
    operation: str
    """The HLO operation that it belongs to; empty where the trace does not say."""
    start: float
    """Microseconds."""
    duration: float

    @property
    def kind(self) -> str:
        """The kind of the lab's timeline that it belongs to."""
        for kind, pattern in KINDS:
            if re.search(pattern, self.name, re.IGNORECASE):
                return kind
        for kind, pattern in KINDS:
            if re.search(pattern, self.operation, re.IGNORECASE):
                return kind
        return ELEMENTWISE


def kernels(directory: Path) -> list[Kernel]:
    """Returns what ran on the device, from the newest trace below a directory; empty if there is
    none.

    On a GPU these are the events of its streams; lines that group them by operation, module or step
    are left out. On a CPU, which has no streams, they are the events that name an HLO operation.
    """
    files = sorted(directory.glob("**/*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not files:
        return []
    with gzip.open(files[-1], "rt") as file:
        events = json.load(file)["traceEvents"]
    processes = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("name") == "process_name"
    }
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event.get("name") == "thread_name"
    }
    ran = [event for event in events if event.get("ph") == "X"]
    on_gpu = [
        event for event in ran
        if "gpu" in processes.get(event["pid"], "").lower() and threads.get((event["pid"], event["tid"]), "").startswith("Stream")
    ]  # fmt: skip
    on_cpu = [event for event in ran if "hlo_op" in event.get("args", {})]
    return [_kernel(event) for event in on_gpu or on_cpu]


def _kernel(event: dict[str, Any]) -> Kernel:
    return Kernel(
        event["name"], event.get("args", {}).get("hlo_op", ""), event["ts"], event.get("dur", 0.0)
    )


def busy_ms(ran: Iterable[Kernel]) -> float:
    """Returns the milliseconds in which at least one kernel runs."""
    total = 0.0
    end = 0.0
    for kernel in sorted(ran, key=lambda kernel: kernel.start):
        total += max(0.0, kernel.start + kernel.duration - max(end, kernel.start))
        end = max(end, kernel.start + kernel.duration)
    return total / 1e3


def by_kind(ran: list[Kernel], predicted: dict[str, Row], step_ms: float) -> Iterator[Row]:
    """Yields a row for each kind, the longest first, beside the lab's prediction, and a row for the
    time in which no kernel runs.

    predicted: kind -> its "ms" and "kernels" in the lab's timeline. step_ms: the step's time
    without the profiler.
    """
    traced: dict[str, list[float]] = {}
    for kernel in ran:
        traced.setdefault(kernel.kind, []).append(kernel.duration / 1e3)
    for kind in sorted({*traced, *predicted}, key=lambda kind: -sum(traced.get(kind, ()))):
        ms = sum(traced.get(kind, ()))
        lab = predicted.get(kind, {})
        row = {"kind": kind, "kernels": len(traced.get(kind, ())), "ms": ms, "share": ms / step_ms}
        ratio = ms / lab["ms"] if lab.get("ms") else None
        yield row | {
            "predicted_kernels": lab.get("kernels"),
            "predicted_ms": lab.get("ms"),
            "ratio": ratio,
        }
    idle = step_ms - busy_ms(ran)
    yield {"kind": "no kernel", "ms": idle, "share": idle / step_ms}


def longest(ran: list[Kernel], n: int = 25) -> list[Row]:
    """Returns a row for each of the n names of kernels that take the most time in all."""
    durations: dict[tuple[str, str], list[float]] = {}
    for kernel in ran:
        durations.setdefault((kernel.name, kernel.kind), []).append(kernel.duration)
    names = sorted(durations, key=lambda key: -sum(durations[key]))[:n]
    return [
        {
            "kernel": name[:100], "kind": kind, "times": len(durations[name, kind]),
            "ms": sum(durations[name, kind]) / 1e3,
            "longest_us": max(durations[name, kind]),
        }
        for name, kind in names
    ]  # fmt: skip
