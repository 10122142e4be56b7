"""Checks that run a program: your own command, and a matrix product whose digest is known."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from mesh_lm.launch.health.finding import Result

_OWN = 30.0
"""Seconds that your own command may take."""


def own_command(command: Sequence[str], environment: Mapping[str, str]) -> Result:
    """Returns failed if the command ends with a status other than 0, with the last line that it printed."""
    try:
        done = subprocess.run(
            [*command], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            errors="replace", timeout=_OWN,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "unknown", f"{command[0]} did not end within {_OWN:g} s"
    except OSError as error:
        return "unknown", f"{command[0]}: {error.strerror}"
    last = (done.stdout.strip().splitlines() or [""])[-1]
    return ("failed", last or f"{command[0]} ended with status {done.returncode}") if done.returncode else ("ok", last)
