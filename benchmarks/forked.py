"""Processes of a dry run, forked from one that has imported JAX and torch: a rehearsal starts
thirty, and each import takes seconds.

On a GPU nothing is forked. A process may be forked only while JAX has no backend.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from record import ROOT
from worker import NOT_NEEDED, PRELOADED

MODULES = (
    "jax", "jax.numpy", "flax", "optax", "mesh_lm.checkpoint", "mesh_lm.training.step",
    "mesh_lm.planning.program",
    "pallas_kernels.attention.hopper", "pallas_kernels.grouped.hopper",
    "pallas_kernels.stacked.hopper", "pallas_kernels.dev.interpreter",
    "torch", "torch._dynamo",
)  # fmt: skip
"""Imported once, if they are installed."""


def preload(caches: Path) -> None:
    """Imports MODULES, with JAX's settings of a dry run. caches: the directory of its compilation
    cache."""
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(caches / "dry-run"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none",
    }
    outside = {name: os.environ.get(name) for name in settings}
    os.environ |= settings  # JAX reads them when it is imported
    for name in MODULES:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    # Variables that the imports have set stay: Mosaic finds its runtime by one.
    for name, value in outside.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    os.environ[PRELOADED] = ",".join(name for name in NOT_NEEDED if name in sys.modules)


class Forked:
    """A forked process, with what is used here of subprocess.Popen."""

    def __init__(
        self,
        run: Callable[[], int | None],
        *,
        stdin: int,
        stdout: int | IO[str],
        stderr: IO[str],
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> None:
        """run: what the process does; it returns the exit status. stdin and stdout: PIPE or DEVNULL
        of subprocess, or a file."""
        self.returncode: int | None = None
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        child_stdin, parent_stdin = (
            os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), -1)
        )
        parent_stdout, child_stdout = (
            os.pipe() if stdout == subprocess.PIPE else (-1, os.dup(_number(stdout)))
        )
        self.pid = os.fork()
        if not self.pid:
            _become(run, (child_stdin, child_stdout, stderr.fileno()), env, start_new_session)
        os.close(child_stdin)
        os.close(child_stdout)
        if parent_stdin >= 0:
            self.stdin = os.fdopen(parent_stdin, "wb")
        if parent_stdout >= 0:
            self.stdout = os.fdopen(parent_stdout, "rb", buffering=0)

    def poll(self) -> int | None:
        """Returns the exit status, as Popen.poll does; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = self.pid, 0
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status. Raises subprocess.TimeoutExpired."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
            time.sleep(0.005)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


def _number(stdout: int | IO[str]) -> int:
    return stdout if isinstance(stdout, int) else stdout.fileno()


def _become(
    run: Callable[[], int | None],
    streams: tuple[int, ...],
    env: Mapping[str, str] | None,
    new_session: bool,
) -> None:
    """Runs in the new process, and ends it."""
    status = 1
    try:
        if new_session:
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, 1024)
        # New objects, because a thread of the parent may hold the locks of the old ones.
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False, encoding="utf-8")  # noqa: SIM115
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        status = run() or 0
        sys.stdout.flush()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def script(path: str, *words: str) -> None:
    """Runs a Python file as a program, in this process and in the root of the repository; after
    "-m" a module."""
    os.chdir(ROOT)
    if path == "-m":
        sys.argv = [*words]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [path, *words]
        runpy.run_path(path, run_name="__main__")
    sys.stdout.flush()
