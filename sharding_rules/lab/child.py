"""Compiles a lowered program in a process of its own.

XLA's abort becomes an error, and several programs can compile at once.

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
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

# No public way leads to the compile options that JAX makes of a program's shardings.
from jax._src import compiler as jax_compiler

from sharding_rules.lab.report import LabError
from sharding_rules.lab.server import MEMORY
from sharding_rules.lab.targets import TopologyRequest

# NumPy's libraries start threads when they are imported, and a process that forks must have none.
_SINGLE_THREADED = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

# Lines of the log that stand for XLA's message where it wrote none.
_LOG_TAIL = 20

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
    """Returns the text of the compiled program, its Memory, and the lines that XLA logged.

    folder: an empty directory, which must exist for as long as this runs. Raises LabError with
    XLA's own message where XLA refuses the program, and Aborted where it ends its process.
    """
    program = _capture(lowered, options)
    (folder / "program.mlirbc").write_bytes(program.module)
    (folder / "options.pb").write_bytes(program.options)
    request = {
        "topology": dataclasses.asdict(topology),
        "devices": program.devices,
        "environment": dict(os.environ),
    }
    (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")

    status = server().compile(folder)
    log = (folder / "log.txt").read_text(errors="replace", encoding="utf-8").splitlines()
    if status < 0:
        raise Aborted(f"XLA's process ended with {_signal_name(-status)}", log)
    if status > 0:
        error = folder / "error.txt"
        if error.exists():
            raise LabError(error.read_text(encoding="utf-8"))
        raise LabError("\n".join(log[-_LOG_TAIL:]))
    text = (folder / "program.txt").read_text(encoding="utf-8")
    memory = json.loads((folder / "memory.json").read_text(encoding="utf-8"))
    return text, Memory(**memory), log


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# What JAX would give to XLA.


@dataclasses.dataclass
class _Captured(Exception):
    """Raised in place of a compilation, with the program that JAX would have compiled."""

    module: bytes
    """The program as MLIR with its locations."""
    options: bytes
    """All compile options, with those that follow from the program's shardings."""
    devices: list[int]
    """Their numbers in the topology, in the order of the program."""


# Whether a compilation in this thread raises _Captured (`on`).
_capturing = threading.local()
_PATCH = threading.Lock()


def _capture(lowered: Any, options: dict[str, Any]) -> _Captured:
    with _PATCH:
        if not getattr(jax_compiler.compile_or_get_cached, "captures", False):
            jax_compiler.compile_or_get_cached = _capturing_compiler(
                jax_compiler.compile_or_get_cached
            )
    _capturing.on = True
    try:
        lowered.compile(compiler_options=options)
    except _Captured as program:
        return program
    finally:
        _capturing.on = False
    raise LabError("this version of JAX compiles in another way than the lab knows")


def _capturing_compiler(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps JAX's compiler for all threads; only those that capture notice."""

    def compile_or_capture(
        backend: Any,
        module: Any,
        devices: Any,
        options: Any,
        callbacks: Any,
        executable_devices: Any,
        *args: Any,
    ) -> Any:
        if not getattr(_capturing, "on", False):
            return compile(backend, module, devices, options, callbacks, executable_devices, *args)
        bytecode = io.BytesIO()
        module.operation.write_bytecode(bytecode)
        raise _Captured(
            bytecode.getvalue(),
            options.SerializeAsString(),
            [device.id for device in executable_devices],
        )

    compile_or_capture.captures = True  # pyright: ignore[reportFunctionMemberAccess]
    return compile_or_capture


# The server.


TURN = threading.RLock()
"""Held by a thread that traces, where several threads compile: JAX is not made to trace in two. A
wait for a child gives it up."""


class _Server:
    """A process that forks a child for each folder that is sent to it."""

    def __init__(self) -> None:
        root = str(Path(__file__).parents[2])
        python_path = os.environ.get("PYTHONPATH", "")
        environment = {
            **os.environ,
            **_SINGLE_THREADED,
            "PYTHONPATH": os.pathsep.join(filter(None, [root, python_path])),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", "from sharding_rules.lab.server import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            # The lines are names of folders.
            encoding=sys.getfilesystemencoding(),
            errors=sys.getfilesystemencodeerrors(),
        )
        assert self._process.stdin and self._process.stdout
        self._requests: IO[str] = self._process.stdin
        self._request_lock = threading.Lock()
        self.owner = os.getpid()
        # Notified of each answer. It holds TURN, which a wait therefore gives up.
        self._answered = threading.Condition(TURN)
        self._statuses: dict[str, int] = {}
        self._ended = False
        threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True).start()
        atexit.register(self.close)

    @property
    def alive(self) -> bool:
        """Whether it serves this process; a fork's parent's server does not."""
        return not self._ended and self.owner == os.getpid()

    def compile(self, folder: Path) -> int:
        """Returns the status of the child: 0, positive where it failed, or minus its signal.

        Raises LabError if the server has ended.
        """
        with self._request_lock:
            self._requests.write(f"{folder}\n")
            self._requests.flush()
        key = str(folder)
        with self._answered:
            self._answered.wait_for(lambda: key in self._statuses or self._ended)
            if key not in self._statuses:
                raise LabError(
                    f"the process that starts compilations ended with status {self._process.poll()}"
                )
            return self._statuses.pop(key)

    def _read(self, answers: IO[str]) -> None:
        for line in answers:
            status, _, folder = line.rstrip("\n").partition(" ")
            with self._answered:
                self._statuses[folder] = int(status)
                self._answered.notify_all()
        with self._answered:
            self._ended = True
            self._answered.notify_all()

    def close(self) -> None:
        """Ends the server, and the children that it still has."""
        if self.owner == os.getpid() and self._process.poll() is None:
            self._requests.close()
            self._process.wait()


_server: _Server | None = None
_START = threading.Lock()


def server() -> _Server:
    """Returns this process's server, started where there is none.

    Starting it takes half a second, during which other threads may run.
    """
    global _server
    with _START:
        if _server is None or not _server.alive:
            _server = _Server()
        return _server
