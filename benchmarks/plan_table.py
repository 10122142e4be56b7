"""Compiles every config's training step for its published number of H100s, without a GPU: memory,
network, time, cost.

Writes docs/configs.md and its chart from the raw results; --check lists configs that have changed
since. Each row runs in a process of its own, so that its peak memory is its own. Rows that today's
results have already are not compiled again, so an interrupted run can be continued. Step times are
the lab's estimates, from the fast to the slow end of a band. Needs the compiler for CUDA: pip install -e '.[aot]'.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import plan_chart
import plan_page
from record import ROOT, Record, Row
from record import options as arguments

TARGET = "h100"
QUIET = 2.5
"""The load average above which a time is measured again."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """A row: a config, perhaps with changes, on a number of devices."""

    table: str
    config: str
    devices: int
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    layers: int = 0
    sequences: int = 0
    """Sequences of a batch shard per step, so that a device's program does not depend on their
    number; 0: the config's batch."""
    microbatches: int = 0

    @property
    def name(self) -> str:
        return {
            plan_page.CONFIGS: self.config,
            plan_page.FSDP: f"{self.config} by FSDP",
            plan_page.DEVICES: f"{self.config}, {self.devices:,} devices",
            plan_page.DEPTH: f"{self.config}, {self.layers} layers",
        }[self.table]


PUBLISHED = {
    "gpt2_124m": 8, "gpt_1_3b": 8, "gpt_175b": 1024, "llama3_8b": 64, "llama3_8b_128k": 64,
    "llama3_70b": 1024, "llama3_405b": 16_384,
    "megatron_1_7b": 48, "megatron_7_1b": 96, "megatron_16b": 192, "megatron_32b": 384,
    "megatron_70b": 768, "megatron_119b": 1536,
    "megatron_177b": 2304, "megatron_314b": 3072, "megatron_462b": 6144,
    "mixtral_8x7b": 128, "qwen3_30b_a3b": 64,
}  # fmt: skip
"""Numbers of devices from Megatron-LM's and Llama 3's tables; one node for models that train on
one; for mixtures of experts our own choice. gpt_tiny and gpt_tiny_moe are for CPUs."""
BY_FSDP = {
    "gpt_175b": (8, 16, 2), "llama3_405b": (64, 32, 1), "megatron_177b": (24, 12, 1),
    "megatron_314b": (24, 16, 1),
}  # fmt: skip
"""The configs with stages, without them: data, fsdp, microbatches."""
FOR_CPUS = ("gpt_tiny", "gpt_tiny_moe")
"""Configs without a row."""
SUBJECTS = [
    *(Subject(plan_page.CONFIGS, name, n) for name, n in PUBLISHED.items()),
    *(
        Subject(
            plan_page.FSDP,
            name,
            PUBLISHED[name],
            {"pipeline": 1, "data": data, "fsdp": fsdp},
            microbatches=microbatches,
        )
        for name, (data, fsdp, microbatches) in BY_FSDP.items()
    ),
    *(Subject(plan_page.DEVICES, "gpt_175b", n, sequences=96) for n in (64, 128, 1024, 6144)),
    *(Subject(plan_page.DEPTH, "gpt_175b", 1024, layers=layers) for layers in (96, 144, 192)),
]
TIMES = {plan_page.CONFIGS: 1, plan_page.FSDP: 1, plan_page.DEVICES: 3, plan_page.DEPTH: 1}
"""How often a row of each table is compiled at most if the machine is never idle; the fastest
counts."""


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--only",
        default="",
        help="rows whose name contains one of these words, with commas between; the rest is kept",
    )
    parser.add_argument(
        "--again", action="store_true", help="also compile rows that today's results already have"
    )
    parser.add_argument(
        "--page",
        action="store_true",
        help="only rewrite the page and the chart, from the newest results",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="only list configs that have changed since, or have no row; status 1 for any",
    )
    parser.add_argument("--row", default="", help="compile this one and print it (internal)")
    args = parser.parse_args()
    if args.row:
        (subject,) = (s for s in SUBJECTS if s.name == args.row)
        print(json.dumps(measured(subject, args.quick)))
        return
    if args.check:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        sys.exit(
            "\n".join(stale(json.loads(plan_page.newest().read_text(encoding="utf-8")))) or None
        )
    if not args.page:
        collect(args)
    if not args.quick:
        write_page()


