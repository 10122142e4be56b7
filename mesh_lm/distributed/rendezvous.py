"""A rendezvous of the run's processes before `jax.distributed.initialize`, for the sake of clear
errors.

JAX itself aborts without a Python error if a process never connects, and hangs if they run
different programs. Here process 0 listens at the coordinator's address, receives from each of the
others what it runs, compares, and sends all of them the outcome. Both ends prove first that they
know the job's secret (`mesh_lm.network.channel`).
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax

from mesh_lm.distributed import gpu
from mesh_lm.errors import ConfigError, listed, number_ranges
from mesh_lm.network import protocol
from mesh_lm.network.process_slot import ProcessSlot
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import LOOPBACK, QUIET, Peer, is_loopback, listen

Description = dict[str, Any]
"""What must be the same on every process, as nested dicts of JSON values."""

_ROOT = Path(__file__).parents[2]
_CODE = ("mesh_lm", "sharding_rules", "pallas_kernels", "train.py")
_VARIABLES = ("XLA_FLAGS", "JAX_ENABLE_X64", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_NUM_CPU_DEVICES")
_COMPILERS = ("jax-cuda13-pjrt", "jax-cuda12-pjrt")
"""The packages that have XLA's compiler for GPUs; that for CPUs is in jaxlib."""
_MAGIC = "mesh_lm"
_PURPOSE = "rendezvous"
_SAME = "start all processes with the same secret (docs/multi_host.md)"
_TEXT = 2**16
"""Characters of a problem that are sent."""
_TICK = 0.01
_RETRY = 0.2
_GRACE = 10.0
"""Seconds in which processes that are late still receive an error, and in which all must hang
up."""
_HANDSHAKE = 10.0
"""Seconds within which the other end must have introduced itself."""
_CALLERS = 128
"""Connections that may wait for that; the oldest is closed first."""


class RendezvousFailed(ConfigError):
    """The processes did not find each other; another attempt may succeed."""


def describe(
    config: Mapping[str, Any], command: Mapping[str, Any] = MappingProxyType({})
) -> Description:
    """Returns the config, digests of the code (imported user code included), versions, variables
    that change the compiled program, and whether this process will use NVIDIA GPUs: JAX would wait
    minutes for the devices of one that has lost them.
    """
    files = [
        file
        for name in _CODE
        for file in sorted(
            (_ROOT / name).rglob("*.py") if (_ROOT / name).is_dir() else (_ROOT / name,)
        )
    ]
    code = {
        str(f.relative_to(_ROOT)): hashlib.sha256(f.read_bytes()).hexdigest()[:12]
        for f in files
        if f.exists()
    }
    versions = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
    }
    has_gpus = bool(gpu.visible(os.environ))
    if has_gpus:
        versions |= _compilers()
    return {
        "config": dict(config),
        "command": dict(command),
        "code": code | _modules(),
        "versions": versions,
        "environment": {name: os.environ.get(name, "") for name in _VARIABLES},
        "devices": "NVIDIA GPUs" if has_gpus else "no NVIDIA GPU",
    }


def _compilers() -> dict[str, str]:
    """Returns the installed packages of XLA's compiler for GPUs and their versions."""
    found = {}
    for name in _COMPILERS:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _modules() -> dict[str, str]:
    """Returns module -> digest of the imported files that belong neither to Python nor to an
    installed package, such as a config file.

    Those of mesh_lm itself are left out: `describe` has all of its files, and a process may have
    imported more of them than others.
    """
    own = [(_ROOT / name).resolve() for name in _CODE]
    installed = [
        *own,
        *(
            Path(path).resolve()
            for path in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
        ),
    ]
    digests = {}
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "/")
        if (
            file.suffix != ".py"
            or not file.is_file()
            or {"site-packages", "dist-packages"} & {*file.parts}
        ):
            continue
        if not any(file.resolve().is_relative_to(path) for path in installed):
            digests[Path(name).name] = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return digests


def meet(slot: ProcessSlot, timeout: float, description: Description, secret: Secret) -> None:
    """Returns when all processes are connected and run the same program; takes at most `timeout`
    seconds, whoever else connects.

    Raises on every connected process. RendezvousFailed: nothing answers at the coordinator's
    address, its port is taken, or processes did not connect. ConfigError: two have the same index,
    an index is out of range, or another process count, or a different description.
    """
    own = {
        "magic": _MAGIC,
        "count": slot.count,
        "index": slot.index,
        "host": socket.gethostname(),
        "description": description,
    }
    own = json.loads(json.dumps(own, default=repr))  # as the others will see it
    deadline = time.monotonic() + timeout
    problem, absent = (
        _host(slot, deadline, timeout, own, secret)
        if slot.index == 0
        else _visit(slot, deadline, timeout, own, secret)
    )
    if problem:
        raise (RendezvousFailed if absent else ConfigError)(problem)


