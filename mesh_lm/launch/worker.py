"""One process of the run, seen by the launcher on its machine: its start, its heartbeats, its
output and how it ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from mesh_lm import strict_json
from mesh_lm.network import protocol
from mesh_lm.network.environment import HEARTBEAT

# Linux kills the program when the thread that started it ends, for any reason. The program itself
# needs no support for it.
_START = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, which survives exec
    if os.getppid() != int(sys.argv[1]):
        sys.exit(1)
try:
    os.execv(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.exit(print(f"{sys.argv[2]}: {error.strerror}") or 126)
"""
_FIRST_BEAT = {"step": -1, "phase": "start", "since": 0.0, "saved": -1, "seconds": {}}
_PIECES = 16
"""Pieces that one call reads, so that no worker keeps the launcher busy."""
_LONGEST = 2**16
"""Bytes of a heartbeat; what is longer was written by something else."""
_FAREWELL = 2.0
"""Seconds to wait for the last output of a process."""


class Worker:
    """A process that is running or has ended.

    Attributes:
      beat: its last heartbeat: step, phase, since, saved, seconds; empty: it has sent none.
      last_beat: when that came (time.monotonic); at first, when it was started.
      nodes: the number of nodes that is enough for its mesh, if it reported one; else 0.
      sent: the last signal that it was sent; 0: none.
    """

    def __init__(
        self, program: Sequence[str], environment: Mapping[str, str], index: int, *, relay: bool
    ) -> None:
        """Starts `program`: a script, or -m and a module, with arguments.

        relay: prefix its lines; else it inherits this terminal.
        """
        self.beat: dict[str, Any] = {}
        self.last_beat = time.monotonic()
        self.nodes = 0
        self.sent = 0
        self._unread = b""  # the beginning of a line
        self._relay_thread: threading.Thread | None = None
        self._pipe, writer = os.pipe()
        os.set_blocking(self._pipe, False)
        # A new session, so that Ctrl-C reaches it only once, through its launcher, and its children
        # can be killed with it.
        self._process = subprocess.Popen(
            tied([sys.executable, "-u", *program]),
            env={**environment, HEARTBEAT: str(writer)},
            pass_fds=[writer],
            start_new_session=True,
            stdout=subprocess.PIPE if relay else None,
            stderr=subprocess.STDOUT if relay else None,
        )
        os.close(writer)
        if self._process.stdout:
            self._relay_thread = threading.Thread(
                target=_relay, args=(self._process.stdout, index), daemon=True
            )
            self._relay_thread.start()

    def read(self, *, excused: bool = False) -> None:
        """Reads its heartbeats. excused: do not count its silence so far."""
        if excused:
            self.last_beat = time.monotonic()
        if self._pipe < 0:
            return
        with contextlib.suppress(BlockingIOError):
            for _ in range(_PIECES):
                piece = os.read(self._pipe, _LONGEST)
                if not piece:
                    break
                self._unread += piece
        *lines, unfinished = self._unread.split(b"\n")
        self._unread = unfinished[-_LONGEST:]
        for line in lines:
            with contextlib.suppress(ValueError):  # the run's own code may write there, too
                message = strict_json.loads(line, size=_LONGEST)
                protocol.require(message, protocol.BEAT)
                self.nodes = message.get("nodes", self.nodes)
                self.beat = _FIRST_BEAT | self.beat | message
                self.last_beat = time.monotonic()

    def silence(self, first_limit: float, limit: float) -> float:
        """Returns the seconds since its last heartbeat if they exceed the limit, else 0.

        The limit is `first_limit` before the first heartbeat (0: none), and `limit` after it.
        """
        seconds = time.monotonic() - self.last_beat
        if not self.beat:
            limit = first_limit
        return seconds if limit and seconds > limit else 0.0

    def status(self) -> int | None:
        """Returns its exit status, -N after signal N; None while it runs."""
        status = self._process.poll()
        if status is None or self._pipe < 0:
            return status
        self.read()
        os.close(self._pipe)
        self._pipe = -1
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # children that it left running
        if self._relay_thread:
            self._relay_thread.join(_FAREWELL)
        return status

    def signal(self, number: int) -> None:
        """Sends a signal to the process. SIGKILL goes to its children, too."""
        send = os.killpg if number == signal.SIGKILL else os.kill
        with contextlib.suppress(ProcessLookupError):
            send(self._process.pid, number)
            self.sent = number


def tied(command: Sequence[str]) -> list[str]:
    """Returns a command that runs the given one in a process that does not outlive this thread.

    The command's first word must be a path.
    """
    return [sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), *command]


def _relay(lines: IO[bytes], index: int) -> None:
    """Prints a process's output.

    Lines of all but process 0 get a prefix, unless they have one already.
    """
    mark = f"[process {index}] ".encode()
    with contextlib.suppress(ValueError, OSError):  # the pipe is gone
        for line in lines:
            # Gloo prints these for every group of devices, sometimes in pieces.
            if b"[Gloo] Rank" in line or b"peer ranks" in line:
                continue
            if index != 0 and not line.startswith(mark):
                line = mark + line
            # If the log cannot be written, the process must not block on it.
            with contextlib.suppress(ValueError, OSError):
                sys.stdout.buffer.write(line)
                sys.stdout.buffer.flush()
