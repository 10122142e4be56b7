"""Subprocesses of tests, and how long a test waits for them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]

PATIENCE = 300.0
"""Seconds after which a process counts as hung: many times what it needs, because a slow machine is
not an error."""


def environment(**more: str) -> dict[str, str]:
    """The environment for a process with its own devices: without the device count of this test
    process."""
    flags = " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
    return os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"} | more


def bare(**more: str) -> dict[str, str]:
    """What a user's shell has: nothing that tests/conftest.py, or who runs the tests, says to JAX,
    XLA and this project."""
    ours = ("JAX_", "XLA_", "MESH_LM_", "PYTEST_")
    return (
        {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        | {"PYTHONPATH": str(ROOT)}
        | more
    )


def ended(process: subprocess.Popen[str]) -> str:
    """All that it printed. Raises AssertionError, and kills it, where it does not end."""
    try:
        return process.communicate(timeout=PATIENCE)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"hung for {PATIENCE:g} s: {process.communicate()[0]}") from None


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Returns when the condition holds. Raises AssertionError, and kills the process, where it ends
    or hangs before that."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"ended or hung: {process.communicate()[0]}")
        time.sleep(0.02)
