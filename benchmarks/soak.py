"""Half an hour of faults: a run of two processes with a random fault every 60 to 120 seconds must
end with the right parameters.

An undisturbed run, which also loads the machine, runs at the same time as one with faults: kill -9
of a worker (the first one is the coordinator), SIGSTOP of one, SIGTERM to the launcher and the same
command again, kill -9 of launcher and workers and the same command again, a flipped bit in the
newest checkpoint just before a kill, a full disk for a while. Both must have the same bits at their
last step, and have read the same samples. The results include the launcher's log and the goodput.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from record import ROOT, Record, Row, options

from mesh_lm.training import goodput

EVERY = 25
FIELDS = {
    "model.n_layers": 2, "model.d_model": 64, "model.n_heads": 4, "model.seq_len": 64,
    "model.dropout": 0.1, "train.global_batch": 16,
    "train.log_every": 20, "train.eval_every": 0, "train.eval_sequences": 16,
    "train.sample_tokens": 0, "checkpoint.every": EVERY,
    "mesh.data": 2, "mesh.fsdp": 2, "rules": "hsdp", "data.max_epochs": 0,
    "health.stall": 20, "health.heartbeat": 10, "health.replicas": EVERY,
}  # fmt: skip
PACE = 0.25
"""The least seconds per step of the disturbed run."""


@dataclasses.dataclass
class Run:
    """The launcher, restarted after a fault that ended it, as a person or a scheduler would do."""

    output: Path
    steps: int
    pace: float
    starts: int = 0
    lines: list[str] = dataclasses.field(default_factory=list)

    def start(self) -> None:
        self.starts += 1
        fields = FIELDS | {"train.steps": self.steps, "output": self.output}
        worker = str(ROOT / "benchmarks" / "soak_worker.py")
        command = [
            sys.executable,
            "-m",
            "mesh_lm.launch",
            "--per-node=2",
            "--devices=2",
            "--heartbeat=10",
            worker,
        ]
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "MESH_LM_PACE": str(self.pace),
        }
        self.process = subprocess.Popen(
            [*command, *(f"--config.{name}={value}" for name, value in fields.items())],
            env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(self.process,), daemon=True).start()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(f"{time.strftime('%H:%M:%S')} {line.rstrip()}")

    def say(self, text: str) -> None:
        self.lines.append(f"{time.strftime('%H:%M:%S')} --- {text}")
        print(self.lines[-1], flush=True)

    def workers(self) -> list[int]:
        pids = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True
        ).stdout.split()
        return sorted(map(int, pids))

    def stop(self) -> None:
        """Kills the launcher and its workers."""
        for pid in [self.process.pid, *self.workers()]:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def again(self) -> None:
        """Waits until the launcher ends, and starts it again."""
        self.process.wait()
        self.say(f"the launcher ended with {self.process.returncode}; the same command again")
        self.start()


def kill(run: Run, chance: random.Random) -> str:
    process = chance.randrange(2)
    os.kill(run.workers()[process], signal.SIGKILL)
    return f"kill -9 of process {process}"


def stop(run: Run, chance: random.Random) -> str:
    process = chance.randrange(2)
    os.kill(run.workers()[process], signal.SIGSTOP)
    return f"SIGSTOP of process {process}"


def terminate(run: Run, chance: random.Random) -> str:
    run.process.terminate()
    threading.Thread(target=run.again, daemon=True).start()
    return "SIGTERM to the launcher"


def kill_all(run: Run, chance: random.Random) -> str:
    workers = run.workers()
    for pid in [run.process.pid, *workers]:
        os.kill(pid, signal.SIGKILL)
    threading.Thread(target=run.again, daemon=True).start()
    return "kill -9 of the launcher and of all processes"


def flip(run: Run, chance: random.Random) -> str:
    steps = sorted(
        (path for path in (run.output / "checkpoints").iterdir() if path.name.isdecimal()),
        key=lambda path: int(path.name),
    )
    files = [path for path in steps[-1].rglob("*") if path.is_file() and path.stat().st_size]
    file = chance.choices(files, [path.stat().st_size for path in files])[0]
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)
    return f"a bit of {file.relative_to(run.output)} flipped, then {kill(run, chance)}"


def fill(run: Run, chance: random.Random) -> str:
    """Fills the disk, if the output is a file system of its own (one could be mounted)."""
    ballast = run.output / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

    def over() -> None:
        ballast.unlink(missing_ok=True)
        if run.process.poll():  # the last save did not fit on the disk
            run.again()

    threading.Timer(30, over).start()
    return "the disk filled for 30 s"


FAULTS: tuple[Callable[[Run, random.Random], str], ...] = (kill, stop, terminate, kill_all, flip)


def disturbed(
    run: Run,
    faults: tuple[Callable[[Run, random.Random], str], ...],
    between: tuple[float, float],
    seed: int,
) -> list[Row]:
    """Runs to the end. Returns a row for each fault, with the seconds until the run steps again."""
    chance, rows, start_time = random.Random(seed), [], time.monotonic()
    run.start()
    turn = 0
    while True:
        due = time.monotonic() + chance.uniform(*between)
        while time.monotonic() < due and not (
            run.process.poll() is not None and run.process.returncode == 0
        ):
            time.sleep(0.2)
        if run.process.poll() == 0:
            return rows
        if (run.output / "ballast").exists():
            continue
        if run.process.poll():  # ended by a fault
            raise SystemExit(
                f"the launcher ended with {run.process.returncode}:\n" + "\n".join(run.lines[-40:])
            )
        if len(run.workers()) < 2 or not (run.output / "checkpoints").is_dir():
            continue  # it is still starting
        struck, count = time.monotonic(), len(run.lines)
        try:
            fault = faults[turn % len(faults)](run, chance)
        except (OSError, IndexError):
            continue  # it ended before it was hit
        turn += 1
        run.say(fault)
        while (
            not any(re.search(r" step +\d+/\d+ ", line) for line in run.lines[count:])
            and run.process.poll() != 0
        ):
            if time.monotonic() > struck + 300:
                raise SystemExit("no step for 300 s after: " + fault)
            time.sleep(0.1)
        rows.append(
            {
                "at_s": struck - start_time,
                "fault": fault,
                "next_line_of_progress_s": time.monotonic() - struck,
            }
        )


def final(run: Run) -> str:
    matches = re.findall(
        rf"saving step {run.steps} \((state \w+, samples \w+)\)", "\n".join(run.lines)
    )
    if not matches:
        raise SystemExit("the run did not end:\n" + "\n".join(run.lines[-40:]))
    return matches[-1]


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument(
        "--minutes", type=float, default=30, help="about how long the disturbed run takes"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    minutes, between = (
        (1.0, (10.0, 15.0)) if arguments.quick else (arguments.minutes, (60.0, 120.0))
    )
    # the rest of the time is load, restarts and repeated steps
    steps = round(minutes * 60 / PACE * 0.36 / EVERY) * EVERY
    record = Record(f"soak{'-quick' * arguments.quick}", arguments.output)
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        (disk := Path(directory) / "disturbed").mkdir()
        mounted = (
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk)], capture_output=True
            ).returncode
            == 0
        )
        alone = run = None
        try:
            alone = Run(Path(directory) / "alone", steps, 0.0)
            alone.start()
            run = Run(disk, steps, PACE)
            rows = disturbed(run, (*FAULTS, fill) if mounted else FAULTS, between, arguments.seed)
            alone.process.wait(steps)  # a second per step is many times what it needs
            time.sleep(1)  # until its last output has been read
            outcome, expected, spent = final(run), final(alone), goodput.total(disk / "goodput")
            log = "\n".join(run.lines) + "\n"
            for private, shown in (
                (directory, "..."),
                (str(ROOT), "."),
                (sys.prefix, "<environment>"),
                (sys.base_prefix, "<python>"),
            ):
                log = log.replace(private, shown)
        finally:
            for each in filter(None, (alone, run)):
                each.stop()
            if mounted:
                subprocess.run(["umount", "-l", str(disk)])
    same = outcome == expected
    note = (
        f"{steps} steps of two processes with two devices each, a checkpoint every {EVERY}; "
        f"{len(rows)} faults, {run.starts} starts of the launcher, {spent['starts']} of the "
        f"processes. At the end: {outcome}; undisturbed: {expected}: "
        f"{'the same' if same else 'NOT THE SAME'}."
    )
    record.table("Faults", rows, note)
    record.table("Where the time went", [{"phase": phase, "seconds": value} for phase, value in spent["seconds"].items()],
                 goodput.describe(spent))  # fmt: skip
    record.write()
    (arguments.output / f"{record.stem}.log").write_text(log, encoding="utf-8")
    return 0 if same and len(rows) >= (1 if arguments.quick else len(FAULTS)) else 1


if __name__ == "__main__":
    sys.exit(main())
