"""A lock between processes of which several compile for one GPU in parallel and one measures.
Standard library only.

Several processes may hold `compiling()`, and only one `measuring()`. Compiling also uses the GPU
(XLA times matmul kernels), which would distort measurements. While a process waits to measure, no
other starts compiling. Without the variable GPU_LOCK nothing is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import IO

VARIABLE = "GPU_LOCK"
"""Environment variable with a path, from which two file names are made."""

_windows: list[tuple[float, float]] = []
"""Start and end, by time.time(), of the measurements since `last_window`."""


def last_window() -> dict[str, float]:
    """Returns "began" and "ended" of this process's last measurement, and forgets it; empty if
    there was none since the last call."""
    window = dict(zip(("began", "ended"), _windows[-1], strict=True)) if _windows else {}
    _windows.clear()
    return window


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Holds the lock together with others that compile, but not with one that measures."""
    with _files() as (gate, room):
        _lock(gate, fcntl.LOCK_EX)
        _lock(room, fcntl.LOCK_SH)
        _lock(gate, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Holds the lock alone. Must not be used inside `compiling`: that would deadlock."""
    with _files() as (gate, room):
        _lock(gate, fcntl.LOCK_EX)
        _lock(room, fcntl.LOCK_EX)
        start_time = time.time()
        yield
        _windows.append((start_time, time.time()))


@contextlib.contextmanager
def _files() -> Iterator[tuple[IO[bytes] | None, IO[bytes] | None]]:
    """Opens the lock files. Closing them unlocks, and so does the end of the process."""
    path = os.environ.get(VARIABLE)
    if not path:
        yield None, None
        return
    with open(f"{path}.gate", "ab") as gate, open(f"{path}.room", "ab") as room:
        yield gate, room


def _lock(file: IO[bytes] | None, operation: int) -> None:
    if file:
        fcntl.flock(file, operation)
