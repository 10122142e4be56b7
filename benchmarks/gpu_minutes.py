"""As many measurements on one GPU as fit into some seconds, the most important first: python
benchmarks/gpu_minutes.py --seconds=330

gpu_minutes.md has the blocks, with what each needs and shows. Each runs in a process group of its
own, with a time limit; one that hangs or crashes costs itself alone. One whose least time is not
left is skipped, and a shorter one after it may still run. Results are written after each row, and
each row is also a line of JSON on the standard output. `--resume` with the same --output takes over
the blocks and rows that an earlier command has measured, on the same kind of device and with the
same kernels. `--dry-run` does all of it on a CPU, with tiny shapes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import IO, Any

import gpu_attention
import gpu_kernels
import gpu_training
import gpu_truth
import gpu_twins
from forked import Forked, preload
from gpu_lab import Lab, kind_of_device, nvidia_driver
from gpu_resume import Earlier
from gpu_session import (
    Block,
    Results,
    Session,
    end_with_parent,
    interrupted_by_sigterm,
    locked,
    say,
    seconds_of,
    tell,
)
from record import Record, Row, options

NAME = "gpu_minutes"
BLOCKS = (
    Block(gpu_training.training, 110, 220),
    Block(gpu_twins.steps_124m, 70, 130),
    Block(gpu_twins.steps_1_3b, 110, 240),
    Block(gpu_twins.trace_124m, 45, 120),
    Block(gpu_twins.trace, 90, 180),
    Block(gpu_kernels.grouped_repaired, 35, 80),
    Block(gpu_attention.changed, 45, 120),
    Block(gpu_kernels.autotune, 60, 160),
    Block(gpu_kernels.smoke, 60, 120),
    Block(gpu_truth.matmul, 30, 110),
    Block(gpu_truth.elementwise, 20, 60),
    Block(gpu_attention.headline, 45, 90),
    Block(gpu_attention.correct, 60, 240),
    Block(gpu_kernels.variants, 60, 120),
    Block(gpu_kernels.stacked, 40, 90),
    Block(gpu_attention.peers, 90, 240),
    Block(gpu_attention.deviceless, 30, 60),
)
"""In the order in which they run."""
MARGIN = 4.0
"""Seconds before a block's limit at which it stops starting anything, so that it ends by itself."""
SECONDS = 330.0
SLOW = 4
"""The factor of a block's limit in a dry run."""


def main() -> int:
    """Runs the command line. Returns the exit status: 1 if a block failed, or nothing could be
    measured for a fault of the machine."""
    start_time = time.monotonic()
    parser = options(
        __doc__ or "",
        quick="--dry-run",
        quick_help="the same on a CPU, with tiny shapes, as a rehearsal",
    )
    names = [block.name for block in BLOCKS]
    parser.add_argument(
        "--seconds",
        type=seconds_of,
        default=SECONDS,
        help="for everything, the start included (default: %(default)g)",
    )
    parser.add_argument(
        "--blocks", default="", help=f"which, with commas: {', '.join(names)} (default: all)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="take over what an earlier command measured with the same --output",
    )
    parser.add_argument("--block", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.block:
        return run_block(**json.loads(arguments.block))
    chosen = arguments.blocks.split(",") if arguments.blocks else names
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"no block {unknown[0]!r}; there are {', '.join(names)}")
    interrupted_by_sigterm()
    try:
        with (
            locked(arguments.output) as refusal,
            tempfile.TemporaryDirectory(prefix=f"{NAME}-") as directory,
        ):
            if refusal:
                say(f"not started: {refusal}")
                return 1
            blocks = [block for block in BLOCKS if block.name in chosen]
            if arguments.dry_run:
                # tiny shapes, but perhaps a busy CPU
                blocks = [block._replace(least=5.0, most=SLOW * block.most) for block in blocks]
            return measure(arguments, blocks, Path(directory), start_time)
    except KeyboardInterrupt:
        say("interrupted; the rows so far are kept")
        return 130
    except OSError as error:
        say(f"not started: {error}")
        return 1


