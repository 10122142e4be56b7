"""Compiles a lowered program in a process of its own, so that XLA's abort becomes an error and
several programs compile at once.

XLA ends the whole process where one of its own checks fails (`F0000 ... Check failed`). So the
program, its compile options and the numbers of its devices are written into a folder, and a child
that `lab.server` forks compiles it and writes what a report needs.
"""

from __future__ import annotations

import atexit
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

# no public way leads to the compile options that JAX makes of a program's shardings
from jax._src import compiler as jax_compiler

from sharding_rules.lab.report import LabError
from sharding_rules.lab.server import MEMORY
from sharding_rules.lab.targets import TopologyRequest

_SINGLE_THREADED = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
"""numpy's libraries start threads when they are imported, and a process that forks must have
none."""

Memory = dataclasses.make_dataclass("Memory", [(name, int) for name in MEMORY], frozen=True)
"""The fields of `compiled.memory_analysis()` that a report needs."""


class Aborted(LabError):
    """XLA ended its process. `log` holds the lines that it wrote before."""

    def __init__(self, message: str, log: list[str]) -> None:
        super().__init__(message)
        self.log = log


def compile_in_child(
    lowered: Any, options: dict[str, Any], topology: TopologyRequest, folder: Path
) -> tuple[str, Any, list[str]]:
    """The text of the compiled program, its Memory, and the lines that XLA logged.

    folder: an empty directory, which must exist for as long as this runs. Raises LabError with
    XLA's own message where XLA refuses the program, and Aborted where it ends its process.
    """
    captured = _capture(lowered, options)
    (folder / "program.mlirbc").write_bytes(captured.module)
    (folder / "options.pb").write_bytes(captured.options)
    about = {
        "topology": dataclasses.asdict(topology),
        "devices": captured.devices,
        "environment": dict(os.environ),
    }
    (folder / "request.json").write_text(json.dumps(about), encoding="utf-8")
    status = server().compile(folder)
    log = (folder / "log.txt").read_text(errors="replace", encoding="utf-8").splitlines()
    if status < 0:
        raise Aborted(f"XLA's process ended with {_signal_name(-status)}", log)
    if status > 0:
        error = folder / "error.txt"
        raise LabError(
            error.read_text(encoding="utf-8") if error.exists() else "\n".join(log[-20:])
        )
    return (
        (folder / "program.txt").read_text(encoding="utf-8"),
        Memory(**json.loads((folder / "memory.json").read_text(encoding="utf-8"))),
        log,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# What JAX would give to XLA.


@dataclasses.dataclass
class _Captured(Exception):
    module: bytes
    options: bytes
    devices: list[int]
    """Their numbers in the topology, in the order of the program."""


_capturing = threading.local()
_PATCH = threading.Lock()


def _capture(lowered: Any, options: dict[str, Any]) -> _Captured:
    """The program as MLIR with its locations, and all compile options, those among them that follow
    from the program's shardings.
    """
    with _captured_here():
        try:
            lowered.compile(compiler_options=options)
        except _Captured as captured:
            return captured
    raise LabError("this version of JAX compiles in another way than the lab knows")


@contextmanager
def _captured_here() -> Iterator[None]:
    """In this thread a compilation raises _Captured meanwhile; in others it compiles."""
    with _PATCH:
        if not getattr(jax_compiler.compile_or_get_cached, "captures", False):
            jax_compiler.compile_or_get_cached = _catching(jax_compiler.compile_or_get_cached)
    _capturing.on = True
    try:
        yield
    finally:
        _capturing.on = False


def _catching(compile: Callable[..., Any]) -> Callable[..., Any]:
    def caught(
        backend: Any,
        module: Any,
        devices: Any,
        options: Any,
        callbacks: Any,
        executable_devices: Any,
        *more: Any,
    ) -> Any:
        if not getattr(_capturing, "on", False):
            return compile(backend, module, devices, options, callbacks, executable_devices, *more)
        code = io.BytesIO()
        module.operation.write_bytecode(code)
        raise _Captured(
            code.getvalue(),
            options.SerializeAsString(),
            [device.id for device in executable_devices],
        )

    caught.captures = True  # pyright: ignore[reportFunctionMemberAccess]
    return caught


# The server.


TURN = threading.RLock()
"""Held by a thread that traces, where several threads compile: JAX is not made to trace in two. A
wait for a child gives it up."""


class _Server:
    """A process that forks a child for each folder that is sent to it."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from sharding_rules.lab.server import serve; serve()"]
        path = os.pathsep.join(
            filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        )
        environment = os.environ | _SINGLE_THREADED | {"PYTHONPATH": path}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
            start_new_session=True,
            # the lines are names of folders
            encoding=sys.getfilesystemencoding(), errors=sys.getfilesystemencodeerrors(),
        )  # fmt: skip
        assert self._process.stdin and self._process.stdout
        self._requests: IO[str] = self._process.stdin
        self.owner = os.getpid()
        self._lock, self._changed = threading.Lock(), threading.Condition(TURN)
        self._done: dict[str, int] = {}
        self._ended = False
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        return not self._ended and self.owner == os.getpid()

    def compile(self, folder: Path) -> int:
        """The status of the child: 0, positive where it failed, minus the signal that ended it.
        Raises LabError without a server.
        """
        with self._lock:
            self._requests.write(f"{folder}\n")
            self._requests.flush()
        with self._changed:
            self._changed.wait_for(lambda: str(folder) in self._done or self._ended)
            if str(folder) not in self._done:
                raise LabError(
                    f"the process that starts compilations ended with status {self._process.poll()}"
                )
            return self._done.pop(str(folder))

    def _read(self, answers: IO[str]) -> None:
        for line in answers:
            status, _, folder = line.rstrip("\n").partition(" ")
            with self._changed:
                self._done[folder] = int(status)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends it, and the children that it still has."""
        if self.owner == os.getpid() and self._process.poll() is None:
            self._requests.close()
            self._process.wait()


_server: _Server | None = None
_START = threading.Lock()


def server() -> _Server:
    """This process's server, started where there is none. Starting it takes half a second, during
    which other threads may run.
    """
    global _server
    with _START:
        if _server is None or not _server.alive:
            _server = _Server()
        return _server
