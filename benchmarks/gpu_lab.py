"""Where gpu_suite.py and multi_gpu.py run their parts: processes with a time limit, their rows, and what went wrong in them."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_lock import VARIABLE
from gpu_power import Power
from record import ROOT, Record, Row, options, versions

Table = tuple[str, list[Row], str]
"""Title, rows, note."""

TINY = {"vocab_size": 256, "seq_len": 32, "n_layers": 2, "d_model": 32, "n_heads": 2, "vocab_multiple": 16, "loss_chunk": 64}
"""The model of a dry run."""
RESTART = 75
"""Exit status of a worker that has told of a fault, and that a CUDA error made useless: a new process takes what is left."""
FAST_COMPILES = "--xla_backend_optimization_level=0 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
"""XLA's flags of a dry run."""


class Lab:
    """Runs tasks of a worker, a file of this directory, until `deadline` (time.monotonic), and keeps what goes wrong."""

    def __init__(self, directory: Path, dry_run: bool, worker: str = "gpu_worker.py", devices: int = 1) -> None:
        """dry_run: on this many CPU devices."""
        self.directory, self.dry_run, self.deadline = directory, dry_run, time.monotonic() + 90
        self.worker, self.devices = worker, devices
        self.problems: list[str] = []
        self.left_out: list[str] = []
        """What there was no time for, where that is no fault."""
        self.logs: dict[str, str] = {}
        self.modules: set[str] = set()
        self.implementations = ["xla", "auto"]
        self.device: Row = {}
        self.output = directory
        """Where the results go."""
        self.found: dict[str, Any] = {}
        """What a part leaves to those after it."""
        self.power = Power()
        self.environment: dict[str, str] = {}
        """Added to that of every process."""
        self.progress: Callable[[str, list[Row], str], None] = lambda *table: None
        """Takes a table that is not complete yet, so that its rows outlive the machine."""
        self.n = itertools.count(1)
        self._telling = threading.Lock()

    def left(self) -> float:
        """Seconds until this part must end."""
        return self.deadline - time.monotonic()

    def run(self, task: str, *, flags: str = "", platform: str = "", **arguments: Any) -> list[Row]:
        """The rows of a task; those without result, a failed process and a time limit are noted as problems."""
        what = f"{task} {flags} {platform}".strip()
        if self.left() < 1:
            self.problems.append(f"{what}: not started, no time left")
            return []
        process, out, err = self.start(task, flags=flags, platform=platform, **arguments)
        if problem := self._wait(process, out):
            self.note(f"{what}: {problem}", err)
        return self._noted(what, self.rows(out))

    def each(
        self, task: str, variants: Sequence[Row], *, patience: float, needed: bool = True,
        tell: Callable[[list[Row]], None] = lambda rows: None, **arguments: Any,
    ) -> list[Row]:  # fmt: skip
        """One row for each variant, in order, of a task that gives one row for each.

        A variant that ends the process, or gives nothing for `patience` seconds, has a row with an "error", and a new process takes those
        after it. Lists and dicts of a variant are not in such a row. needed: variants that the time does not suffice for are a problem.
        tell: called with the rows so far, whenever there are more.
        """
        rows: list[Row] = []
        while len(rows) < len(variants) and self.left() > 1:
            done = list(rows)
            process, out, err = self.start(task, variants=variants[len(rows) :], **arguments)
            problem = self._wait(process, out, patience, lambda out=out, done=done: tell(done + self.rows(out)))
            rows += self._noted(task, new := self.rows(out))
            tell(rows)
            if process.returncode == RESTART and new and {"error", "unserved"} & new[-1].keys():
                continue
            if self.left() < 0 and not needed:
                break
            if len(rows) < len(variants):
                row = {key: value for key, value in variants[len(rows)].items() if not isinstance(value, dict | list)}
                self.note(f"{task} {' '.join(map(str, row.values()))}: {problem or 'no result'}", err)
                rows.append({**row, "error": self.problems[-1]})
            elif problem:
                self.note(f"{task}: {problem}", err)
        if len(rows) < len(variants):
            missing = f"{task}: no time left for {len(variants) - len(rows)} of {len(variants)} variants"
            (self.problems if needed else self.left_out).append(missing)
        return rows

    def spread(
        self, task: str, variants: Sequence[Row], *, lanes: int, title: str, note: str = "", before: Sequence[Row] = (), **how: Any
    ) -> list[Row]:
        """As `each`, in so many processes, which compile side by side and measure one at a time (gpu_lock).

        They take variants in turn, so that the first ones are done first. title, note: the table that grows as rows come; before: rows
        that it has already. Rows come in the order of the variants.
        """
        lanes = min(lanes, len(variants)) or 1
        found: list[list[Row]] = [[] for _ in range(lanes)]

        def so_far() -> list[Row]:
            return [row for group in itertools.zip_longest(*found) for row in group if row is not None]

        def lane(i: int) -> None:
            def tell(rows: list[Row]) -> None:
                with self._telling:
                    found[i] = rows
                    self.progress(title, [*before, *so_far()], note)

            found[i] = self.each(task, list(variants[i::lanes]), tell=tell, **how)

        with ThreadPoolExecutor(lanes) as pool:
            list(pool.map(lane, range(lanes)))
        return so_far()

    def _wait(
        self, process: subprocess.Popen[bytes], out: Path, patience: float = math.inf, more: Callable[[], None] = lambda: None
    ) -> str:
        """Until the process ends, and what went wrong; empty: nothing. One that is late, or prints nothing for so long, is killed.

        more: called whenever it has printed something.
        """
        size, since = 0, time.monotonic()
        try:
            while process.poll() is None:
                if (now := out.stat().st_size) > size:
                    size, since = now, time.monotonic()
                    more()
                if self.left() < 0:
                    return "stopped at the time limit"
                if time.monotonic() - since > patience:
                    return f"nothing for {patience:g} s, stopped"
                time.sleep(0.05)
            return f"exit status {process.returncode}" if process.returncode else ""
        finally:
            process.kill()
            process.wait()

    def _noted(self, what: str, rows: list[Row]) -> list[Row]:
        """The rows, those with an "error" among the problems."""
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
        self, task: str, *, flags: str = "", platform: str = "", cache: str = "", worker: str = "", hidden: bool = False, **arguments: Any
    ) -> tuple[subprocess.Popen[bytes], Path, Path]:
        """(process, its stdout, its stderr).

        worker: another file of this directory; torch_peers.py is run by the Python that TORCH_PYTHON names, if any. hidden: sees no GPU.

        flags: added to XLA_FLAGS. platform: JAX_PLATFORMS. cache: name of a compilation cache for the processes that give the same one; the
        one named "tuned" also keeps which matmul algorithms were fastest; empty: none.
        """
        n, worker = next(self.n), worker or self.worker
        out, err = (self.directory / f"{n}-{task}.{kind}" for kind in ("out", "err"))
        if self.dry_run:
            flags, platform, cache = f"{flags} {FAST_COMPILES} --xla_force_host_platform_device_count={self.devices}", "cpu", "dry-run"
        environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = "xla_gpu_per_fusion_autotune_cache_dir" if cache == "tuned" else "none"
        if cache:
            environment["JAX_COMPILATION_CACHE_DIR"] = str(self.directory / cache)
        if platform:
            environment["JAX_PLATFORMS"] = platform
        environment |= {VARIABLE: str(self.directory / "gpu"), **self.environment}
        environment["PATH"] = f"{environment.get('PATH', '')}:/usr/local/cuda/bin"  # where ptxas is, if no wheel has it
        if hidden:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        python = os.environ.get("TORCH_PYTHON", sys.executable) if worker.startswith("torch") else sys.executable
        command = [python, str(ROOT / "benchmarks" / worker), task, json.dumps(arguments)]
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