def _host(
    slot: ProcessSlot, deadline: float, timeout: float, own: dict[str, Any], secret: Secret
) -> tuple[str, bool]:
    """Process 0's side. Returns the problem (empty: none), and whether the cause is that a process
    is absent.
    """
    host, port = slot.address
    try:
        listener = listen(
            port,
            (LOOPBACK if host == "localhost" else host) if is_loopback(host) else "",
            slot.count,
        )
    except OSError as error:
        return (
            (
                f"process 0 cannot listen on port {port}: {error.strerror}; choose a free port for "
                "launch.coordinator"
            ),
            True,
        )
    guests = _Guests(listener, slot.count, own, secret)
    quiet_until: float | None = time.monotonic() + QUIET
    try:
        missed = False
        while guests.presented < slot.count - 1 and not missed:
            time.sleep(_TICK)
            guests.hear()
            if quiet_until and time.monotonic() > quiet_until and (absent := guests.absent()):
                _say(
                    f"process 0 waits for {absent} of {slot.count} at {slot.coordinator}, for up "
                    f"to {timeout:g} s"
                )
                quiet_until = None
            if guests.problem:  # processes that are late should receive it too
                deadline = min(deadline, time.monotonic() + _GRACE)
            missed = time.monotonic() > deadline
        problem, missed = guests.problem, missed and not guests.problem
        if missed:
            problem = (
                f"{guests.absent()} of {slot.count} did not connect to {slot.coordinator} within "
                f"{timeout:g} s"
            )
            problem += (
                "; see their logs, check launch.processes, and that they can reach that "
                f"address{guests.refused}"
            )
        elif not problem and (left := guests.gone()):
            problem = (
                f"{number_ranges(left)} of {slot.count} connected to {slot.coordinator} and "
                "disconnected; see their logs"
            )
            missed = True
        guests.dismiss(problem, missed)
        return problem, missed
    finally:
        guests.close()


class _Guests:
    """The other processes, as process 0 sees them.

    Attributes:
      by_index: those that presented themselves.
      problem: why the run cannot start; empty: nothing is known.
      refused: what to add to a message about absent processes.
    """

    def __init__(
        self, listener: socket.socket, count: int, own: dict[str, Any], secret: Secret
    ) -> None:
        self._listener, self._count, self._own, self._secret = listener, count, own, secret
        self._callers: list[Peer] = []
        self._twins: list[Peer] = []
        self.by_index: dict[int, Peer] = {}
        self.problem = self.refused = ""
        listener.setblocking(False)

    @property
    def presented(self) -> int:
        """How many presented themselves, those that may not take part included."""
        return len(self.by_index) + len(self._twins)

    def hear(self) -> None:
        """Accepts connections, and reads what has arrived."""
        with contextlib.suppress(OSError):
            for _ in range(_CALLERS):
                self._callers.append(
                    Peer(self._listener.accept()[0], self._secret, _PURPOSE, serves=True)
                )
        most = max(_CALLERS, 2 * self._count)
        for caller in self._callers[:-most]:
            caller.close()
        self._callers = self._callers[-most:]
        for caller in [*self._callers]:
            if received := caller.receive():
                self._callers.remove(caller)
                self._present(caller, received[0])
            elif not caller.open or caller.age > _HANDSHAKE:
                self._callers.remove(caller)
                caller.close()
                if caller.refused:
                    if not self.refused:
                        _warn(
                            f"process 0 refused a connection from {caller.address}: "
                            f"{caller.refused}; {_SAME}"
                        )
                    self.refused = (
                        f"; the last connection that was refused came from {caller.address}: "
                        f"{caller.refused}"
                    )

    def _present(self, caller: Peer, other: dict[str, Any]) -> None:
        try:
            protocol.require(other, protocol.PRESENTED, *protocol.PRESENTED)
        except ValueError as error:
            self.refused = f"; a process at {caller.address} was not understood: {error}"
            return caller.close()
        index, known = other["index"], self.by_index.get(other["index"])
        if known:
            known.receive()
        if not 0 < index < self._count:
            self._twins.append(caller)
            self.problem = (
                f"a process on {other['host']} has the index {index} of {self._count}; "
                f"launch.index must be 0 to {self._count - 1}"
            )
        elif known and known.open:
            self._twins.append(caller)
            self.problem = (
                f"two processes have the index {index} of {other['count']}; each needs its own "
                "launch.index"
            )
        else:
            self.by_index[index] = caller
        self.problem = self.problem or _difference(self._own, other)

    def absent(self) -> str:
        """Returns the processes that have not presented themselves, as text; empty: all have."""
        return number_ranges(sorted({*range(1, self._count)} - self.by_index.keys()))

    def gone(self) -> list[int]:
        """Returns the processes that have hung up."""
        for peer in self.by_index.values():
            peer.receive()
        return sorted(index for index, peer in self.by_index.items() if not peer.open)

    def dismiss(self, problem: str, absent: bool) -> None:
        """Sends all processes the outcome. They hang up first, so that no socket on this port
        lingers when JAX binds it.
        """
        guests = [*self.by_index.values(), *self._twins]
        for guest in guests:
            guest.send(problem=problem[:_TEXT], absent=absent)
        deadline = time.monotonic() + _GRACE
        while any(guest.open for guest in guests) and time.monotonic() < deadline:
            time.sleep(_TICK)
            for guest in guests:
                guest.receive()

    def close(self) -> None:
        """Closes all connections."""
        for peer in [*self.by_index.values(), *self._twins, *self._callers]:
            peer.close()
        self._listener.close()


