"""A process that judges examples for a test, because XLA aborts the process on some programs."""

from __future__ import annotations

import collections
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from processes import PATIENCE, ROOT, environment


class Runner:
    """The process of a script that answers each line of its input by a line "\\0[verdict, text]".
    An example that kills it restarts it.

    Attributes:
      verdicts: how often each verdict was given.
    """

    def __init__(self, script: Path, directory: Path, n_devices: int = 8) -> None:
        """directory: for what the process prints. n_devices: CPU devices of the process."""
        self._script = script
        self._n_devices = n_devices
        self._said = directory / "stderr"
        self._process: subprocess.Popen[str] | None = None
        self.verdicts = collections.Counter[str]()

    def __call__(self, example: dict[str, Any]) -> None:
        """Raises AssertionError for an example that is neither refused nor correct."""
        verdict, text = self.judged(example)
        line = json.dumps(example)
        assert verdict in ("same", "refused"), (
            f"{verdict}: {text}\nPYTHONPATH=tests:. python tests/{self._script.name} '{line}'"
        )

    def judged(self, example: dict[str, Any]) -> tuple[str, str]:
        """(verdict, what was said): that of the script, or "hung" or "aborted"."""
        line = json.dumps(example)
        verdict, text = self._answer(line)
        # on few cores, XLA:CPU's collectives sometimes starve each other and time out
        if verdict in ("hung", "aborted"):
            verdict, text = self._answer(line)
        self.verdicts[verdict] += 1
        return verdict, text

    def _answer(self, line: str) -> tuple[str, str]:
        if self._process is None:
            pipes: dict[str, Any] = {
                "stdin": subprocess.PIPE,
                "stdout": subprocess.PIPE,
                "stderr": self._said.open("w", encoding="utf-8"),
            }
            environ = environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}") | {"XLA_FLAGS": ""}
            environ["XLA_FLAGS"] = (
                f"{environment()['XLA_FLAGS']} "
                f"--xla_force_host_platform_device_count={self._n_devices}"
            )
            self._process = subprocess.Popen(
                [sys.executable, str(self._script)], text=True, env=environ, **pipes
            )
        process = self._process
        assert process.stdin and process.stdout
        process.stdin.write(line + "\n")
        process.stdin.flush()
        alarm = threading.Timer(PATIENCE, process.kill)
        alarm.start()
        answer = next((each for each in process.stdout if each.startswith("\0")), "")
        hung = not alarm.is_alive()
        alarm.cancel()
        if answer:
            verdict, text = json.loads(answer[1:])
            return verdict, text
        process.kill()
        process.wait()
        self._process = None
        return "hung" if hung else "aborted", self._said.read_text(encoding="utf-8")[-3000:]

    def close(self) -> None:
        """Ends the process."""
        if self._process:
            self._process.kill()
            self._process.wait()
