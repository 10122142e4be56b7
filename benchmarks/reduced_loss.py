"""Trains a small model with gradients summed in fp32, bf16 and int8, with several seeds: what rounding does to the loss.

A smaller gpt_tiny on the source of Python's standard library, on 4 CPU devices. A seed chooses the initial weights and the order of the
samples, the same for all three, so that their losses are compared pair by pair. Runs that the results of today have already are not
repeated.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from record import ROOT, Record, Row, options

DEVICES, STEPS, SEEDS = 4, 300, (0, 1, 2)
RULES = {"float32": "ddp", "bfloat16": "ddp+reduce_bfloat16", "int8": "ddp+reduce_int8"}
MODEL = {"n-layers": 2, "seq-len": 128, "vocab-size": 1024}
LAST = 50
"""Steps that the mean of the training loss is over."""
RUNS, DIFFERENCES = "Runs", "Relative to float32"


def main() -> int:
    args = options(__doc__ or "").parse_args()
    record = Record(f"reduced_loss{'-quick' * args.quick}", args.output)
    known = record.directory / f"{record.stem}.json"
    rows: list[Row] = json.loads(known.read_text())["tables"][RUNS]["rows"] if known.is_file() else []
    done = {(row["sums"], row["seed"]) for row in rows}
    for seed in SEEDS[: 1 if args.quick else None]:
        for sums, rules in RULES.items():
            if (sums, seed) not in done:
                rows.append(trained(sums, rules, seed, 4 if args.quick else STEPS))
                record.table(
                    RUNS, rows, f"Of held-out files after the last step, and of training the mean of the last {LAST}; nats per token."
                )
                record.table(DIFFERENCES, differences(rows), "Of the same seed, in per cent; below zero: the loss is lower.")
                record.write()
    return 0


def trained(sums: str, rules: str, seed: int, steps: int) -> Row:
    """Returns the losses of one run. Raises RuntimeError with its last output if it fails."""
    words = [f"--model.{field}={value}" for field, value in MODEL.items()] + ["--data.tokenizer-vocab=1024"]
    loop = [f"--train.steps={steps}", f"--train.eval-every={steps}", "--train.eval-sequences=256", "--train.log-every=1"]
    quiet = ["--train.sample-tokens=0", "--checkpoint.every=0", "--optimizer.warmup-steps=30"]
    where = [f"--launch.cpu-devices={DEVICES}", f"--rules={rules}", f"--seed={seed}"]
    command = ["train", "gpt_tiny", "--output=run", *words, *loop, *quiet, *where]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    with tempfile.TemporaryDirectory() as place:
        begin = time.monotonic()
        called = [sys.executable, "-m", "mesh_lm", *command]
        done = subprocess.run(called, cwd=place, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        lines = [json.loads(line) for line in (Path(place) / "run" / "metrics.jsonl").read_text().splitlines()]
    held_out = next(line["heldout_loss"] for line in reversed(lines) if "heldout_loss" in line)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == steps
    return {
        "sums": sums, "seed": seed, "steps": steps, "heldout_loss": held_out, "train_loss": statistics.fmean(losses[-LAST:]),
        "seconds": time.monotonic() - begin, "command": " ".join(["mesh-lm", *command]),
    }  # fmt: skip


def differences(rows: list[Row]) -> list[Row]:
    """Returns a line for each type of sums: the differences of the losses from those in float32, seed by seed, their mean and spread."""
    exact = {row["seed"]: row for row in rows if row["sums"] == "float32"}
    lines: list[Row] = []
    for sums in RULES:
        pairs = [(row, exact[row["seed"]]) for row in rows if row["sums"] == sums != "float32" and row["seed"] in exact]
        if not pairs:
            continue
        for loss in ("heldout_loss", "train_loss"):
            each = [100 * (row[loss] / one[loss] - 1) for row, one in pairs]
            by_seed = {f"seed_{row['seed']}_pct": value for (row, _), value in zip(pairs, each, strict=True)}
            spread = statistics.stdev(each) if len(each) > 1 else None
            lines.append({"sums": sums, "loss": loss, **by_seed, "mean_pct": statistics.fmean(each), "deviation_pct": spread})
    seeds = [row["heldout_loss"] for row in exact.values()]
    if len(seeds) > 1:
        among = 100 * statistics.stdev(seeds) / statistics.fmean(seeds)
        lines.append({"sums": "float32", "loss": "heldout_loss", "mean_pct": 0.0, "deviation_pct": among, "note": "among the seeds"})
    return lines


if __name__ == "__main__":
    sys.exit(main())
