"""Where the parts of gpu_smoke.py run their tasks: processes with a time limit, their rows, and what went wrong in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from record import ROOT, Row

TINY = {"vocab_size": 256, "seq_len": 32, "n_layers": 2, "d_model": 32, "n_heads": 2, "vocab_multiple": 16, "loss_chunk": 64}
"""The model of a dry run."""


class Lab:
    """Runs tasks of gpu_worker.py until `deadline` (time.monotonic), and keeps what goes wrong."""

    def __init__(self, directory: Path, dry_run: bool) -> None:
        self.directory, self.dry_run, self.deadline = directory, dry_run, time.monotonic() + 90
        self.problems: list[str] = []
        self.logs: dict[str, str] = {}
        self.modules: set[str] = set()
        self.implementations = ["xla", "auto"]
        self.n = 0

    def left(self) -> float:
        """Seconds until this part must end."""
        return self.deadline - time.monotonic()

    def run(self, task: str, *, flags: str = "", platform: str = "", cache: str = "", **arguments: Any) -> list[Row]:
        """The rows of a task; those without result, a failed process and a time limit are noted as problems."""
        what = f"{task} {flags} {platform}".strip()
        if self.left() < 1:
            self.problems.append(f"{what}: not started, no time left")
            return []
        process, out, err = self.start(task, flags=flags, platform=platform, cache=cache, **arguments)
        try:
            if status := process.wait(timeout=self.left()):
                self.note(f"{what}: exit status {status}", err)
        except subprocess.TimeoutExpired:
            self.note(f"{what}: stopped at the time limit", err)
        finally:
            process.kill()
            process.wait()
        rows = self.rows(out)
        for row in rows:
            if "error" in row:
                variant = " ".join(f"{key}={value}" for key, value in row.items() if key != "error" and not isinstance(value, float))
                self.problems.append(f"{what} {variant}: {row['error']}")
        return rows

    def note(self, problem: str, err: Path) -> None:
        """A problem whose cause is in a process's stderr: the last line becomes part of it, and the end is kept for the results."""
        log = err.read_text().strip()
        for path in (self.directory, ROOT, Path(sys.prefix), Path(sys.base_prefix), Path.home()):
            log = log.replace(f"{path}/", "")
        self.problems.append(f"{problem}: {log.splitlines()[-1][:400] if log else 'no message'}")
        self.logs[f"{problem} ({len(self.logs) + 1})"] = log[-4000:]

    def start(
        self, task: str, *, flags: str = "", platform: str = "", cache: str = "", **arguments: Any
    ) -> tuple[subprocess.Popen[bytes], Path, Path]:
        """(process, its stdout, its stderr).

        flags: added to XLA_FLAGS. platform: JAX_PLATFORMS. cache: name of a compilation cache for the processes that give the same one; the
        one named "tuned" also keeps which matmul algorithms were fastest; empty: none.
        """
        self.n += 1
        out, err = (self.directory / f"{self.n}-{task}.{kind}" for kind in ("out", "err"))
        if self.dry_run:
            flags, platform, cache = f"{flags} --xla_backend_optimization_level=0", "cpu", "dry-run"
        environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "xla_gpu_per_fusion_autotune_cache_dir" if cache == "tuned" else "none"
        if cache:
            environment["JAX_COMPILATION_CACHE_DIR"] = str(self.directory / cache)
        if platform:
            environment["JAX_PLATFORMS"] = platform
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu_worker.py"), task, json.dumps(arguments)]
        with out.open("w") as stdout, err.open("w") as stderr:
            return subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment, cwd=ROOT), out, err

    def rows(self, out: Path) -> list[Row]:
        """What a task has printed so far, but for a line cut short by its end."""
        lines = [line.partition(" ") for line in out.read_text().rpartition("\n")[0].splitlines()]
        self.modules |= {name for kind, _, text in lines if kind == "MODULES" for name in json.loads(text)}
        return [json.loads(text) for kind, _, text in lines if kind == "ROW"]

    def gpt2(self, batch: int, layers: int = 12) -> dict[str, Any]:
        """The directory and the config of a GPT-2 124M in bf16 (tiny in a dry run), with a schedule that learns from the first step on."""
        model = TINY if self.dry_run else {"n_layers": layers}
        train = {"global_batch": 8 if self.dry_run else batch, "microbatches": 1, "steps": 1000}
        optimizer = {"warmup_steps": 2, "learning_rate": 1e-2 if self.dry_run else 1e-3}
        return {"directory": str(self.directory), "changes": {"model": model, "train": train, "optimizer": optimizer}}
