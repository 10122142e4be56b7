"""A process that compiles programs, each in a child that it forks.

The process has imported JAX and has one thread, so that a fork is safe and a child begins without
an import. Each line of its input is a folder with a program; each line of its output is a status
and a folder. Status: 0, 1 for an error in error.txt, -N for signal N. It ends with its input.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
from pathlib import Path

from sharding_rules.lab.targets import TopologyRequest, topology_of

MEMORY = (
    "peak_memory_in_bytes",
    "argument_size_in_bytes",
    "output_size_in_bytes",
    "alias_size_in_bytes",
    "temp_size_in_bytes",
    "host_argument_size_in_bytes",
    "host_output_size_in_bytes",
    "host_alias_size_in_bytes",
    "host_temp_size_in_bytes",
)
"""Fields of XLA's memory statistics that memory.json has."""

_STDIN = 0
_STDOUT = 1
_STDERR = 2


def serve() -> None:
    """Compiles the folders of the standard input until it ends."""
    # Imported once, before the forks.
    from jax._src.interpreters import mlir  # noqa: F401
    from jax.experimental import topologies  # noqa: F401

    # Control-C is for the parent, whose end closes the input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector = selectors.DefaultSelector()
    selector.register(_STDIN, selectors.EVENT_READ)
    children: dict[int, tuple[int, str]] = {}  # by the end of a pipe: process and folder
    incomplete_line = b""
    while True:
        for key, _ in selector.select():
            if key.fd != _STDIN:
                # The child has held the other end of this pipe until it was gone.
                pid, folder = children.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pid, 0)
                exit_code = os.waitstatus_to_exitcode(status)
                os.write(_STDOUT, f"{exit_code} ".encode() + os.fsencode(folder) + b"\n")
                continue
            chunk = os.read(_STDIN, 65536)
            if not chunk:
                for pid, _ in children.values():
                    os.kill(pid, signal.SIGKILL)
                return
            *lines, incomplete_line = (incomplete_line + chunk).split(b"\n")
            for line in lines:
                folder = os.fsdecode(line)
                pipe, pid = _fork(Path(folder))
                children[pipe] = (pid, folder)
                selector.register(pipe, selectors.EVENT_READ)


def _fork(folder: Path) -> tuple[int, int]:
    """Returns the end of a pipe that closes with the child, and the child's number."""
    pipe, child_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(child_end)
        return pipe, pid
    status = 1
    try:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, _STDOUT)
        os.dup2(log, _STDERR)
        compile_folder(folder)
        status = 0
    except BaseException as error:
        (folder / "error.txt").write_text(str(error), encoding="utf-8", errors="backslashreplace")
    finally:
        os._exit(status)


def compile_folder(folder: Path) -> None:
    """Compiles the program in a folder. Raises what XLA raises.

    Reads program.mlirbc, options.pb and request.json; writes program.txt (scheduled HLO) and
    memory.json.
    """
    from jax._src.interpreters import mlir
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]
    from jaxlib.mlir import ir

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    os.environ.clear()
    os.environ.update(request["environment"])
    devices = {device.id: device for device in topology_of(TopologyRequest(**request["topology"]))}
    client = next(iter(devices.values())).client
    program = ir.Module.parse((folder / "program.mlirbc").read_bytes(), mlir.make_ir_context())
    compiled = client.compile(
        program,
        executable_devices=_jax.DeviceList(tuple(devices[number] for number in request["devices"])),
        compile_options=_jax.CompileOptions.ParseFromString((folder / "options.pb").read_bytes()),
    )
    text = "\n\n".join(module.to_string() for module in compiled.hlo_modules())
    (folder / "program.txt").write_text(text, encoding="utf-8")
    stats = compiled.get_compiled_memory_stats()
    memory = {name: int(getattr(stats, name)) for name in MEMORY}
    (folder / "memory.json").write_text(json.dumps(memory), encoding="utf-8")