@dataclasses.dataclass(frozen=True)
class Part:
    run: Callable[[Lab], Iterator[Table]]
    seconds: float
    """Its share of the time; what a part leaves over goes to those after it."""


def probed(lab: Lab, rehearsal: str) -> Row | int:
    """The device that JAX finds; or, having said why there is nothing to measure, the exit status. rehearsal: the option for a CPU."""
    device = next(iter(lab.run("probe", worker="device_worker.py")), None)
    if device is None:
        print("JAX does not start here:", *lab.problems, sep="\n  ")
        return 1
    if device["platform"] != "gpu" and not lab.dry_run:
        print(f"no GPU that JAX can use here (platform {device['platform']}): nothing measured; {rehearsal} rehearses on the CPU")
        return 0
    return device


def measure(
    name: str, parts: Sequence[Part], lab: Lab, device: Row, output: Path, began: float, finish: Callable[[Record], None] | None = None
) -> int:
    """Runs all parts, and writes the results, under this name, after each; the exit status is 1 where one had a problem.

    finish: called with all tables, before they are written for the last time.
    """
    driver, installed = nvidia_driver(), versions()
    many = f"{lab.devices} x " if lab.devices > 1 else ""
    packages = " ".join(f"{package}{installed.get(package, '')}" for package in ("jax", "jaxlib", "flax"))
    kind = f"{many}{device['device_kind']} {packages} driver{driver}"
    record = Record(name, output, kind=kind, device=device, driver=driver)
    summary: list[Row] = []

    def progress(title: str, rows: list[Row], note: str) -> None:
        record.table(title, rows, note, show=False)
        record.write()

    lab.deadline, lab.device, lab.output, lab.progress = began, device, output, progress
    for part in parts:
        start, lab.problems, lab.left_out = time.monotonic(), [], []
        lab.deadline += part.seconds
        try:
            for table in part.run(lab):
                record.table(*table)
                record.write()
        except Exception as error:
            lab.problems.append(f"{type(error).__name__}: {error}")
        seconds, status = round(time.monotonic() - start, 1), "FAILED" if lab.problems else "ok"
        said = {"problems": "; ".join(lab.problems)} | ({"left_out": "; ".join(lab.left_out)} if lab.left_out else {})
        summary.append({"part": part.run.__name__, "status": status, "seconds": seconds, **said})
        record.table("Parts", summary)
        record.data |= {"not_needed_but_imported": sorted(lab.modules), "logs": lab.logs}
        record.write()
    if finish:
        finish(record)
    path = record.write()
    print(f"\nimported though a GPU machine may lack it: {', '.join(sorted(lab.modules)) or 'nothing'}")
    print(f"{time.monotonic() - began:.0f} s in all; written to {path.name} and .md in {output.name}/")
    return int(any(row["status"] != "ok" for row in summary))


