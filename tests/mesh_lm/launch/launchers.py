"""Starts launchers with dummy workers, and reads the files that they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import ended, wait_for

from mesh_lm.network.wire import free_port

ROOT = Path(__file__).parents[3]
DUMMY = Path(__file__).with_name("dummy.py")
SECRET = "a secret of these tests only"
SLOW = 10.0
"""Seconds by which a busy machine may exceed a launcher's time limits."""
Launcher = subprocess.Popen[str]


def start(directory: Path, options: str, actions: str, secret: str = SECRET) -> Launcher:
    """Starts a launcher of dummies; options and actions are separated by blanks. secret: what it
    gets in its environment."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MESH_LM_", "SLURM_", "JAX_"))
    }
    command = [
        sys.executable,
        "-m",
        "mesh_lm.launch",
        *options.split(),
        str(DUMMY),
        str(directory),
        *actions.split(),
    ]
    if "--health" not in options:  # what other tests are about
        command.insert(3, "--health=off")
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "MESH_LM_SECRET": secret}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def outcome(directory: Path, options: str, actions: str) -> tuple[int, str]:
    """Returns (status, output) of a launcher on one node."""
    process = start(directory, options, actions)
    out = ended(process)
    return process.returncode, out


@contextmanager
def nodes(
    count: int, directory: Path, options: str, actions: str
) -> Iterator[tuple[list[Launcher], Callable[..., Launcher]]]:
    """Yields launchers as on several nodes, and a function that restarts one node's launcher. All
    are killed at the end."""
    port = free_port()
    running: list[Launcher] = []

    def again(node: int, extra: str = "", secret: str = SECRET) -> Launcher:
        node_options = f"--nodes={count} --node={node} --rendezvous=127.0.0.1:{port}"
        running.append(start(directory, f"{node_options} {options} {extra}", actions, secret))
        return running[-1]

    try:
        yield [again(node) for node in range(count)], again
    finally:
        for process in running:
            process.kill()
            process.wait()


def life(directory: Path, number: int, process: int, launcher: Launcher) -> dict[str, Any]:
    """Returns what a worker wrote at the start of its life `number`; waits until it has begun."""
    note = directory / f"life-{number}-{process}"
    wait_for(note.exists, launcher)
    return json.loads(note.read_text(encoding="utf-8"))


def lives(directory: Path, process: int = 0) -> list[dict[str, Any]]:
    """Returns all lives of a process."""

    def number(note: Path) -> int:
        return int(note.name.split("-")[1])

    notes = sorted(directory.glob(f"life-*-{process}"), key=number)
    return [json.loads(note.read_text(encoding="utf-8")) for note in notes]


def state(pid: int) -> str:
    """Returns the state of a process as Linux calls it: Z of a zombie, T of one that is stopped."""
    status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    return status.rpartition(")")[2].split()[0]


def alive(pid: int) -> bool:
    """Returns whether a process runs (or is stopped), and is not a zombie."""
    try:
        return state(pid) != "Z"
    except FileNotFoundError:
        return False


def dies(pid: int, seconds: float) -> bool:
    """Returns whether the process ends in time."""
    deadline = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)