def collect(args: Any) -> None:
    """Compiles the requested rows that have no results yet; results are written after each row.

    If only some rows are requested, the others are taken from the newest results, with their own
    dates.
    """
    record = Record(f"plan_table{'-quick' * args.quick}", args.output)
    earlier_file = record.directory / f"{record.stem}.json"
    if args.only and not args.quick and not earlier_file.is_file():
        earlier_file = plan_page.newest()
    earlier = json.loads(earlier_file.read_text(encoding="utf-8")) if earlier_file.is_file() else {}
    earlier_tables = earlier.get("tables", {})
    machine_kind = record.data["machine"]["cpu"]
    earlier_kind = earlier["machine"]["cpu"] if earlier else machine_kind
    done: dict[str, Row] = {
        row["name"]: {"cpu": earlier_kind} | row
        for table in earlier_tables.values()
        for row in table["rows"]
    }
    subjects = [s for s in SUBJECTS if any(word in s.name for word in args.only.split(","))]
    if args.quick:
        subjects = [
            s
            for s in subjects
            if (s.config, s.devices) == ("gpt_175b", 1024)
            and s.layers in (0, 96)
            and not s.sequences
        ]
        subjects = [s for s in subjects if s.table != plan_page.FSDP]
    if args.again:
        done = {name: row for name, row in done.items() if name not in {s.name for s in subjects}}
    for time_ in range(max(TIMES.values())):
        for subject in subjects:
            old_row = done.get(subject.name)
            if old_row and (
                old_row["times"] > time_
                or old_row["load"] <= QUIET
                or TIMES[subject.table] <= time_
            ):
                continue
            row = {"cpu": machine_kind} | in_a_process(subject, args.quick)
            best = min((row, old_row), key=lambda r: r["total_s"]) if old_row else row
            done[subject.name] = best | {"times": 1 + (old_row["times"] if old_row else 0)}
            for title, note in plan_page.NOTES.items():
                rows = [done[s.name] for s in SUBJECTS if s.table == title and s.name in done]
                record.data["tables"][title] = {"note": note, "rows": rows}
            record.write()
            figures = (
                f"{row['total_s']:.0f} s, {row['rss_gib']:.2f} GiB here; peak "
                f"{row['peak_gib']:.1f} GiB, sends {row['sent_gib']:.1f} GiB"
            )
            print(f"{subject.name}: {figures}", flush=True)


def stale(data: Any) -> list[str]:
    """Returns a line for each config and row of the kept results that a new run would change, with
    the command; empty if none would."""
    rows = {row["name"]: row for table in data["tables"].values() for row in table["rows"]}
    files = {path.stem for path in (ROOT / "configs").glob("*.py")} - {"__init__", *FOR_CPUS}
    problems = [
        f"configs/{name}.py has no row: add its devices to PUBLISHED"
        for name in sorted(files - PUBLISHED.keys())
    ]
    for subject in SUBJECTS:
        if subject.config not in files:
            problems.append(
                f"{subject.name}: there is no configs/{subject.config}.py; remove it from PUBLISHED"
            )
        elif subject.name not in rows:
            problems.append(
                f"{subject.name} has no row: python benchmarks/plan_table.py "
                f"'--only={subject.name}'"
            )
        elif changes := changed(subject, rows[subject.name]):
            problems.append(
                f"{subject.name}: {', '.join(changes)}: python benchmarks/plan_table.py --again "
                f"'--only={subject.name}'"
            )
    return problems


def changed(subject: Subject, row: Row) -> list[str]:
    """Returns the fields in which a config differs from what was compiled: "remat none, which was
    full"."""
    from mesh_lm.planning.program import with_compilable_attention

    current = about(with_compilable_attention(prepared(subject, False)), subject.devices)
    return [
        f"{key} {current.get(key)}, which was {row.get(key)}"
        for key in current
        if current[key] != row.get(key)
    ]


def write_page() -> None:
    source = plan_page.newest()
    record = Record("plan_table", source.parent)
    record.stem, record.data = source.stem, restated(json.loads(source.read_text(encoding="utf-8")))
    record.write()
    data = record.data
    have = {row["name"] for table in data["tables"].values() for row in table["rows"]}
    if missing := [s.name for s in SUBJECTS if s.name not in have]:
        print(f"the page is not written yet: results are missing for {', '.join(missing)}")
        return
    plan_page.PAGE.write_text(plan_page.page(data, source.name), encoding="utf-8")
    plan_chart.draw(data, plan_page.CHART)
    print(f"wrote {plan_page.PAGE.relative_to(ROOT)} and {plan_page.CHART.relative_to(ROOT)}")


