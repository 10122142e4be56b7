"""The program of a self-test's process: python -m pallas_kernels.trust.self_test KIND.

KIND is JSON, {"family": ..., "facts": ...}. The program prints its phases and its verdict for the
parent (`trial.py`), and exits with status 0 if it has a verdict.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.trust.kind import Kind, Verdict
from pallas_kernels.trust.trial import MARK

FAMILIES = {
    "attention": "pallas_kernels.attention.self_test",
    "grouped_matmul": "pallas_kernels.grouped.self_test",
    "stacked_matmul": "pallas_kernels.stacked.self_test",
}
"""Name of a family -> a module with `faults(facts, say)`, which calls say("ready") and
say("compiled") and returns a list of faults."""
Check = Callable[[dict[str, Any], Callable[[str], None]], list[str]]


def say(**line: str) -> None:
    """Prints a line for the parent."""
    print(MARK + json.dumps(line), flush=True)


def judge(kind: Kind, check: Check | None = None) -> Verdict:
    """Runs the check of a kind, by default its family's.

    An exception is a failure, unless the GPU had too little memory, or the check was not ready.
    """
    ready = False

    def phase(name: str) -> None:
        nonlocal ready
        ready = True
        say(phase=name)

    try:
        if check is None:
            if jax.default_backend() != "gpu":
                raise RuntimeError(
                    f"JAX uses the platform {jax.default_backend()} in a process of its own, not a "
                    "GPU"
                )
            faults = importlib.import_module(FAMILIES[kind.family]).faults(kind.values, phase)
        else:
            faults = check(kind.values, phase)
    except Exception as error:
        traceback.print_exc()
        first_line = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
        out_of_memory = "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()
        if out_of_memory or not ready:
            return Verdict("untested", f"its self-test could not be run: {first_line}")
        return Verdict("failed", first_line)
    if faults:
        return Verdict("failed", "; ".join(faults))
    return Verdict("passed", "it agrees with XLA, and repeatedly")


def end_with(parent: int) -> None:
    """Ends this process when its parent has ended.

    Otherwise a kernel that hangs would hold the GPU of a run that was killed.
    """
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def main(argument: str, check: Check | None = None) -> None:
    """Judges the kind that `argument` describes, and prints the verdict."""
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    verdict = judge(Kind(**json.loads(argument)), check)
    say(status=verdict.status, reason=verdict.reason)


if __name__ == "__main__":
    main(sys.argv[1])
