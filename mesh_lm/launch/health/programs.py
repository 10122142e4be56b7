"""Checks that run a program: your own command, and a matrix product whose digest is known."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from mesh_lm.launch.health.finding import Result
from mesh_lm.launch.health.limited import run

_OWN = 30.0
"""Seconds that your own command may take."""
_PRODUCT = 50.0
"""Seconds that the matrix product may take, the start of JAX included."""
_HANGS = 20.0
"""Seconds without an answer after which a device hangs. The product itself takes milliseconds."""
_PROGRAM = Path(__file__).with_name("matrix_product.py")
_QUIET = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONWARNINGS": "ignore"}


def own_command(command: Sequence[str], environment: Mapping[str, str]) -> Result:
    """Returns failed if the command ends with a status other than 0, with the last line that it
    printed.
    """
    path = shutil.which(command[0], path=environment.get("PATH")) or command[0]
    status, output = run([path, *command[1:]], environment, _OWN)
    last = _last_line(output)
    if status is None:
        return "unknown", f"{command[0]} did not end within {_OWN:g} s"
    if status in (126, 127):  # as shells say that they cannot run it
        return "unknown", f"{command[0]} cannot be run: {last}"
    if status:
        return "failed", last or f"{command[0]} ended with status {status}"
    return "ok", last


def matrix_product(
    kind: str, environment: Mapping[str, str], program: Path = _PROGRAM, limit: float = _PRODUCT
) -> Result:
    """Returns failed if a device computes a wrong product, reports a fault or hangs.

    kind: "cpu" or "gpu", as `matrix_product.py` takes it.
    """
    command = [sys.executable, "-P", str(program), kind]
    status, output = run(command, {**environment, **_QUIET}, limit)
    devices = re.search(r"^devices (\d+) [\d.]+$", output, re.MULTILINE)
    if not devices:
        if status is None:
            return "unknown", f"no device was found within {limit:g} s"
        return "unknown", _last_line(output) or f"status {status}"
    n_devices = int(devices[1])
    if n_devices == 0:
        return "unknown", "JAX finds no GPU here"

    verdicts = dict(re.findall(r"^(\d+) (ok|failed: .*|unknown: .*)$", output, re.MULTILINE))
    faults = [f"device {i} {text}" for i, text in verdicts.items() if text.startswith("failed")]
    if faults:
        return "failed", f"{'; '.join(faults)}; take the node out of service, and test the device"

    # A device without a verdict hangs if there was time enough after the compilation.
    missing = [str(i) for i in range(n_devices) if str(i) not in verdicts]
    compiled = re.search(r"^compiled ([\d.]+)$", output, re.MULTILINE)
    if missing and status is None and compiled:
        seconds = limit - float(compiled[1])
        if seconds >= _HANGS:
            return "failed", (
                f"device {missing[0]} did not finish a matrix product within {seconds:.0f} s: "
                "reset it, or reboot"
            )

    errors = [
        f"device {i} {text.removeprefix('unknown: ')}"
        for i, text in verdicts.items()
        if text != "ok"
    ]
    if errors:
        return "unknown", "; ".join(errors)
    if missing:
        return "unknown", f"no result of device {', '.join(missing)}, status {status}"
    return "ok", f"exact on all devices ({len(verdicts)})"


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1] if lines else ""
