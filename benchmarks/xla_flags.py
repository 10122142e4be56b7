"""The effect of XLA's flags on a training step of gpt_175b (4 of its 96 layers) on 64 GPUs:
overlap, FLOPs, memory.

Nothing runs on a GPU: overlap is what the schedule allows, and step times are the lab's estimate.
Each row runs in a process of its own, with the flags in XLA_FLAGS as in a run. Needs the compiler
for CUDA: pip install -e '.[aot]'.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
from record import ROOT, Record, Row, options

from mesh_lm.config import files
from mesh_lm.planning.program import compile_config
from sharding_rules import MeshConfig, preset
from sharding_rules.lab.flags import FLAG_SETS, written
from sharding_rules.lab.report import Report

_NO_SOL = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_analytical_sol_latency_estimator": False,
}
_PIPELINED = {
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
}
_COMBINED = (
    "xla_gpu_all_gather_combine_threshold_bytes",
    "xla_gpu_reduce_scatter_combine_threshold_bytes",
)
CANDIDATES: dict[str, dict[str, Any]] = {
    "no scheduler": {"xla_gpu_enable_analytical_sol_latency_estimator": False},
    "scheduler, SoL estimator off": _NO_SOL,
    "pipelined": _PIPELINED,
    "scheduler, SoL estimator off, pipelined": _NO_SOL | _PIPELINED,
    "combine up to 1 GiB": dict.fromkeys(_COMBINED, 1 << 30),
    "combine nothing": dict.fromkeys(_COMBINED, 0),
    "double buffering": {"xla_gpu_enable_while_loop_double_buffering": True},
}
"""Flags that were tried and left out of FLAG_SETS. The names of the pipelining flags are those of
jax 0.10; 0.11 aborts on them."""


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument(
        "--row",
        action="store_true",
        help="compile under the present XLA_FLAGS and print one row (internal)",
    )
    parser.add_argument(
        "--only",
        default="",
        help="sets whose name contains one of these words, with commas between",
    )
    parser.add_argument("--target", default="h100", help="h100, a100, b200, ...")
    args = parser.parse_args()
    if args.row:
        print(json.dumps(row(compiled(args.target, args.quick))))
        return
    sets = {
        name: {flag: f.value for flag, f in each.flags.items()} for name, each in FLAG_SETS.items()
    } | CANDIDATES
    sets = {
        name: flags
        for name, flags in sets.items()
        if any(word in name for word in args.only.split(","))
    }
    record = Record(
        "xla_flags-quick" if args.quick else "xla_flags",
        args.output,
        kind=f"{args.target} jax {jax.__version__}",
    )
    rows = []
    for name, flags in list(sets.items())[: 2 if args.quick else None]:
        rows.append(
            {"set": name, "flags": written(flags)} | in_a_process(flags, args.target, args.quick)
        )
        record.table(
            "XLA flags",
            rows,
            (__doc__ or "").partition("\n")[0] + " estimated_ms: predicted, never measured.",
        )
        record.write()


def in_a_process(flags: dict[str, Any], target: str, quick: bool) -> Row:
    """Returns the row, or XLA's error about the flags, which ends the process."""
    environment = os.environ | {
        "XLA_FLAGS": written(flags),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
    }
    command = [
        sys.executable,
        str(Path(__file__)),
        "--row",
        f"--target={target}",
        *(["--quick"] if quick else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        errors = [
            line for line in done.stderr.splitlines() if "Unknown flag" in line or "Error" in line
        ]
        return {"error": errors[-1][:120] if errors else f"status {done.returncode}"}
    return json.loads(done.stdout.splitlines()[-1])


def compiled(target: str, quick: bool) -> Report:
    """One sequence per device in a microbatch; XLA's own attention, which needs no cuDNN."""
    config = files.load("configs/gpt_175b.py")
    small = {"d_model": 1024, "n_heads": 8, "seq_len": 256} if quick else {}
    model = dataclasses.replace(config.model, n_layers=4, attention="xla", remat="full", **small)
    train = dataclasses.replace(config.train, global_batch=16, microbatches=2)
    launch = dataclasses.replace(config.launch, compile_cache="")
    mesh, rules = MeshConfig(data=2, fsdp=4, tensor=8), preset("hsdp+megatron_sp")
    config = dataclasses.replace(
        config, model=model, train=train, launch=launch, mesh=mesh, rules=rules
    )
    return compile_config(config, target, 64)


def row(report: Report) -> Row:
    """Overlap is the share of wire bytes that are sent while at least one matmul runs."""
    sent = sum(one.times * one.wire for one in report.collectives)
    beside = sum(one.times * one.wire for one in report.collectives if one.flops_hidden_behind)
    columns: Row = {
        "overlap": beside / sent, "sent_gib": sent / 2**30,
        "collectives": sum(one.times for one in report.collectives),
        "synchronous": sum(not one.asynchronous for one in report.collectives),
        "tflop": sum(report.flops.values()) / 1e12,
        "peak_gib": report.peak_bytes / 2**30,
    }  # fmt: skip
    if report.timeline:
        columns |= {
            "estimated_ms": report.timeline.step / 1e3,
            "estimated_exposed_ms": report.timeline.exposed / 1e3,
        }
    return columns | {"compile_s": report.compile_seconds}


if __name__ == "__main__":
    main()
