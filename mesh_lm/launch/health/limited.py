"""Runs a program within a limited time, even one that hangs in the kernel, which SIGKILL does not
end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from mesh_lm.launch.worker import tied

_KILLED = 2.0
"""Seconds to wait for a program that got SIGKILL."""


def run(
    command: Sequence[str], environment: Mapping[str, str], limit: float
) -> tuple[int | None, str]:
    """Returns (status, output) of a command.

    The status is None if it did not end within `limit` seconds, and was killed.
    """
    # A file, because a pipe would have to be waited for as long as any process keeps it open.
    with _temporary_file() as output:
        process = subprocess.Popen(
            tied(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILLED)
        # pread leaves the position alone, which the program shares as long as it lives.
        size = os.fstat(output.fileno()).st_size
        return status, os.pread(output.fileno(), size, 0).decode(errors="replace")


def _temporary_file() -> IO[bytes]:
    """Returns a file in memory where the system has them: a full disk would lose the output."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("output"), "w+b")
    return tempfile.TemporaryFile()
