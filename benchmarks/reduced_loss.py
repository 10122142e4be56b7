"""Trains a small model with gradients summed in fp32, bf16 and int8, with several seeds: what
rounding does to the loss.

A smaller gpt_tiny on the source of Python's standard library, on 4 CPU devices, at its own learning
rate and at a lower one. A seed chooses the initial weights and the order of the samples, the same
for all sums, so that their losses are compared pair by pair. Training itself amplifies differences:
fp32 sums in two levels (`by_node`), which differ from plain ones by fp32 rounding alone, tell how
much. Runs that the results of today have already are not repeated.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from record import ROOT, Record, Row, options

DEVICES, STEPS, SEEDS = 4, 300, (0, 1, 2)
RULES = {
    "float32": ["--rules=ddp"],
    "float32, by node": ["--rules=by_node", "--mesh.data=2", "--mesh.extra=node=2"],
    "bfloat16": ["--rules=ddp+reduce_bfloat16"],
    "int8": ["--rules=ddp+reduce_int8"],
}
RATES = (8e-3, 1e-3)
"""Learning rates: that of gpt_tiny, and one with which small differences stay smaller."""
MODEL = {"n-layers": 2, "seq-len": 128, "vocab-size": 1024}
LAST = 50
"""Steps that the mean of the training loss is over."""
RUNS, DIFFERENCES = "Runs", "Relative to float32"


def main() -> int:
    args = options(__doc__ or "").parse_args()
    record = Record(f"reduced_loss{'-quick' * args.quick}", args.output)
    earlier_file = record.directory / f"{record.stem}.json"
    rows: list[Row] = (
        json.loads(earlier_file.read_text(encoding="utf-8"))["tables"][RUNS]["rows"]
        if earlier_file.is_file()
        else []
    )
    done = {(row["sums"], row["seed"], row["learning_rate"]) for row in rows}
    for rate, seed, sums in itertools.product(RATES, SEEDS, RULES):
        if (sums, seed, rate) not in done and not (
            args.quick and (rate, seed) != (RATES[0], SEEDS[0])
        ):
            rows.append(trained(sums, seed, rate, 4 if args.quick else STEPS))
            record.table(
                RUNS,
                rows,
                (
                    "Nats per token, on held-out files and in training, the mean of the last "
                    f"{LAST} steps."
                ),
            )
            record.table(
                DIFFERENCES,
                differences(rows),
                "Per cent, between runs of the same seed; below zero: the loss is lower.",
            )
            record.write()
    return 0


def trained(sums: str, seed: int, rate: float, steps: int) -> Row:
    """Returns the losses of one run. Raises RuntimeError with its last output if it fails."""
    words = [f"--model.{field}={value}" for field, value in MODEL.items()] + [
        "--data.tokenizer-vocab=1024",
        "--data.max-epochs=0",
    ]
    loop = [
        f"--train.steps={steps}",
        f"--train.eval-every={steps}",
        "--train.eval-sequences=256",
        "--train.log-every=1",
    ]
    quiet = ["--train.sample-tokens=0", "--checkpoint.every=0", "--optimizer.warmup-steps=30"]
    paths = [
        f"--launch.cpu-devices={DEVICES}",
        *RULES[sums],
        f"--seed={seed}",
        f"--optimizer.learning-rate={rate}",
    ]
    command = ["train", "gpt_tiny", "--output=run", *words, *loop, *quiet, *paths]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]]),
    }
    with tempfile.TemporaryDirectory() as workdir:
        begin = time.monotonic()
        called = [sys.executable, "-m", "mesh_lm", *command]
        done = subprocess.run(called, cwd=workdir, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        lines = [
            json.loads(line)
            for line in (Path(workdir) / "run" / "metrics.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        ]
    held_out = next(line["heldout_loss"] for line in reversed(lines) if "heldout_loss" in line)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == steps
    return {
        "sums": sums, "seed": seed, "learning_rate": rate, "steps": steps,
        "heldout_loss": held_out, "train_loss": statistics.fmean(losses[-LAST:]),
        "seconds": time.monotonic() - begin, "command": " ".join(["mesh-lm", *command]),
    }  # fmt: skip


def differences(rows: Sequence[Row]) -> list[Row]:
    """Returns a line for each learning rate and type of sums: the differences from float32 seed by
    seed, their mean and deviation.

    The lines of float32 have the deviation among the seeds.
    """
    lines: list[Row] = []
    for rate, sums, loss in itertools.product(RATES, RULES, ("heldout_loss", "train_loss")):
        exact = {
            row["seed"]: row[loss]
            for row in rows
            if (row["sums"], row["learning_rate"]) == ("float32", rate)
        }
        mine = {
            row["seed"]: row[loss]
            for row in rows
            if (row["sums"], row["learning_rate"]) == (sums, rate)
        }
        if sums == "float32":
            middle = statistics.fmean(exact.values()) if exact else 0.0
            each = {seed: 100 * (value / middle - 1) for seed, value in exact.items()}
        else:
            each = {
                seed: 100 * (value / exact[seed] - 1)
                for seed, value in mine.items()
                if seed in exact
            }
        if each:
            spread = statistics.stdev(each.values()) if len(each) > 1 else None
            line: Row = {
                "learning_rate": rate,
                "sums": "float32, from its mean" if sums == "float32" else sums,
                "loss": loss,
            }
            seed_columns = {f"seed_{seed}_pct": value for seed, value in each.items()}
            lines.append(
                {
                    **line,
                    **seed_columns,
                    "mean_pct": statistics.fmean(each.values()),
                    "deviation_pct": spread,
                }
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
