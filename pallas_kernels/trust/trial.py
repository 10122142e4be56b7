"""The process that runs a self-test: started, watched, and ended when it takes too long."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any

from pallas_kernels.trust.kind import Kind, Verdict
from pallas_kernels.trust.store import PACKAGE

MARK = "@self-test "
"""The beginning of the lines of standard output that are for the parent."""
_TAIL = 4000
"""Bytes at the end of the output that are stored."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """A way to run self-tests: the command, and the seconds that each phase may take.

    A test reports "ready" when the GPU has computed the reference, and "compiled" before our kernel
    runs. An error earlier than "ready" is not the kernel's fault.
    """

    command: tuple[str, ...] = (sys.executable, "-m", "pallas_kernels.trust.self_test")
    """The kind is appended as JSON."""
    start: float = 120.0
    """Seconds until "ready"."""
    compile: float = 180.0
    """Seconds from "ready" to "compiled"."""
    run: float = 60.0
    """Seconds from "compiled" to the verdict."""

    @property
    def longest(self) -> float:
        """The most seconds that a test takes."""
        return self.start + self.compile + self.run

    def __call__(self, kind: Kind) -> tuple[Verdict, str]:
        """(the verdict on a kind, the end of the test's output). A test's errors are verdicts."""
        with tempfile.TemporaryFile() as output:
            try:
                child = subprocess.Popen(
                    [*self.command, json.dumps(dataclasses.asdict(kind))],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env=_environment(),
                    # A group of its own, which `_kill` ends with the compilers that it starts.
                    start_new_session=True,
                )
            except OSError as error:
                return Verdict("untested", f"its self-test could not be started: {error}"), ""
            try:
                verdict = self._watch(child)
            finally:
                _kill(child)
            output.seek(0, os.SEEK_END)
            output.seek(max(0, output.tell() - _TAIL))
            return verdict, output.read().decode(errors="replace")

    def _watch(self, child: subprocess.Popen[bytes]) -> Verdict:
        """Reads the child's lines until it has a verdict, ends, or exceeds a phase's limit."""
        limits = {"start": self.start, "ready": self.compile, "compiled": self.run}
        lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
        phase = "start"
        deadline = time.monotonic() + self.start
        while True:
            try:
                line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return _late_verdict(phase, limits[phase])
            if line is None:
                return _exit_verdict(phase, child, deadline)
            if line.get("phase") in limits:
                phase = line["phase"]
                deadline = time.monotonic() + limits[phase]
            elif line.get("status") in ("passed", "failed", "untested"):
                return Verdict(line["status"], str(line.get("reason", "")))


def _environment() -> dict[str, str]:
    """This process's environment, with our packages on the path.

    The test does not allocate the GPU's memory in advance, which this process may use.
    """
    directories = [str(PACKAGE.parent), os.environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, directories))
    return os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _read(stream: IO[bytes] | None, lines: queue.Queue[dict[str, Any] | None]) -> None:
    """Puts the lines for the parent into a queue, and None at the end of the stream."""
    for line in stream or ():
        text = line.decode(errors="replace")
        if text.startswith(MARK):
            with contextlib.suppress(ValueError):
                lines.put(json.loads(text.removeprefix(MARK)))
    lines.put(None)


def _late_verdict(phase: str, limit: float) -> Verdict:
    """The verdict on a test that exceeded the limit of a phase."""
    if phase == "start":
        return Verdict("untested", f"its self-test did not start within {limit:g} s")
    if phase == "ready":
        return Verdict("failed", f"it was not compiled within {limit:g} s")
    return Verdict("failed", f"it did not finish within {limit:g} s")


def _exit_verdict(phase: str, child: subprocess.Popen[bytes], deadline: float) -> Verdict:
    """The verdict on a test that ended without one."""
    status = "untested" if phase == "start" else "failed"
    try:
        code = child.wait(max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Verdict(status, "its self-test stopped answering")
    event = f"exited with status {code}"
    if code < 0:
        with contextlib.suppress(ValueError):
            event = f"was ended by {signal.Signals(-code).name}"
    time_of_event = {
        "start": "before it used the kernel",
        "ready": "when the kernel was compiled",
        "compiled": "when the kernel ran",
    }[phase]
    return Verdict(status, f"its self-test {event} {time_of_event}")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """Ends the test and the compilers that it may have started.

    A process that the driver blocks in the operating system's kernel is left to the system.
    """
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10)
