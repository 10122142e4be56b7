"""One process of the run, as the launcher on its machine sees it: how it is started, what it says of itself, how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from mesh_lm.launch.environment import HEARTBEAT

# Linux kills the worker when its launcher dies, however that happens; what it runs later need know nothing of it.
_START = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which lives on through exec
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_BEAT = {"step": -1, "phase": "start", "since": 0.0, "saved": -1, "seconds": {}}
_FAREWELL = 2.0
"""Seconds for what a process printed last to come through."""


class Worker:
    """A process that is running or has ended.

    Attributes:
      index: its number in the run.
      beat: the last that it said of itself: step, phase, since, saved, seconds.
      heard: when that was (time.monotonic); at first, when it was started.
      nodes: the nodes that are enough for its mesh, where it said so; 0: it did not.
      sent: the last signal that it was sent; 0: none.
    """

    def __init__(self, program: Sequence[str], environment: Mapping[str, str], index: int, *, relay: bool) -> None:
        """Starts `program`, a script and its arguments or -m and a module. relay: its lines are marked; else it has this terminal."""
        self.index, self.beat, self.heard = index, dict[str, Any](), time.monotonic()
        self.nodes = self.sent = 0
        self._pipe, theirs = os.pipe()
        os.set_blocking(self._pipe, False)
        self._text, self._reader = b"", None
        start = [sys.executable, "-I", "-S", "-c", _START, str(os.getpid())]
        # A session of its own, so that Ctrl-C reaches it once, through its launcher, and that it can be ended with all that it started.
        self._process = subprocess.Popen(
            [*start, sys.executable, "-u", *program], env={**environment, HEARTBEAT: str(theirs)},
            pass_fds=[theirs], start_new_session=True,
            stdout=subprocess.PIPE if relay else None, stderr=subprocess.STDOUT if relay else None,
        )  # fmt: skip
        os.close(theirs)
        if self._process.stdout:
            self._reader = threading.Thread(target=_relay, args=(self._process.stdout, index), daemon=True)
            self._reader.start()

    def read(self, *, excused: bool = False) -> None:
        """Takes in what it has said. excused: its silence until now does not count."""
        if excused:
            self.heard = time.monotonic()
        if self._pipe < 0:
            return
        with contextlib.suppress(BlockingIOError):
            while piece := os.read(self._pipe, 2**16):
                self._text += piece
        *lines, self._text = self._text.split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, AttributeError):
                said = json.loads(line)
                self.nodes = said.get("nodes", self.nodes)
                self.beat, self.heard = _BEAT | self.beat | said, time.monotonic()

    def silence(self, first: float, later: float) -> float:
        """Seconds of silence, where they are more than allowed: `first` before its first word (0: any), `later` after that. Else 0."""
        seconds = time.monotonic() - self.heard
        limit = later if self.beat else first
        return seconds if limit and seconds > limit else 0.0

    def status(self) -> int | None:
        """-N after signal N; None while it runs."""
        if (status := self._process.poll()) is not None and self._pipe >= 0:
            self.read()
            os.close(self._pipe)
            self._pipe = -1
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # what it started and left behind
            if self._reader:
                self._reader.join(_FAREWELL)
        return status

    def signal(self, number: int) -> None:
        """SIGKILL reaches all that it started, too."""
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if number == signal.SIGKILL else os.kill)(self._process.pid, number)
            self.sent = number


def _relay(lines: IO[bytes], index: int) -> None:
    """Prints what a process prints; lines of all but the first are marked, where they are not already."""
    mark = f"[process {index}] ".encode()
    with contextlib.suppress(ValueError, OSError):  # the pipe is gone
        for line in lines:
            if b"[Gloo] Rank" in line or b"peer ranks" in line:  # one for every group of devices, at times in pieces
                continue
            with contextlib.suppress(ValueError, OSError):  # a log that takes no more; the process must not wait for it
                sys.stdout.buffer.write(line if index == 0 or line.startswith(mark) else mark + line)
                sys.stdout.buffer.flush()
