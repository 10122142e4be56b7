"""A process that forks a child for each folder on its standard input, which compiles the program in
it.

The process has imported JAX and has one thread, so that a fork is safe and a child begins without
an import. Each line of the input is a folder; each line of the output is a status and a folder.
Status: 0, 1 for an error in error.txt, -N for signal N. It ends with its input.
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
)


def serve() -> None:
    """Until the input ends."""
    from jax._src.interpreters import mlir  # noqa: F401 (imported once, before the forks)
    from jax.experimental import topologies  # noqa: F401

    # control-C is for the one who asks, whose end closes the input
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waiting = selectors.DefaultSelector()
    waiting.register(0, selectors.EVENT_READ, None)
    children: dict[int, tuple[int, str]] = {}
    begun = b""
    while True:
        for key, _ in waiting.select():
            if key.data is None:
                chunk = os.read(0, 65536)
                if not chunk:
                    for pid, _ in children.values():
                        os.kill(pid, signal.SIGKILL)
                    return
                *folders, begun = (begun + chunk).split(b"\n")
                for folder in folders:
                    end, pid = _fork(Path(os.fsdecode(folder)))
                    children[end] = pid, os.fsdecode(folder)
                    waiting.register(end, selectors.EVENT_READ, "child")
            else:  # the child holds the other end of this pipe until it is gone
                pid, folder = children.pop(key.fd)
                waiting.unregister(key.fd)
                os.close(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                os.write(1, f"{status} ".encode() + os.fsencode(folder) + b"\n")


def _fork(folder: Path) -> tuple[int, int]:
    """The end of a pipe that closes with the child, and the child's number."""
    end, others = os.pipe()
    if pid := os.fork():
        os.close(others)
        return end, pid
    status = 1
    try:
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        compile_folder(folder)
        status = 0
    except BaseException as error:
        (folder / "error.txt").write_text(str(error), encoding="utf-8", errors="backslashreplace")
    finally:
        os._exit(status)


def compile_folder(folder: Path) -> None:
    """Reads program.mlirbc, options.pb and request.json; writes program.txt (scheduled HLO) and
    memory.json. Raises what XLA raises.
    """
    from jax._src.interpreters import mlir
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]
    from jaxlib.mlir import ir

    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    os.environ.clear()
    os.environ.update(request["environment"])
    devices = {device.id: device for device in topology_of(TopologyRequest(**request["topology"]))}
    program = ir.Module.parse((folder / "program.mlirbc").read_bytes(), mlir.make_ir_context())
    compiled = next(iter(devices.values())).client.compile(
        program,
        executable_devices=_jax.DeviceList(tuple(devices[number] for number in request["devices"])),
        compile_options=_jax.CompileOptions.ParseFromString((folder / "options.pb").read_bytes()),
    )
    (folder / "program.txt").write_text(
        "\n\n".join(module.to_string() for module in compiled.hlo_modules()), encoding="utf-8"
    )
    stats = compiled.get_compiled_memory_stats()
    (folder / "memory.json").write_text(
        json.dumps({name: int(getattr(stats, name)) for name in MEMORY}), encoding="utf-8"
    )
