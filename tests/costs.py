"""What each test costs beside its seconds: traces, lowerings, XLA compiles, processor time and
processes.

The counts travel with the test's report to the JUnit file, from which benchmarks/test_costs.py
makes tests/seconds.json and a table.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from typing import Any

import jax
import pytest

EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traces",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowerings",
    "/jax/core/compile/backend_compile_duration": "compiles",
}
"""JAX's monitoring events -> our counts. A program read from the cache on disk is a compile too, of
few seconds."""
COUNTS = ("traces", "lowerings", "trace_s", "compiles", "compile_s", "processes", "cpu_s")
"""Of a test with its fixtures. trace_s: seconds of traces and lowerings. compile_s: seconds in XLA.
processes: those that it started itself. cpu_s: of this process and of those that ended and were
waited for."""

_totals: Counter[str] = Counter()


def _on_event(event: str, seconds: float, **_: Any) -> None:
    count = EVENTS.get(event)
    if count is None:
        return
    _totals[count] += 1
    _totals["compile_s" if count == "compiles" else "trace_s"] += seconds


def _on_audit(event: str, _: Any) -> None:
    if event in ("subprocess.Popen", "os.posix_spawn", "os.fork"):
        _totals["processes"] += 1


def cpu_seconds() -> float:
    """Returns the processor seconds of this process so far, with those of its children that have
    ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class Recorder:
    """A pytest plugin that attaches COUNTS to each test's last report."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}
        jax.monitoring.register_event_duration_secs_listener(_on_event)
        sys.addaudithook(_on_audit)

    def _now(self) -> dict[str, float]:
        return {**_totals, "cpu_s": cpu_seconds()}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        self._before = self._now()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when != "teardown":
            return
        now = self._now()
        for name in COUNTS:
            spent = now.get(name, 0) - self._before.get(name, 0)
            if spent:
                item.user_properties.append((name, round(spent, 3)))
