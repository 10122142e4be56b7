"""Several processes compile for one GPU at once, and one of them measures: the lock between them. Standard library only.

`compiling()` may be held by many, `measuring()` by one, alone. A compiler also runs on the GPU (XLA tries matmul kernels), so a figure
that was taken beside one is wrong. Who waits to measure lets no new compiler in. Without the variable GPU_LOCK nothing is locked.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from typing import IO

VARIABLE = "GPU_LOCK"
"""Of the environment: a path, of which two files are made."""


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Beside others that compile, not beside one that measures."""
    with _files() as (gate, room):
        _lock(gate, fcntl.LOCK_EX)
        _lock(room, fcntl.LOCK_SH)
        _lock(gate, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def measuring() -> Iterator[None]:
    """Alone. Not inside `compiling`: it would wait for itself."""
    with _files() as (gate, room):
        _lock(gate, fcntl.LOCK_EX)
        _lock(room, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _files() -> Iterator[tuple[IO[bytes] | None, IO[bytes] | None]]:
    """Closing them unlocks; so does the end of the process, however it ends."""
    path = os.environ.get(VARIABLE)
    if not path:
        yield None, None
        return
    with open(f"{path}.gate", "ab") as gate, open(f"{path}.room", "ab") as room:
        yield gate, room


def _lock(file: IO[bytes] | None, how: int) -> None:
    if file:
        fcntl.flock(file, how)
