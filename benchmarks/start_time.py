"""Seconds of `python train.py --config=configs/gpt_tiny.py` from the command to the first step,
cold and warm, by stage.

Each row is a new process that times train.py's main, and stops itself by SIGTERM after one step, so
that it leaves a checkpoint for the row that resumes. Another table times train.py itself from
outside. Cold means that our caches are empty; the installed packages' files are in the operating
system's cache.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from record import ROOT, Record, Row, options

PACKAGES = (
    "train", "numpy", "jax", "flax.nnx", "optax", "orbax.checkpoint", "grain", "tyro", "tokenizers",
    "tensorboardX", "rich.console",
)  # fmt: skip
"""The modules whose imports are listed; `train` is the full program."""


def child(start_time: float, argv: list[str]) -> int:
    """Runs train.main(argv) and marks the ends of its stages; `start_time`: when the parent started
    this process (time.time())."""
    marks = {"began": start_time}
    compiled: dict[str, list[float]] = {}

    def mark(stage: str, f: Callable[..., Any] = lambda: None) -> Callable[..., Any]:
        def marked(*args: Any, **kwargs: Any) -> Any:
            marks[stage] = time.time()
            return f(*args, **kwargs)

        return marked

    import jax

    import train
    from mesh_lm.checkpoint.lease import Lease
    from mesh_lm.distributed.compile_cache import VerifiedPath
    from mesh_lm.training import session

    mark("interpreter_imports_s")()
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.setdefault(event.rpartition("/")[2], []).append(
            duration_secs
        )
    )
    prepare = session.prepare
    checks = {"digests_s": 0.0, "lease_s": 0.0}

    def counted(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_time = time.perf_counter()
            try:
                return f(*args, **kwargs)
            finally:
                checks[name] += time.perf_counter() - start_time

        return timed

    VerifiedPath._digest = counted("digests_s", VerifiedPath._digest)
    Lease.acquire = counted("lease_s", Lease.acquire)

    def timed_prepare(*args: Any, **kwargs: Any) -> Any:
        corpus = mark("config_model_s", prepare)(*args, **kwargs)
        mark("data_s")()
        return corpus

    class Monitor(session.Monitor):
        def __init__(self, *args: Any) -> None:
            mark("state_s")()
            super().__init__(*args)

        def step(self, step: int, metrics: dict[str, Any]) -> None:
            jax.block_until_ready(metrics)
            mark("first_step_s")()
            super().step(step, metrics)
            os.kill(os.getpid(), signal.SIGTERM)

    session.prepare, session.Monitor = timed_prepare, Monitor
    status = train.main(argv)
    times = list(marks.values())
    stages = {
        name: end - begin
        for name, begin, end in zip(list(marks)[1:], times, times[1:], strict=False)
    }
    sums = {name: sum(compiled.get(event, [])) for name, event in (
        ("traced_s", "jaxpr_trace_duration"), ("lowered_s", "jaxpr_to_mlir_module_duration"),
        ("compiled_s", "backend_compile_duration"),
        ("from_cache_s", "cache_retrieval_time_sec"))}  # fmt: skip
    counts = {
        "programs": len(compiled.get("backend_compile_duration", [])),
        "cache_hits": len(compiled.get("cache_retrieval_time_sec", [])),
    }
    row = {"total_s": times[-1] - times[0], **stages, **sums, **counts, "status": status}
    row |= checks | {"checks_percent": 100 * sum(checks.values()) / row["total_s"]}
    print("\nROW", json.dumps(row), flush=True)
    return 0


def command(
    directory: Path, fields: dict[str, Any], output: str, data: str, programs: str
) -> list[str]:
    """Returns train.py's arguments, with its output and its two caches in `directory`."""
    paths = {"output": output, "data.cache": data, "launch.compile_cache": programs}
    fields = (
        fields | {"data.max_epochs": 0} | {name: directory / path for name, path in paths.items()}
    )
    return [
        "--config=configs/gpt_tiny.py",
        *(f"--config.{name}={value}" for name, value in fields.items()),
    ]


def timed(arguments: list[str]) -> Row:
    """Times one start."""
    script = [sys.executable, str(Path(__file__).resolve()), "--child"]
    done = subprocess.run(
        [*script, str(time.time()), *arguments], cwd=ROOT, capture_output=True, text=True
    )
    rows = [
        json.loads(line.removeprefix("ROW "))
        for line in done.stdout.splitlines()
        if line.startswith("ROW ")
    ]
    if not rows:
        raise RuntimeError(
            f"train.py did not get to its first step: {done.stdout[-500:]}{done.stderr[-1500:]}"
        )
    return rows[0]


def from_outside(arguments: list[str]) -> float:
    """Returns the seconds until train.py itself prints its first step; then stops it by SIGTERM."""
    start_time = time.monotonic()
    script = [sys.executable, "train.py"]
    process = subprocess.Popen(
        [*script, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    seconds = next(
        (time.monotonic() - start_time for line in process.stdout if re.match(r"step +1/", line)),
        None,
    )
    process.send_signal(signal.SIGTERM)
    process.communicate()
    if seconds is None:
        raise RuntimeError("train.py ended before its first step")
    return seconds


def imports() -> list[Row]:
    """Returns cumulative import times from -X importtime (which slows all a little); they include
    nested imports."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import train"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = re.findall(r"^import time: +\d+ \| +(\d+) \| +(\S+)$", done.stderr, re.MULTILINE)
    microseconds = {name: int(us) for us, name in lines if name in PACKAGES}
    return [
        {"package": name, "cumulative_ms": microseconds[name] / 1e3}
        for name in sorted(PACKAGES, key=lambda n: -microseconds.get(n, 0))
        if name in microseconds
    ]


def main() -> int:
    arguments = options(__doc__ or "").parse_args()
    record = Record(f"start_time{'-quick' * arguments.quick}", arguments.output)
    with tempfile.TemporaryDirectory(prefix="start-time-") as name:
        directory, fields = Path(name), {}
        if arguments.quick:
            # imported here, because it imports JAX, which a child must do while it is timed
            import tiny

            fields = {f"model.{name}": value for name, value in tiny.MODEL.items()}
            fields |= {
                "data.path": tiny.text(directory),
                "data.tokenizer_vocab": tiny.MODEL["vocab_size"],
            }
        cases = {
            "all cold": ("cold", "data", "programs"),
            "all warm": ("warm", "data", "programs"),
            "warm, resumed": ("warm", "data", "programs"),
            "data cached, compilation cold": ("half", "data", "other-programs"),
        }
        rows: list[Row] = []
        for case, paths in cases.items():
            rows.append({"case": case, **timed(command(directory, fields, *paths))})
        note = (
            "traced, lowered, compiled and from_cache are parts of state (initialise or restore) "
            "and first_step, over all programs. digests is the SHA-256 of the compile cache's "
            "entries, lease the time to take the output's, checks_percent both of total."
        )
        record.table("Command to first step", rows, note)
        record.write()
        outside = from_outside(command(directory, fields, "outside", "data", "programs"))
        record.table(
            "train.py itself, from outside", [{"case": "all warm", "first_step_printed_s": outside}]
        )
    record.table("Imports", imports(), "Cumulative, -X importtime; `train` is the whole program.")
    record.write()
    return 0


if __name__ == "__main__":
    sys.exit(child(float(sys.argv[2]), sys.argv[3:]) if sys.argv[1:2] == ["--child"] else main())
