"""AdamW with 8-bit moments beside AdamW: gpt_tiny on the CPU, with equal seeds, text and
learning rate.

The text and its order depend on the seed alone, so that each row with 8-bit moments is compared
with AdamW's of its seed. A run that has ended in --runs is not repeated.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from extend_context import called
from record import Record, Row, options

CONFIG = "gpt_tiny"
RULES = ("adamw", "adamw8")
SEEDS = (0, 1, 2)


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run")
    parser.add_argument("--runs", type=Path, help="directory of the runs, to continue later")
    args = parser.parse_args()
    steps = 4 if args.quick else args.steps
    seeds = SEEDS[:1] if args.quick else SEEDS
    name = "adam8_loss-quick" if args.quick else f"adam8_loss_{steps}_steps"
    record = Record(name, args.output)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        runs = args.runs or Path(directory)
        for seed in seeds:
            adamw_row: Row | None = None
            for rule in RULES:
                row = trained(rule, seed, steps, runs)
                if adamw_row is None:
                    adamw_row = row
                row["more_than_adamw"] = (
                    row["heldout_nats_per_token"] - adamw_row["heldout_nats_per_token"]
                )
                rows.append(row)
                record.table(
                    "8-bit moments beside AdamW",
                    rows,
                    f"{CONFIG}, {steps} steps, less than one epoch. Losses in nats per token. "
                    "late: the mean training loss of the last sixth of the steps; heldout: the "
                    "loss on all held-out documents, which are other modules than those of the "
                    "training text; more_than_adamw: its difference to AdamW's of the same seed.",
                )
                record.write()
    return 0


def trained(rule: str, seed: int, steps: int, runs: Path) -> Row:
    """Trains, unless the run has ended, and returns its row."""
    name = f"{rule}-{seed}"
    command = [
        *("train", CONFIG, f"--output={name}", f"--train.steps={steps}", f"--seed={seed}"),
        *(f"--optimizer.rule={rule}", "--train.eval-every=0", "--train.eval-sequences=0"),
        *("--train.sample-tokens=0", "--checkpoint.every=0"),
    ]
    runs.mkdir(parents=True, exist_ok=True)
    metrics = runs / name / "metrics.jsonl"
    if not (metrics.exists() and "heldout_loss" in metrics.read_text(encoding="utf-8")):
        called(command, runs)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    (heldout,) = (line["heldout_loss"] for line in lines if "heldout_loss" in line)
    means = [line["mean_loss"] for line in lines if "mean_loss" in line]
    late = means[-max(1, len(means) // 6) :]
    return {
        "rule": rule,
        "seed": seed,
        "late_nats_per_token": sum(late) / len(late),
        "heldout_nats_per_token": heldout,
        "more_than_adamw": 0.0,
        "curve": " ".join(f"{line['step']}:{line['loss']:.4f}" for line in lines if "loss" in line),
    }


if __name__ == "__main__":
    sys.exit(main())
