"""Several processes of one run on this machine, over gloo on CPU: to try on a laptop what several hosts will do.

python -m mesh_lm.launch --processes=2 --devices=4 train.py --config=configs/gpt_tiny.py --config.mesh.tensor=2
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import IO

from mesh_lm.launch.place import VARIABLES

_GRACE = 10.0
"""Seconds between SIGTERM and SIGKILL for those that are left when one process has failed."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script `--processes` times and returns the first status that is not 0; when one fails, the others are stopped."""
    words, argv = [], list(sys.argv[1:] if argv is None else argv)
    while argv and argv[0].startswith("--"):
        words += [argv.pop(0)] if "=" in argv[0] or len(argv) == 1 or argv[0] == "--help" else [argv.pop(0), argv.pop(0)]
    parser = argparse.ArgumentParser(
        prog="python -m mesh_lm.launch", usage="%(prog)s [--processes=N] [--devices=N] SCRIPT|-m MODULE [argument ...]",
        description=(__doc__ or "").split("\n")[0],
    )  # fmt: skip
    parser.add_argument("--processes", type=_count, default=2, help="processes to start (default 2)")
    parser.add_argument("--devices", type=_count, default=1, help="CPU devices of each (default 1)")
    options = parser.parse_args(words)
    if not argv or (argv[0].startswith("-") and argv[0] != "-m") or argv == ["-m"]:
        parser.error("name a Python script, such as train.py, or -m and a module, such as mesh_lm.generate")
    address = f"127.0.0.1:{free_port()}"
    workers = [_start(argv, options, index, address) for index in range(options.processes)]

    def forward(number: int, frame: FrameType | None) -> None:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    readers = [threading.Thread(target=_relay, args=(worker.stdout, index)) for index, worker in enumerate(workers)]
    for reader in readers:
        reader.start()
    status = _wait(workers)
    for reader in readers:
        reader.join()
    for number, handler in before.items():
        signal.signal(number, handler)
    return status


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{count} must be at least 1")
    return count


def _start(program: list[str], options: argparse.Namespace, index: int, address: str) -> subprocess.Popen[bytes]:
    place = {"coordinator": address, "processes": str(options.processes), "index": str(index)}
    environment = os.environ | {VARIABLES[field]: value for field, value in place.items()}
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.devices)}
    command = [sys.executable, "-u", *program]
    # Sessions of their own, so that Ctrl-C reaches them once, through this process.
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)


def _relay(lines: IO[bytes] | None, index: int) -> None:
    """Prints what a process prints; lines of all but the first are marked, where they are not already."""
    mark = f"[process {index}] ".encode()
    for line in lines or ():
        if b"[Gloo] Rank" in line or b"peer ranks" in line:  # one for every group of devices, at times in pieces
            continue
        sys.stdout.buffer.write(line if index == 0 or line.startswith(mark) else mark + line)
        sys.stdout.buffer.flush()


def _wait(workers: list[subprocess.Popen[bytes]]) -> int:
    while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
        time.sleep(0.05)
    status = next((worker.returncode for worker in workers if worker.returncode), 0)
    # The others usually end by themselves with the same error, which is worth reading.
    for act, wait in ((None, 2.0), (subprocess.Popen.terminate, _GRACE), (subprocess.Popen.kill, _GRACE)):
        deadline = time.monotonic() + wait
        for worker in workers:
            if act and worker.poll() is None:
                act(worker)
        while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