def restated(data: Any) -> Any:
    """Returns the results with today's descriptions, and with the minimum that each strategy must
    send and the step over the model's own time, from today's formulas, which need no compilation.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from mesh_lm.planning.program import with_compilable_attention

    for title, table in data["tables"].items():
        table["note"] = plan_page.NOTES[title]
    rows = {row["name"]: row for table in data["tables"].values() for row in table["rows"]}
    for subject in SUBJECTS:
        if (row := rows.get(subject.name)) and not changed(subject, row):
            least = least_bytes(with_compilable_attention(prepared(subject, False)))
            row |= {
                "least_gib": least and least / 2**30,
                "sent_over_least": least and row["sent_gib"] * 2**30 / least,
            }
            row["model_ratio"] = row["step_s"] / model_seconds(
                prepared(subject, False), row["devices"]
            )
    return data


def in_a_process(subject: Subject, quick: bool) -> Row:
    """Compiles a row in a process of its own. Raises RuntimeError with the process's last output if
    it fails."""
    load = os.getloadavg()[0]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
    }
    command = [
        sys.executable,
        str(Path(__file__)),
        f"--row={subject.name}",
        *(["--quick"] if quick else []),
    ]
    begin = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        raise RuntimeError(f"{subject.name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1]) | {
        "process_s": time.monotonic() - begin, "load": round(load, 2),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def measured(subject: Subject, quick: bool) -> Row:
    """Compiles and times it. `lower_s`: building the abstract state, tracing, lowering; `read_s`:
    the lab's analysis of the program."""
    import jax  # imported here, so that the process that starts the others stays small

    from mesh_lm.planning.program import compile_config, flags_of, with_compilable_attention
    from sharding_rules.lab.child import server
    from sharding_rules.lab.flags import options

    lowered: list[float] = []

    def heard(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            # the lab takes the program from JAX then, and compiles it in a child
            lowered.append(time.monotonic())

    jax.monitoring.register_event_duration_secs_listener(heard)
    config = with_compilable_attention(prepared(subject, quick))
    begin, cpu_seconds = time.monotonic(), sum(os.times()[:4])
    # as in a run
    report = compile_config(config, TARGET, subject.devices, options(flags_of(config, TARGET)))
    end = time.monotonic()
    server().close()  # the seconds of the child are known when its parent has ended
    cpu_seconds = sum(os.times()[:4]) - cpu_seconds
    row: Row = {"name": subject.name, **about(config, subject.devices)}
    row |= {
        "lower_s": lowered[-1] - begin, "compile_s": report.compile_seconds,
        "read_s": end - lowered[-1] - report.compile_seconds,
        "total_s": end - begin, "cpu_s": cpu_seconds, "rss_gib": resident() / 2**30,
        "instructions": report.instructions,
        "text_bytes": report.text_bytes,
    }  # fmt: skip
    return row | outcome(config, report)


def prepared(subject: Subject, quick: bool) -> Any:
    """Returns the config of a row; no compilation is cached on disk."""
    from mesh_lm.config import PipelineConfig, load
    from mesh_lm.training.check import check
    from sharding_rules import preset

    config = load(f"configs/{subject.config}.py")
    if subject.table == plan_page.FSDP:
        model = dataclasses.replace(config.model, remat="full", remat_layers=None, kept_layers=0)
        config = dataclasses.replace(
            config, model=model, rules=preset("hsdp+megatron_sp"), pipeline=PipelineConfig()
        )
    model = dataclasses.replace(
        config.model,
        **({"d_model": 1024, "n_heads": 8, "seq_len": 256, "n_layers": 48} if quick else {}),
    )
    if subject.layers:
        model = dataclasses.replace(model, n_layers=subject.layers)
    mesh = dataclasses.replace(config.mesh, **subject.mesh).resolve(subject.devices)
    loop = dataclasses.replace(
        config.train, microbatches=subject.microbatches or config.train.microbatches
    )
    if subject.sequences:
        loop = dataclasses.replace(loop, global_batch=subject.sequences * mesh.data * mesh.fsdp)
    launch = dataclasses.replace(config.launch, compile_cache="")
    return check(
        dataclasses.replace(config, model=model, mesh=mesh, train=loop, launch=launch),
        subject.devices,
    )


def about(config: Any, devices: int) -> Row:
    from mesh_lm.planning.program import flags_of

    model, loop = config.model, config.train
    row: Row = {
        "devices": devices,
        "mesh": " x ".join(f"{axis} {n}" for axis, n in config.mesh.sizes().items() if n > 1),
        "rules": config.rules.name, "parameters": model.n_params(), "layers": model.n_layers,
        "seq_len": model.seq_len,
        "global_batch": loop.global_batch, "microbatches": loop.microbatches, "remat": model.remat,
        "attention": model.attention,
        "remat_layers": model.remat_layers, "kept_layers": model.kept_layers,
        "unroll": model.unroll, "flags": flags_of(config, TARGET),
    }  # fmt: skip
    return row | staged(config)


def staged(config: Any) -> Row:
    """Returns how the pipeline is divided, and a stage's waiting time over its working time (the
    bubble); empty without one."""
    from mesh_lm.schedules import custom
    from mesh_lm.schedules.cost import Durations, timeline

    stages, pipeline, again = (
        config.mesh.pipeline,
        config.pipeline,
        config.pipeline.stash == "input",
    )
    if stages == 1:
        return {}
    schedule = custom.find_schedule(
        pipeline.schedule, stages, config.train.microbatches, pipeline.chunks
    )
    bubble = timeline(
        schedule, Durations(forward=1.0, backward=2.0 + again), drop_last_forward=again
    ).bubble
    return {"stages": stages, "chunks": pipeline.chunks, "stash": pipeline.stash, "bubble": bubble}


def outcome(config: Any, report: Any) -> Row:
    """Returns the report's figures, the minimum that the strategy must send (None: no closed form)
    and the model's own FLOPs."""
    from sharding_rules.lab.summary import over, wire_by_axes

    gib, model = 2**30, config.model
    flops = model.flops_per_token() * config.train.global_batch * model.seq_len / report.n_devices
    sent, least, line = sum(wire_by_axes(report).values()), least_bytes(config), report.timeline
    row: Row = {
        "fits": report.fits, "peak_gib": report.peak_bytes / gib, "usable_gib": report.hbm / gib,
        "sent_gib": sent / gib,
        "least_gib": least and least / gib, "sent_over_least": least and sent / least,
        "tflop": sum(report.flops.values()) / 1e12,
        "flops_over_model": sum(report.flops.values()) / flops, "step_s": line.step / 1e6,
        "exposed_s": line.exposed / 1e6,
        "sustained_step_s": report.step_band.slow / 1e6,
        "model_ratio": line.step / 1e6 / model_seconds(config, report.n_devices),
        "own_ratio": report.model_ratio,
        "warnings": len(report.warnings),
        "megatron_tflops": megatron_flops(config) / report.n_devices / line.step / 1e6,
    }  # fmt: skip
    row |= {
        f"sent over {over(axes)}, GiB": n / gib for axes, n in wire_by_axes(report).items() if n
    }
    return row | {f"{kind}, GiB": n / gib for kind, n in report.memory.by_kind.items()}


def megatron_flops(config: Any) -> float:
    """FLOPs of a step as Megatron-LM counts them: each query with all keys, causal or not, and
    nothing twice.

    72 B s l h^2 (1 + s / 6 h + V / 12 l h) for GPT (Narayanan et al., arXiv 2104.04473, equation 3,
    without its recomputation).
    """
    model = config.model
    weights = model.flops_per_token() - model.attention_flops_per_token()
    attention = 12 * model.n_layers * model.n_heads * model.d_head * model.seq_len
    return config.train.global_batch * model.seq_len * (weights + attention)


def model_seconds(config: Any, devices: int) -> float:
    """Returns the time of a step's matmuls and attention at the optimistic rates of large ones, if
    nothing were recomputed and no device waited: the ratio's definition of main 3f09f97, kept so
    that rows of all dates compare."""
    from sharding_rules.lab.rates import OPTIMISTIC
    from sharding_rules.lab.targets import TARGETS

    tokens = config.train.global_batch * config.model.seq_len / devices
    attention = tokens * config.model.attention_flops_per_token()
    matmuls = tokens * config.model.flops_per_token() - attention
    forward, backward = (
        OPTIMISTIC.attention_share(128, 0, backward=is_backward, deterministic=False)
        for is_backward in (False, True)
    )
    peak_seconds = matmuls / OPTIMISTIC.matmul.value + attention * (1 / forward + 2 / backward) / 3
    return peak_seconds / TARGETS[TARGET].flops["bf16"]


def least_bytes(config: Any) -> float | None:
    """Returns the minimum by docs/closed_forms.md; None if no collective is needed or no form
    covers the rules."""
    from mesh_lm.planning.closed_forms.config import expected_of
    from mesh_lm.planning.closed_forms.terms import total

    try:
        return total(expected_of(config), field="least_wire_bytes") or None
    except ValueError:
        return None


def resident() -> int:
    """Returns the peak memory in bytes of this process and of the child that compiled. ru_maxrss of
    this one would include its parent's."""
    match = re.search(
        r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"), re.MULTILINE
    )
    return (
        (int(match[1]) + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) * 1024
        if match
        else 0
    )


if __name__ == "__main__":
    main()
