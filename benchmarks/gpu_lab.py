"""Runs the parts of gpu_suite.py and multi_gpu.py in processes with a time limit, and collects
their rows and problems."""

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
from functools import partial
from pathlib import Path
from typing import Any

from forked import Forked, script
from gpu_lock import VARIABLE
from gpu_power import Power
from gpu_resume import Earlier
from record import ROOT, Record, Row, options, versions
from tuned import VARIABLE as TUNED
from worker import WARM

Table = tuple[str, list[Row], str]
"""Title, rows, note."""

TINY = {
    "vocab_size": 256,
    "seq_len": 32,
    "n_layers": 2,
    "d_model": 32,
    "n_heads": 2,
    "vocab_multiple": 16,
    "loss_chunk": 64,
}
"""The model of a dry run."""
RESTART = 75
"""Exit status of a worker that reported a CUDA error and is unusable; a new process takes the
remaining variants."""
FAST_COMPILES = (
    "--xla_backend_optimization_level=0 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
"""XLA's flags of a dry run."""


class Lab:
    """Runs tasks of a worker, a file of this directory, until `deadline` (time.monotonic), and
    collects problems."""

    def __init__(
        self, directory: Path, dry_run: bool, worker: str = "gpu_worker.py", devices: int = 1
    ) -> None:
        """dry_run: run on this many CPU devices."""
        self.directory, self.dry_run, self.deadline = directory, dry_run, time.monotonic() + 90
        self.worker, self.devices = worker, devices
        self.problems: list[str] = []
        self.left_out: list[str] = []
        """Optional work for which no time was left."""
        self.logs: dict[str, str] = {}
        self.modules: set[str] = set()
        self.implementations = ["xla", "auto"]
        self.device: Row = {}
        self.forks = False
        """Processes are forked from this one, in which `forked.preload` has imported JAX: for a dry
        run."""
        self.caches = directory
        """The directory of the compilation caches."""
        self.output = directory
        """The directory of the results. If it has a tuning.json, every process takes its tiles from
        that."""
        self.found: dict[str, Any] = {}
        """Values that a part passes on to later parts."""
        self.power = Power()
        self.environment: dict[str, str] = {}
        """Environment variables added to those of every process."""
        self.progress: Callable[[str, list[Row], str], None] = lambda *table: None
        """Receives a table that is not complete yet, so that its rows survive the loss of the
        machine."""
        self.known: Callable[[str, Row], Row | None] = lambda title, variant: None
        """The row of a variant that an earlier run measured, by the table's title."""
        self.n = itertools.count(1)
        self._telling = threading.Lock()

    def left(self) -> float:
        """Seconds until this part must end."""
        return self.deadline - time.monotonic()

    def run(
        self,
        task: str,
        *,
        flags: str = "",
        platform: str = "",
        tell: Callable[[list[Row]], None] = lambda rows: None,
        **arguments: Any,
    ) -> list[Row]:
        """Returns the rows of a task. Rows without a result, a failed process and a time limit are
        recorded as problems.

        tell: called with the rows so far, whenever there are more.
        """
        label = f"{task} {flags} {platform}".strip()
        if self.left() < 1:
            self.problems.append(f"{label}: not started, no time left")
            return []
        process, out, err = self.start(task, flags=flags, platform=platform, **arguments)
        if problem := self._wait(process, out, poll=lambda: tell(self.rows(out))):
            self.note(f"{label}: {problem}", err)
        return self._noted(label, self.rows(out))

    def each(
        self,
        task: str,
        variants: Sequence[Row],
        *,
        patience: float,
        needed: bool = True,
        tell: Callable[[list[Row]], None] = lambda rows: None,
        **arguments: Any,
    ) -> list[Row]:
        """Returns one row for each variant, in order, of a task that emits one row per variant.

        If a variant ends the process, or emits nothing for `patience` seconds, its row has an
        "error", and a new process takes the rest. Lists and dicts of a variant are not in such a
        row. needed: variants for which the time does not suffice are a problem. tell: called with
        the rows so far, whenever there are more.
        """
        rows: list[Row] = []
        while len(rows) < len(variants) and self.left() > 1:
            done = list(rows)
            process, out, err = self.start(task, variants=variants[len(rows) :], **arguments)
            problem = self._wait(
                process, out, patience, lambda out=out, done=done: tell(done + self.rows(out))
            )
            rows += self._noted(task, new := self.rows(out))
            tell(rows)
            if process.returncode == RESTART and new and {"error", "unserved"} & new[-1].keys():
                continue
            if self.left() < 0 and not needed:
                break
            if len(rows) < len(variants):
                row = {
                    key: value
                    for key, value in variants[len(rows)].items()
                    if not isinstance(value, dict | list)
                }
                self.note(
                    f"{task} {' '.join(map(str, row.values()))}: {problem or 'no result'}", err
                )
                rows.append({**row, "error": self.problems[-1]})
            elif problem:
                self.note(f"{task}: {problem}", err)
        if len(rows) < len(variants):
            missing = (
                f"{task}: no time left for {len(variants) - len(rows)} of {len(variants)} variants"
            )
            (self.problems if needed else self.left_out).append(missing)
        return rows

    def spread(
        self,
        task: str,
        variants: Sequence[Row],
        *,
        lanes: int,
        title: str,
        note: str = "",
        earlier_rows: Sequence[Row] = (),
        alone: bool = False,
        **options: Any,
    ) -> list[Row]:
        """As `each`, in several processes, which compile in parallel and measure one at a time
        (gpu_lock).

        They take variants in turn, so that the first ones are done first. title, note: the table
        that grows with each row; earlier_rows: rows that it already has. alone: each variant has a
        process of its own. The rows are in the order of the variants, after those that an earlier
        run measured.
        """
        measured = [self.known(title, variant) for variant in variants]
        variants = [variant for variant, row in zip(variants, measured, strict=True) if row is None]
        earlier_rows = [*earlier_rows, *(earlier := [row for row in measured if row is not None])]
        lanes = min(lanes, len(variants)) or 1
        lane_rows: list[list[Row]] = [[] for _ in range(lanes)]

        def so_far() -> list[Row]:
            return [
                row
                for group in itertools.zip_longest(*lane_rows)
                for row in group
                if row is not None
            ]

        def lane(i: int) -> None:
            mine = list(variants[i::lanes])
            for some in [[variant] for variant in mine] if alone else [mine]:
                done = lane_rows[i]

                def tell(rows: list[Row], done: list[Row] = done) -> None:
                    with self._telling:
                        lane_rows[i] = [*done, *rows]
                        self.progress(title, [*earlier_rows, *so_far()], note)

                lane_rows[i] = [*done, *self.each(task, some, tell=tell, **options)]

        with ThreadPoolExecutor(lanes) as pool:
            list(pool.map(lane, range(lanes)))
        return [*earlier, *so_far()]

    def _wait(
        self,
        process: subprocess.Popen[bytes],
        out: Path,
        patience: float = math.inf,
        poll: Callable[[], None] = lambda: None,
    ) -> str:
        """Waits until the process ends, and returns the problem, if any. A process that is late, or
        silent for `patience` s, is killed.

        poll: called whenever the process has printed something.
        """
        size, since = 0, time.monotonic()
        try:
            while process.poll() is None:
                if (new_size := out.stat().st_size) > size:
                    size, since = new_size, time.monotonic()
                    poll()
                if self.left() < 0:
                    return "stopped at the time limit"
                if time.monotonic() - since > patience:
                    return f"hangs: nothing for {patience:g} s, stopped"
                time.sleep(0.05)
            return f"exit status {process.returncode}" if process.returncode else ""
        finally:
            process.kill()
            process.wait()

    def _noted(self, label: str, rows: list[Row]) -> list[Row]:
        """Returns the rows, and records those with an "error" as problems."""
        for row in rows:
            if "error" in row:
                variant = " ".join(
                    f"{key}={value}"
                    for key, value in row.items()
                    if key != "error" and not isinstance(value, float)
                )
                self.problems.append(f"{label} {variant}: {row['error']}")
        return rows

    def note(self, problem: str, err: Path) -> None:
        """Records a problem with the last line of a process's stderr, and keeps the end of the
        stderr for the results."""
        log = err.read_text(encoding="utf-8").strip()
        for path in (self.directory, ROOT, Path(sys.prefix), Path(sys.base_prefix), Path.home()):
            log = log.replace(f"{path}/", "")
        self.problems.append(f"{problem}: {log.splitlines()[-1][:400] if log else 'no message'}")
        self.logs[f"{problem} ({len(self.logs) + 1})"] = log[-4000:]

    def start(
        self,
        task: str,
        *,
        flags: str = "",
        platform: str = "",
        cache: str = "",
        worker: str = "",
        hidden: bool = False,
        under: Sequence[str] = (),
        stdin: int = subprocess.DEVNULL,
        **arguments: Any,
    ) -> tuple[subprocess.Popen[bytes], Path, Path]:
        """Starts a task. Returns (process, its stdout, its stderr).

        worker: another file of this directory; torch_peers.py runs with the Python that
        TORCH_PYTHON names, if any. hidden: hides the GPU. under: a command that runs the process,
        such as a profiler's. stdin: subprocess.PIPE, to talk to it.

        flags: added to XLA_FLAGS. platform: JAX_PLATFORMS. cache: name of a compilation cache,
        shared by processes that give the same name; "tuned" also keeps the fastest matmul
        algorithms; empty: none.
        """
        n, worker = next(self.n), worker or self.worker
        out, err = (self.directory / f"{n}-{task}.{kind}" for kind in ("out", "err"))
        if self.dry_run:
            flags, platform, cache = (
                f"{flags} {FAST_COMPILES} --xla_force_host_platform_device_count={self.devices}",
                "cpu",
                "dry-run",
            )
        environment = {
            name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"
        }
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        environment["JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES"] = (
            "xla_gpu_per_fusion_autotune_cache_dir" if cache == "tuned" else "none"
        )
        if cache:
            environment["JAX_COMPILATION_CACHE_DIR"] = str(self.caches / cache)
        if platform:
            environment["JAX_PLATFORMS"] = platform
        if self.dry_run:
            environment[WARM] = "0"
        environment |= {
            VARIABLE: os.environ.get(VARIABLE) or str(self.directory / "gpu"),
            **self.environment,
        }
        # has ptxas, if no wheel does
        environment["PATH"] = f"{environment.get('PATH', '')}:/usr/local/cuda/bin"
        if (table := self.output / "tuning.json").exists():
            environment[TUNED] = str(table.resolve())
        if hidden:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        python = (
            os.environ.get("TORCH_PYTHON", sys.executable)
            if worker.startswith("torch")
            else sys.executable
        )
        command = [*under, python, str(ROOT / "benchmarks" / worker), task, json.dumps(arguments)]
        with out.open("w", encoding="utf-8") as stdout, err.open("w", encoding="utf-8") as stderr:
            if self.forks:
                run = partial(script, *command[1:])
                return (
                    Forked(run, stdin=stdin, stdout=stdout, stderr=stderr, env=environment),
                    out,
                    err,
                )  # type: ignore[return-value]
            return (
                subprocess.Popen(
                    command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, cwd=ROOT
                ),
                out,
                err,
            )

    def rows(self, out: Path) -> list[Row]:
        """Returns the rows that a task has printed so far, without an incomplete last line."""
        lines = [
            line.partition(" ")
            for line in out.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
        ]
        self.modules |= {
            name for kind, _, text in lines if kind == "MODULES" for name in json.loads(text)
        }
        return [self.with_power(json.loads(text)) for kind, _, text in lines if kind == "ROW"]

    def with_power(self, row: Row) -> Row:
        """Returns a row with the GPU's power, clock and heat in place of the times of its
        measurement."""
        columns = {name: value for name, value in row.items() if name not in ("began", "ended")}
        return columns | (self.power.during(row["began"], row["ended"]) if "began" in row else {})

    def gpt2(self, batch: int, layers: int = 12) -> dict[str, Any]:
        """Returns the directory and the config of a GPT-2 124M in bf16 (tiny in a dry run), with a
        short warm-up."""
        model = TINY if self.dry_run else {"n_layers": layers}
        train = {"global_batch": 8 if self.dry_run else batch, "microbatches": 1, "steps": 1000}
        optimizer = {"warmup_steps": 2, "learning_rate": 1e-2 if self.dry_run else 1e-3}
        return {
            "directory": str(self.directory),
            "changes": {"model": model, "train": train, "optimizer": optimizer},
        }


@dataclasses.dataclass(frozen=True)
class Part:
    run: Callable[[Lab], Iterator[Table]]
    seconds: float
    """Its share of the time. Time that a part does not use is available to later parts."""


def probed(lab: Lab, rehearsal: str) -> Row | int:
    """Returns the device that JAX finds; or prints why it cannot be measured, and returns the exit
    status. rehearsal: the CPU's option."""
    device = next(iter(lab.run("probe", worker="device_worker.py")), None)
    if device is None:
        print("JAX does not start here:", *lab.problems, sep="\n  ")
        return 1
    if device["platform"] != "gpu" and not lab.dry_run:
        print(
            f"no GPU that JAX can use here (platform {device['platform']}): nothing measured; "
            f"{rehearsal} rehearses on the CPU"
        )
        return 0
    return device


def measure(
    name: str, parts: Sequence[Part], lab: Lab, device: Row, output: Path, start_time: float,
    finish: Callable[[Record], None] | None = None, resume: bool = False,
) -> int:  # fmt: skip
    """Runs all parts, and writes the results under this name after each. Returns the exit status, 1
    if a part had a problem.

    finish: called with all tables, before they are written for the last time. resume: take over
    what an earlier run measured.
    """
    driver = nvidia_driver()
    kind = kind_of_device(device, driver, lab.devices)
    record = Record(name, output, kind=kind, device=device, driver=driver)
    summary: list[Row] = []
    earlier = Earlier(output / f"{name}.parts.json", kind, resume)

    def progress(title: str, rows: list[Row], note: str) -> None:
        record.table(title, rows, note, show=False)
        record.write()
        earlier.progress(title, rows)

    lab.deadline, lab.device, lab.output, lab.progress, lab.known = (
        start_time,
        device,
        output,
        progress,
        earlier.row,
    )
    for part in earlier.parts.values():
        summary.append(part["summary"])
        lab.found |= part["found"]
        for title, table in part["tables"].items():
            record.table(title, table["rows"], table["note"], show=False)
    for part in parts:
        if part.run.__name__ in earlier.parts:
            continue
        tables: dict[str, Any] = {}
        start, lab.problems, lab.left_out = time.monotonic(), [], []
        lab.deadline += part.seconds
        try:
            for table in part.run(lab):
                record.table(*table)
                record.write()
                tables[table[0]] = {"rows": table[1], "note": table[2]}
        except Exception as error:
            lab.problems.append(f"{type(error).__name__}: {error}")
        seconds, status = round(time.monotonic() - start, 1), "FAILED" if lab.problems else "ok"
        status_columns = {"problems": "; ".join(lab.problems)} | (
            {"left_out": "; ".join(lab.left_out)} if lab.left_out else {}
        )
        summary.append(
            {"part": part.run.__name__, "status": status, "seconds": seconds, **status_columns}
        )
        if not lab.problems and not any("no time left" in reason for reason in lab.left_out):
            earlier.complete(part.run.__name__, summary[-1], tables, lab.found)
        record.table("Parts", summary)
        record.data |= {"not_needed_but_imported": sorted(lab.modules), "logs": lab.logs}
        record.write()
    if finish:
        finish(record)
    path = record.write()
    print(
        "\nimported though a GPU machine may lack it: "
        f"{', '.join(sorted(lab.modules)) or 'nothing'}"
    )
    print(
        f"{time.monotonic() - start_time:.0f} s in all; written to {path.name} and .md "
        f"in {output.name}/"
    )
    return int(any(row["status"] != "ok" for row in summary))


def suite(
    name: str,
    description: str,
    parts: Sequence[Part],
    optional_parts: Sequence[Part] = (),
    *,
    slow: float,
    finish: Callable[[Record], None] | None = None,
) -> int:
    """Runs the command line of a suite for one GPU. Returns the exit status: 0 if every part
    succeeded, or there is no GPU.

    optional_parts: parts that run only if --parts names them. slow: the factor of a part's seconds
    in a dry run. finish: as in `measure`.
    """
    parser = options(
        description,
        quick="--dry-run",
        quick_help="the same on a CPU, with tiny shapes, as a rehearsal",
    )
    names = [part.run.__name__ for part in (*parts, *optional_parts)]
    parser.add_argument(
        "--parts",
        default="",
        help=f"which, with commas: {', '.join(names)} (default: up to {parts[-1].run.__name__})",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="take over what an earlier run measured with the same --output",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.0,
        help="time for the parts in all, shared out as usual (default: theirs)",
    )
    arguments = parser.parse_args()
    chosen = (
        arguments.parts.split(",") if arguments.parts else [part.run.__name__ for part in parts]
    )
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(names)}")
    picked = [part for part in (*parts, *optional_parts) if part.run.__name__ in chosen]
    scale = (
        arguments.seconds / sum(part.seconds for part in picked)
        if arguments.seconds
        else slow
        if arguments.dry_run
        else 1.0
    )
    with tempfile.TemporaryDirectory(prefix=f"{name}-") as directory:
        lab = Lab(Path(directory), arguments.dry_run)
        # several processes share the GPU
        lab.environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        start_time = time.monotonic()
        if isinstance(device := probed(lab, "--dry-run"), int):
            return device
        if not lab.dry_run:
            lab.implementations = sorted(
                device["implementations"], key=lambda name: ("xla", "cudnn", name).index(name)
            )
        with lab.power:
            scaled = [Part(part.run, part.seconds * scale) for part in picked]
            return measure(
                f"{name}{'-dry-run' * lab.dry_run}",
                scaled,
                lab,
                device,
                arguments.output,
                start_time,
                finish,
                arguments.resume,
            )


def kind_of_device(device: Row, driver: str, n: int = 1) -> str:
    """Returns what measures: n devices of a kind, and the versions of packages and driver."""
    installed = versions()
    packages = " ".join(
        f"{package}{installed.get(package, '')}" for package in ("jax", "jaxlib", "flax")
    )
    return f"{f'{n} x ' if n > 1 else ''}{device['device_kind']} {packages} driver{driver}"


def compiler_there() -> bool:
    """Returns whether XLA's compiler for CUDA is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))


def nvidia_driver() -> str:
    """Returns the version of the NVIDIA driver; empty without one."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return (
            subprocess.run(query, capture_output=True, text=True, timeout=20)
            .stdout.strip()
            .splitlines()[0]
        )
    except (OSError, subprocess.TimeoutExpired, IndexError):
        return ""
