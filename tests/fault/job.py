"""Runs train.py under the launcher in real processes, for tests that inject faults."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from processes import PATIENCE, ROOT, environment

WORKER = Path(__file__).with_name("worker.py")
STEPS, EVERY = 20, 5
HEARTBEAT, STALL = 8, 6
"""health.heartbeat (and --heartbeat) and health.stall of these runs, in seconds."""
FIELDS: dict[str, object] = {
    "model.n_layers": 2, "model.d_model": 32, "model.n_heads": 4, "model.seq_len": 32,
    "model.vocab_size": 512, "model.dropout": 0.1,
    "data.tokenizer_vocab": 512, "data.threads": 1, "train.global_batch": 16, "train.steps": STEPS,
    "train.log_every": 1,
    "train.eval_every": 0, "train.eval_sequences": 16, "train.sample_tokens": 0,
    "optimizer.warmup_steps": 2,
    "optimizer.learning_rate": 3e-4, "data.max_epochs": 0,
    "checkpoint.every": EVERY, "health.stall": STALL, "health.patience": 60,
    "health.heartbeat": HEARTBEAT,
    "mesh.data": 2, "mesh.fsdp": 2, "rules": "hsdp",
}  # fmt: skip
"""Options of a run on four devices, with dropout and two mesh axes."""


def corpus(directory: Path) -> Path:
    path = directory / "corpus.txt"
    path.write_text(inspect.getsource(argparse), encoding="utf-8")
    return path


def arguments(data: Path, output: Path, **changes: object) -> list[str]:
    values = FIELDS | {
        "data.path": data,
        "data.cache": data.parent / "cache",
        "launch.compile_cache": data.parent / "xla",
    }
    values["output"] = output
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [
        f"--config={ROOT}/configs/gpt_tiny.py",
        *(f"--config.{name}={value}" for name, value in values.items()),
    ]


class Job:
    """A launcher and its workers. As a context manager it leaves no process running."""

    def __init__(self, faults: Path, arguments: list[str], *, workers: int = 2, devices: int = 2, options: Sequence[str] = (),
                 prefix: Sequence[str] = (), **variables: str) -> None:  # fmt: skip
        """faults: a directory for worker.py; options: launcher options; prefix: a command to run
        the launcher under."""
        faults.mkdir(exist_ok=True)
        self.faults, self.lines = faults, []
        self.moments: list[float] = []
        launch = [
            sys.executable,
            "-m",
            "mesh_lm.launch",
            f"--per-node={workers}",
            f"--devices={devices}",
            f"--heartbeat={HEARTBEAT}",
        ]
        self.process = subprocess.Popen(
            [*prefix, *launch, *options, str(WORKER), *arguments],
            env=environment(MESH_LM_FAULTS=str(faults), **variables), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            self.moments.append(time.monotonic())

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def fault(self, process: int, step: int, what: str) -> None:
        (self.faults / f"{process}-{step}-{what}").touch()

    def wait(self, pattern: str, count: int = 1) -> float:
        """Returns when (time.monotonic) the `count`-th matching line was printed. Raises
        AssertionError if none is."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = [
                moment
                for line, moment in zip([*self.lines], [*self.moments], strict=False)
                if re.search(pattern, line)
            ]
            if len(found) >= count:
                return found[count - 1]
            if self.process.poll() is not None and not self._reader.is_alive():
                break
            time.sleep(0.02)
        raise AssertionError(f"no line {pattern!r} in\n{self.log}")

    def pids(self) -> list[int]:
        """Returns the process ids of the workers, in their order."""
        found = subprocess.run(
            ["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True
        ).stdout.split()
        return sorted(map(int, found))

    def ended(self) -> int:
        """Waits for the end and returns the exit status; `lines` then has all output."""
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"hung for {PATIENCE:g} s:\n{self.log}") from None
        self._reader.join(10)
        return status

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in [*self.pids(), self.process.pid]:
            for send in (os.kill, os.killpg):
                try:
                    send(pid, signal.SIGKILL)
                except OSError:
                    continue
        self.process.wait()


def certificates(log: str) -> Mapping[int, str]:
    """Returns {step: "state ..., samples ..."} for the last save of each step."""
    return {
        int(step): proof
        for step, proof in re.findall(r"saving step (\d+) \((state \w+, samples \w+)\)", log)
    }