def suite(
    name: str, description: str, parts: Sequence[Part], by_name: Sequence[Part] = (), *, slow: float,
    finish: Callable[[Record], None] | None = None,
) -> int:  # fmt: skip
    """The command line of a suite for one GPU, and its exit status: 0 where every part held, or there is no GPU.

    by_name: parts that run only where --parts names them. slow: in a dry run parts have so many times their seconds. finish: as `measure`.
    """
    parser = options(description, quick="--dry-run", quick_help="the same on a CPU, with tiny shapes, as a rehearsal")
    names = [part.run.__name__ for part in (*parts, *by_name)]
    parser.add_argument("--parts", default="", help=f"which, with commas: {', '.join(names)} (default: up to {parts[-1].run.__name__})")
    parser.add_argument("--seconds", type=float, default=0.0, help="time for the parts in all, shared out as usual (default: theirs)")
    arguments = parser.parse_args()
    chosen = arguments.parts.split(",") if arguments.parts else [part.run.__name__ for part in parts]
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(names)}")
    picked = [part for part in (*parts, *by_name) if part.run.__name__ in chosen]
    scale = arguments.seconds / sum(part.seconds for part in picked) if arguments.seconds else slow if arguments.dry_run else 1.0
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as directory:
        lab = Lab(Path(directory), arguments.dry_run)
        lab.environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # several processes share the GPU
        began = time.monotonic()
        if isinstance(device := probed(lab, "--dry-run"), int):
            return device
        if not lab.dry_run:
            lab.implementations = sorted(device["implementations"], key=lambda name: ("xla", "cudnn", name).index(name))
        with lab.power:
            scaled = [Part(part.run, part.seconds * scale) for part in picked]
            return measure(f"{name}{'-dry-run' * lab.dry_run}", scaled, lab, device, arguments.output, began, finish)


def compiler_there() -> bool:
    """Whether XLA's compiler for CUDA is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))


def nvidia_driver() -> str:
    """Version of the NVIDIA driver; empty where there is none."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip().splitlines()[0]
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return ""
