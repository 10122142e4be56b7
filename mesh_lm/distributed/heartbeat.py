"""Sends this process's step and phase to the launcher on this machine, once a second.

`python -m mesh_lm.launch` gives each worker the write end of a pipe. Each line is JSON: {"pid": 1,
"step": 12, "phase": "step", "since": 0.3, "saved": 10, "seconds": {"step": 4.1, ...}}; since:
seconds in this phase.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from typing import Any

from mesh_lm.distributed.phases import Phases
from mesh_lm.network.environment import HEARTBEAT

_INTERVAL = 1.0
_ORPHANED = 71
"""Exit status of a process whose launcher is gone."""


class Heartbeat:
    """A worker's end of the pipe. Without a launcher it does nothing."""

    def __init__(self, phases: Phases, environment: Mapping[str, str] = os.environ) -> None:
        self._phases = phases
        self._pipe = int(environment.get(HEARTBEAT, -1))
        if self._pipe >= 0:
            os.set_blocking(self._pipe, False)
            os.set_inheritable(self._pipe, False)

    def start(self) -> None:
        """Starts a thread that sends heartbeats until the process ends.

        If the launcher is gone, it ends the process.
        """
        if self._pipe >= 0:
            threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends one line; drops it if the launcher does not keep up.

        Raises BrokenPipeError if the launcher is gone.
        """
        if self._pipe >= 0:
            with contextlib.suppress(BlockingIOError):
                os.write(self._pipe, json.dumps(message).encode() + b"\n")

    def _beat(self) -> None:
        phases = self._phases
        pause = threading.Event()
        while True:
            seconds = {phase: round(value, 3) for phase, value in phases.seconds().items()}
            message = {
                "pid": os.getpid(),
                "step": phases.step,
                "phase": phases.phase,
                "since": round(phases.idle, 1),
                "saved": phases.saved,
                "seconds": seconds,
            }
            try:
                self.send(message)
            except BrokenPipeError:
                os._exit(_ORPHANED)
            pause.wait(_INTERVAL)
