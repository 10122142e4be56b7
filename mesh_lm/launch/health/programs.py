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
    status, text = run([path, *command[1:]], environment, _OWN)
    last = (text.strip().splitlines() or [""])[-1]
    if status is None:
        return "unknown", f"{command[0]} did not end within {_OWN:g} s"
    if status in (126, 127):  # as shells say that they cannot run it
        return "unknown", f"{command[0]} cannot be run: {last}"
    return (
        ("failed", last or f"{command[0]} ended with status {status}") if status else ("ok", last)
    )


def matrix_product(
    kind: str, environment: Mapping[str, str], program: Path = _PROGRAM, limit: float = _PRODUCT
) -> Result:
    """Returns failed if a device computes a wrong product, reports a fault or hangs. kind: "cpu" or
    "gpu", as `matrix_product.py`.
    """
    status, text = run([sys.executable, "-P", str(program), kind], {**environment, **_QUIET}, limit)
    if not (found := re.search(r"^devices (\d+) [\d.]+$", text, re.MULTILINE)):
        last = (text.strip().splitlines() or [f"status {status}"])[-1]
        return "unknown", last if status is not None else f"no device was found within {limit:g} s"
    if found[1] == "0":
        return "unknown", "JAX finds no GPU here"
    results = dict(re.findall(r"^(\d+) (ok|failed: .*|unknown: .*)$", text, re.MULTILINE))
    if bad := [f"device {i} {how}" for i, how in results.items() if how.startswith("failed")]:
        return "failed", f"{'; '.join(bad)}; take the node out of service, and test the device"
    missing = [str(i) for i in range(int(found[1])) if str(i) not in results]
    compiled = re.search(r"^compiled ([\d.]+)$", text, re.MULTILINE)
    if (
        missing
        and status is None
        and compiled
        and (seconds := limit - float(compiled[1])) >= _HANGS
    ):
        return (
            "failed",
            (
                f"device {missing[0]} did not finish a matrix product within {seconds:.0f} s: "
                "reset it, or reboot"
            ),
        )
    if unclear := [
        f"device {i} {how.removeprefix('unknown: ')}" for i, how in results.items() if how != "ok"
    ]:
        return "unknown", "; ".join(unclear)
    return (
        ("unknown", f"no result of device {', '.join(missing)}, status {status}")
        if missing
        else ("ok", f"exact on all devices ({len(results)})")
    )