def measure(
    arguments: argparse.Namespace, blocks: list[Block], directory: Path, start_time: float
) -> int:
    """Probes the device, and runs the blocks. Returns the exit status."""
    if arguments.dry_run:
        preload(directory)
    device = probed(directory, arguments.dry_run)
    if isinstance(device, str):
        say(device)
        return int(not device.startswith("no GPU"))
    driver = nvidia_driver()
    kind = kind_of_device(device, driver)
    name = f"{NAME}{'-dry-run' * arguments.dry_run}"
    record = Record(name, arguments.output, kind=kind, device=device, driver=driver)
    results = Results(record, earlier_of(arguments.output, name, kind, arguments.resume))
    job: Row = {
        "output": str(arguments.output.resolve()),
        "kind": kind,
        "device": device,
        "dry_run": arguments.dry_run,
    }
    job |= {"resume": arguments.resume, "file": name, "caches": str(directory)}

    def start(block: Block, seconds: float, found: Row, stderr: IO[str]) -> subprocess.Popen[bytes]:
        words = job | {
            "name": block.name,
            "seconds": seconds,
            "found": found,
            "directory": str(directory / block.name),
        }
        streams: Row = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": stderr,
            "start_new_session": True,
        }
        if arguments.dry_run:
            return Forked(partial(run_block, **words), **streams)  # type: ignore[return-value]
        return subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), f"--block={json.dumps(words)}"],
            **streams,
        )

    session = Session(results, start_time + arguments.seconds, start, directory / "log")
    status = session.run(blocks, lanes=2 if arguments.dry_run else 1)
    say(
        "imported though a GPU machine may lack it: "
        f"{', '.join(sorted(session.modules)) or 'nothing'}"
    )
    say(
        f"{time.monotonic() - start_time:.0f} s of {arguments.seconds:g}; results: "
        f"{record.stem}.json and .md in {arguments.output.name}/"
    )
    return status


def earlier_of(output: Path, name: str, kind: str, resume: bool) -> Earlier:
    """Returns what an earlier command has measured. A file that cannot be read counts as none."""
    path = output / f"{name}.parts.json"
    try:
        return Earlier(path, kind, resume)
    except (OSError, ValueError, KeyError) as error:
        say(f"{path.name} cannot be read ({type(error).__name__}): everything is measured again")
        return Earlier(path, kind, use=False)


def probed(directory: Path, dry_run: bool) -> Row | str:
    """Returns the device that JAX finds; or in one line why it cannot be measured."""
    lab = Lab(directory, dry_run)
    lab.forks = dry_run
    device = next(iter(lab.run("probe", worker="device_worker.py")), None)
    if device is None:
        reason = " ".join("; ".join(lab.problems).split())
        return f"JAX cannot use the device: {reason[:400]}"
    if device["platform"] != "gpu" and not dry_run:
        return (
            f"no GPU that JAX can use here (platform {device['platform']}): nothing measured; "
            "--dry-run rehearses on the CPU"
        )
    return device


def run_block(
    name: str,
    seconds: float,
    output: str,
    directory: str,
    caches: str,
    device: Row,
    kind: str,
    dry_run: bool,
    resume: bool,
    file: str,
    found: dict[str, Any],
) -> int:
    """Runs one block in this process. Returns the exit status."""
    end_with_parent()
    block = next(block for block in BLOCKS if block.name == name)
    Path(directory).mkdir()
    lab = Lab(Path(directory), dry_run)
    lab.forks = dry_run
    lab.deadline = time.monotonic() + seconds - MARGIN
    lab.output, lab.caches, lab.device, lab.found = Path(output), Path(caches), device, found
    lab.environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several processes share the GPU
    if not dry_run:
        lab.implementations = sorted(
            device["implementations"], key=lambda name: ("xla", "cudnn", name).index(name)
        )
    lab.known = earlier_of(Path(output), file, kind, resume).row
    lab.progress = lambda title, rows, note: tell("TABLE", title=title, rows=rows, note=note)
    with lab.power:
        try:
            for title, rows, note in block.run(lab):
                lab.progress(title, rows, note)
        except Exception as error:
            lab.problems.append(f"{type(error).__name__}: {error}")
    problems = [" ".join(problem.split()) for problem in lab.problems]
    tell(
        "DONE",
        problems=problems,
        left_out=lab.left_out,
        found=lab.found,
        modules=sorted(lab.modules),
        logs=lab.logs,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
