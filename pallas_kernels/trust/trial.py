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
"""Begins the lines of standard output that are for the parent."""
_TAIL = 4000
"""Bytes of the output that are kept."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """How a self-test is run: its command, to which the kind is appended as JSON, and the seconds
    that each of its phases may take.

    A test reports "ready" when the GPU has computed the reference, and "compiled" before our kernel
    runs. Whatever goes wrong earlier than "ready" is not the kernel's fault.
    """

    command: tuple[str, ...] = (sys.executable, "-m", "pallas_kernels.trust.self_test")
    start: float = 120.0
    compile: float = 180.0
    run: float = 60.0

    @property
    def longest(self) -> float:
        """The most seconds that a test takes."""
        return self.start + self.compile + self.run

    def __call__(self, kind: Kind) -> tuple[Verdict, str]:
        """(the verdict on a kind, the end of the test's output). Never raises for what the test
        does.
        """
        with tempfile.TemporaryFile() as output:
            try:
                child = subprocess.Popen(
                    [*self.command, json.dumps(dataclasses.asdict(kind))],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output,
                    env=_environment(), start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                return Verdict("untested", f"its self-test could not be started: {error}"), ""
            try:
                verdict = self._watch(child)
            finally:
                _end(child)
            output.seek(0, os.SEEK_END)
            output.seek(max(0, output.tell() - _TAIL))
            return verdict, output.read().decode(errors="replace")

    def _watch(self, child: subprocess.Popen[bytes]) -> Verdict:
        """Follows the child's lines until it has a verdict, ends, or exceeds the limit of its
        phase.
        """
        limits = {"start": self.start, "ready": self.compile, "compiled": self.run}
        lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
        phase, until = "start", time.monotonic() + self.start
        while True:
            try:
                line = lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return _late(phase, limits[phase])
            if line is None:
                return _ended(phase, child, until)
            if line.get("phase") in limits:
                phase = line["phase"]
                until = time.monotonic() + limits[phase]
            elif line.get("status") in ("passed", "failed", "untested"):
                return Verdict(line["status"], str(line.get("reason", "")))


def _environment() -> dict[str, str]:
    """This process's environment, with our packages on the path, and without a claim to all of the
    GPU's memory.
    """
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _read(stream: IO[bytes] | None, lines: queue.Queue[dict[str, Any] | None]) -> None:
    for line in stream or ():
        text = line.decode(errors="replace")
        if text.startswith(MARK):
            with contextlib.suppress(ValueError):
                lines.put(json.loads(text.removeprefix(MARK)))
    lines.put(None)


def _late(phase: str, limit: float) -> Verdict:
    if phase == "start":
        return Verdict("untested", f"its self-test did not start within {limit:g} s")
    what = "did not finish" if phase == "compiled" else "was not compiled"
    return Verdict("failed", f"it {what} within {limit:g} s")


def _ended(phase: str, child: subprocess.Popen[bytes], until: float) -> Verdict:
    """The verdict on a test that ended without one."""
    try:
        status = child.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return Verdict(
            "failed" if phase != "start" else "untested", "its self-test stopped answering"
        )
    how = f"exited with status {status}"
    if status < 0:
        with contextlib.suppress(ValueError):
            how = f"was ended by {signal.Signals(-status).name}"
    when = {
        "start": "before it used the kernel",
        "ready": "when the kernel was compiled",
        "compiled": "when the kernel ran",
    }[phase]
    return Verdict("untested" if phase == "start" else "failed", f"its self-test {how} {when}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the test and the compilers that it may have started. A process that a GPU holds in the
    kernel is left to the system.
    """
    with contextlib.suppress(OSError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(10)
