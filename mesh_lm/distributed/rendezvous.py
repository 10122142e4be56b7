"""A rendezvous of the run's processes before `jax.distributed.initialize`, for the sake of clear errors.

JAX itself aborts without a Python error if a process never connects, and hangs if they run different programs. Here process 0 listens at
the coordinator's address, receives from each of the others what it runs, compares, and sends all of them the outcome.
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


class RendezvousFailed(ConfigError):
    """The processes did not find each other; another attempt may succeed."""


def describe(config: Mapping[str, Any], command: Mapping[str, Any] = MappingProxyType({})) -> Description:
    """Returns the config, digests of the code (imported user code included), versions, and variables that change the compiled program."""
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
    """Returns module -> digest of the imported files that belong neither to Python nor to an installed package, such as a config file."""
    installed = [Path(path).resolve() for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}]
    digests = {}
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if file.suffix != ".py" or not file.is_file() or {"site-packages", "dist-packages"} & {*file.parts}:
            continue
        if not any(file.resolve().is_relative_to(path) for path in installed):
            digests[Path(name).name] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return digests


def meet(slot: ProcessSlot, timeout: float, description: Description) -> None:
    """Returns when all processes are connected and run the same program; takes at most `timeout` seconds.

    Raises on every connected process. RendezvousFailed: nothing answers at the coordinator's address, its port is taken, or processes did
    not connect. ConfigError: two have the same index, another process count, or a different description.
    """
    own = {"magic": _MAGIC, "count": slot.count, "index": slot.index, "host": socket.gethostname(), "description": description}
    own = json.loads(json.dumps(own, default=repr))  # as the others will see it
    deadline = time.monotonic() + timeout
    problem, absent = _host(slot, deadline, timeout, own) if slot.index == 0 else _visit(slot, deadline, timeout, own)
    if problem:
        raise (RendezvousFailed if absent else ConfigError)(problem)


def _host(slot: ProcessSlot, deadline: float, timeout: float, own: dict[str, Any]) -> tuple[str, bool]:
    """Process 0's side. Returns the problem (empty: none), and whether the cause is that a process is absent."""
    with contextlib.ExitStack() as open_sockets:
        try:
            listener = listen(slot.address[1], backlog=slot.count)
        except OSError as error:
            why = f"process 0 cannot listen on port {slot.address[1]}: {error.strerror}; choose a free port for launch.coordinator"
            return why, True
        open_sockets.enter_context(listener)
        by_index: dict[int, socket.socket] = {}
        visitors: list[socket.socket] = []
        problem, missed = "", False
        while len(visitors) < slot.count - 1:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                visitor = open_sockets.enter_context(listener.accept()[0])
                visitor.settimeout(10)
                other = json.loads(_receive(visitor))
                if other.get("magic") != _MAGIC:
                    continue
            except TimeoutError:
                if problem:
                    break
                if time.monotonic() < deadline:
                    continue  # a client that connected and sent nothing
                missed = True
                absent = number_ranges(sorted({*range(1, slot.count)} - by_index.keys()))
                problem = f"{absent} of {slot.count} did not connect to {slot.coordinator} within {timeout:g} s"
                problem += "; see their logs, check launch.processes, and that they can reach that address"
                break
            except (OSError, ValueError, AttributeError):
                continue  # a port scanner
            if other["index"] in by_index:
                problem = f"two processes have the index {other['index']} of {other['count']}; each needs its own launch.index"
            by_index[other["index"]] = visitor
            visitors.append(visitor)
            problem = problem or _difference(own, other)
            if problem:  # processes that are late should receive it too
                deadline = min(deadline, time.monotonic() + _GRACE)
        if not problem and (left := [i for i, visitor in by_index.items() if _hung_up(visitor)]):
            problem = f"{number_ranges(left)} of {slot.count} connected to {slot.coordinator} and disconnected; see their logs"
            missed = True
        for visitor in visitors:
            with contextlib.suppress(OSError):
                _send(visitor, json.dumps({"problem": problem, "absent": missed}))
        for visitor in visitors:  # they hang up first, so that no socket on this port lingers when JAX binds it
            with contextlib.suppress(OSError):
                visitor.recv(1)
        return problem, missed


def _visit(slot: ProcessSlot, deadline: float, timeout: float, own: dict[str, Any]) -> tuple[str, bool]:
    """The other processes' side. Returns as `_host` does."""
    while True:
        try:
            with socket.create_connection(slot.address, timeout=max(0.01, deadline - time.monotonic())) as host:
                _send(host, json.dumps(own))
                host.settimeout(timeout + 10)  # process 0 answers when its own time is over
                answer = json.loads(_receive(host))
                return answer["problem"], answer["absent"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            if time.monotonic() > deadline:
                return (
                    f"process {slot.index} found no process 0 at {slot.coordinator} within {timeout:g} s ({error}); "
                    "start it, or correct launch.coordinator",
                    True,
                )
            time.sleep(_RETRY)


def _difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns a message that lists the first fields in which a process differs from process 0; empty if there are none."""
    if other["count"] != first["count"]:
        return f"process {other['index']} expects {other['count']} processes, process 0 expects {first['count']}"
    lines = _compare(first["description"], other["description"], "")
    if not lines:
        return ""
    head = f"process {other['index']} on {other['host']} does not match process 0 on {first['host']}"
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
