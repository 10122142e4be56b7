"""The processes of a run meet before JAX brings them together, so that what is wrong is said in words.

JAX itself aborts the process, without a Python error, where one never comes, and hangs where they run different programs. Here process 0
listens at the coordinator's address, hears from each of the others what it runs, compares, and tells all of them the outcome.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import socket
import sys
import sysconfig
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from mesh_lm.errors import ConfigError, listed
from mesh_lm.launch.messages import number_ranges
from mesh_lm.launch.process_slot import ProcessSlot
from mesh_lm.launch.wire import listen

Description = dict[str, Any]
"""What must be the same on every process, as nested dicts of JSON values."""

_ROOT = Path(__file__).parents[2]
_CODE = ("mesh_lm", "sharding_rules", "pallas_kernels", "train.py")
_VARIABLES = ("XLA_FLAGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_NUM_CPU_DEVICES")
_MAGIC = "mesh_lm"
_RETRY = 0.2
_GRACE = 10


class Absent(ConfigError):
    """Processes that did not find each other, which another attempt may mend."""


def describe(config: Mapping[str, Any], command: Mapping[str, Any] = MappingProxyType({})) -> Description:
    """The config, the code (the user's own too, as far as it is imported), the versions and the variables that change what is compiled."""
    files = [file for name in _CODE for file in sorted((_ROOT / name).rglob("*.py") if (_ROOT / name).is_dir() else (_ROOT / name,))]
    code = {str(f.relative_to(_ROOT)): hashlib.sha256(f.read_bytes()).hexdigest()[:12] for f in files if f.exists()}
    versions = {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": version("jaxlib")}
    return {
        "config": dict(config),
        "command": dict(command),
        "code": code | _modules(),
        "versions": versions,
        "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
    }


def _modules() -> dict[str, str]:
    """Digests of the imported files that belong neither to Python nor to an installed package, such as a config file, by module."""
    installed = [Path(path).resolve() for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}]
    found = {}
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if file.suffix != ".py" or not file.is_file() or {"site-packages", "dist-packages"} & {*file.parts}:
            continue
        if not any(file.resolve().is_relative_to(path) for path in installed):
            found[Path(name).name] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return found


def meet(slot: ProcessSlot, timeout: float, description: Description) -> None:
    """Returns when all processes are there and run the same; takes at most `timeout` seconds.

    Raises, on every process that is there, Absent: no one answers at the coordinator's address, its port is taken, or processes did not
    come. ConfigError: two with one index, another count, or a difference in the description.
    """
    mine = {"magic": _MAGIC, "count": slot.count, "index": slot.index, "host": socket.gethostname(), "description": description}
    mine = json.loads(json.dumps(mine, default=repr))  # as the others will see it
    deadline = time.monotonic() + timeout
    problem, absent = _host(slot, deadline, timeout, mine) if slot.index == 0 else _visit(slot, deadline, timeout, mine)
    if problem:
        raise (Absent if absent else ConfigError)(problem)


def _host(slot: ProcessSlot, deadline: float, timeout: float, mine: dict[str, Any]) -> tuple[str, bool]:
    """Process 0's side. Returns what is wrong, or nothing, and whether it is that somebody was absent."""
    with contextlib.ExitStack() as open_sockets:
        try:
            listener = listen(slot.address[1], backlog=slot.count)
        except OSError as error:
            why = f"process 0 cannot listen on port {slot.address[1]}: {error.strerror}; choose a free port for launch.coordinator"
            return why, True
        open_sockets.enter_context(listener)
        came: dict[int, socket.socket] = {}
        visitors: list[socket.socket] = []
        problem, missed = "", False
        while len(visitors) < slot.count - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                visitor = open_sockets.enter_context(listener.accept()[0])
                visitor.settimeout(10)
                theirs = json.loads(_receive(visitor))
                if theirs.get("magic") != _MAGIC:
                    continue
            except TimeoutError:
                if problem:
                    break
                if time.monotonic() < deadline:
                    continue  # someone who connected and said nothing
                missed = True
                absent = number_ranges(sorted({*range(1, slot.count)} - came.keys()))
                problem = f"{absent} of {slot.count} did not come to {slot.coordinator} in {timeout:g} s"
                problem += "; see their logs, launch.processes, and whether they reach that address"
                break
            except (OSError, ValueError, AttributeError):
                continue  # a port scanner
            if theirs["index"] in came:
                problem = f"two processes say that they are number {theirs['index']} of {theirs['count']}; each needs its own launch.index"
            came[theirs["index"]] = visitor
            visitors.append(visitor)
            problem = problem or _difference(mine, theirs)
            if problem:  # those who are still on their way are to hear it too
                deadline = min(deadline, time.monotonic() + _GRACE)
        if not problem and (left := [i for i, visitor in came.items() if _hung_up(visitor)]):
            problem, missed = f"{number_ranges(left)} of {slot.count} came to {slot.coordinator} and left again; see their logs", True
        for visitor in visitors:
            with contextlib.suppress(OSError):
                _send(visitor, json.dumps({"problem": problem, "absent": missed}))
        for visitor in visitors:  # they hang up first, so that no socket of this port lingers when JAX takes it
            with contextlib.suppress(OSError):
                visitor.recv(1)
        return problem, missed


def _visit(slot: ProcessSlot, deadline: float, timeout: float, mine: dict[str, Any]) -> tuple[str, bool]:
    """The other processes' side."""
    while True:
        try:
            with socket.create_connection(slot.address, timeout=max(0.01, deadline - time.monotonic())) as host:
                _send(host, json.dumps(mine))
                host.settimeout(timeout + 10)  # process 0 is there, and says by its own clock who is not
                told = json.loads(_receive(host))
                return told["problem"], told["absent"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if time.monotonic() > deadline:
                return (
                    f"process {slot.index} found no process 0 at {slot.coordinator} in {timeout:g} s ({error}); "
                    "start it, or correct launch.coordinator",
                    True,
                )
            time.sleep(_RETRY)


def _difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """In words, the first fields in which another process differs from process 0; nothing where it does not."""
    if theirs["count"] != mine["count"]:
        return f"process {theirs['index']} expects {theirs['count']} processes, process 0 expects {mine['count']}"
    lines = _compare(mine["description"], theirs["description"], "")
    if not lines:
        return ""
    head = f"process {theirs['index']} on {theirs['host']} does not run what process 0 on {mine['host']} runs"
    return listed(head, lines) + "\nstart all of them from the same files with the same arguments"


def _compare(a: Any, b: Any, path: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [line for key in dict.fromkeys([*a, *b]) for line in _compare(a.get(key), b.get(key), f"{path}.{key}" if path else key)]
    return [] if json.dumps(a) == json.dumps(b) else [f"{path}: {a} on process 0, {b} there"]


def _hung_up(visitor: socket.socket) -> bool:
    visitor.setblocking(False)
    try:
        return visitor.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        visitor.settimeout(10)


def _send(to: socket.socket, text: str) -> None:
    data = text.encode()
    to.sendall(len(data).to_bytes(4, "big") + data)


def _receive(source: socket.socket) -> str:
    size = int.from_bytes(_exactly(source, 4), "big")
    if size > 2**24:
        raise ValueError(size)
    return _exactly(source, size).decode()


def _exactly(source: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not (piece := source.recv(size - len(data))):
            raise ConnectionResetError("hung up")
        data += piece
    return bytes(data)