def _visit(
    slot: ProcessSlot, deadline: float, timeout: float, own: dict[str, Any], secret: Secret
) -> tuple[str, bool]:
    """The other processes' side. Returns as `_host` does."""
    why: object = "it did not answer"
    quiet_until: float | None = time.monotonic() + QUIET
    while True:
        try:
            connection = socket.create_connection(
                slot.address, timeout=max(0.01, deadline - time.monotonic())
            )
            with contextlib.closing(Peer(connection, secret, _PURPOSE, serves=False)) as host:
                host.send(**own)
                while (
                    host.open
                    and (host.proven or host.age < _HANDSHAKE)
                    and time.monotonic() < deadline + _GRACE + _HANDSHAKE
                ):
                    time.sleep(_TICK)
                    for answer in host.receive():
                        protocol.require(answer, protocol.OUTCOME, *protocol.OUTCOME)
                        return answer["problem"], answer["absent"]
                if host.refused and host.refused not in str(why):
                    _warn(
                        f"process {slot.index} found something at {slot.coordinator}, but "
                        f"{host.refused}; {_SAME}; trying again"
                    )
                why = (
                    f"{host.refused}: {_SAME}"
                    if host.refused
                    else "it hung up"
                    if not host.open
                    else why
                )
        except (OSError, ValueError) as error:
            why = error
        if quiet_until and time.monotonic() > quiet_until:
            _say(
                f"process {slot.index} waits for process 0 at {slot.coordinator}, for up to "
                f"{timeout:g} s"
            )
            quiet_until = None
        if time.monotonic() > deadline:
            how = (
                f"process {slot.index} found no process 0 at {slot.coordinator} within {timeout:g} "
                f"s ({why}); "
            )
            return how + "start it, or correct launch.coordinator", True
        time.sleep(_RETRY)


def _warn(text: str) -> None:
    """Prints what may keep this process waiting until its time is over."""
    _say(f"warning: {text}")


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _difference(first: dict[str, Any], other: dict[str, Any]) -> str:
    """Returns a message that lists the first fields in which a process differs from process 0;
    empty if there are none.
    """
    if other["count"] != first["count"]:
        return (
            f"process {other['index']} expects {other['count']} processes, process 0 expects "
            f"{first['count']}"
        )
    lines = _compare(first["description"], other["description"], "")
    if not lines:
        return ""
    head = (
        f"process {other['index']} on {other['host']} does not match process 0 on {first['host']}"
    )
    return listed(head, lines) + "\nstart all of them from the same files with the same arguments"


def _compare(a: Any, b: Any, path: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [
            line
            for key in dict.fromkeys([*a, *b])
            for line in _compare(a.get(key), b.get(key), f"{path}.{key}" if path else key)
        ]
    return [] if json.dumps(a) == json.dumps(b) else [f"{path}: {a} on process 0, {b} there"]
