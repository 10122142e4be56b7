"""AdamW with 8-bit moments beside AdamW: gpt_tiny on the CPU, with equal seeds, text and
learning rate.

The text and its order depend on the seed alone, so that each row with 8-bit moments is compared
with AdamW's of its seed. A run that has ended in --runs is not repeated.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from record import Record, Row, options
from trained_runs import trained_once

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
    changes = [f"--optimizer.rule={rule}"]
    losses = trained_once(CONFIG, f"{rule}-{seed}", changes, steps, seed, runs)
    return {
        "rule": rule,
        "seed": seed,
        "late_nats_per_token": losses.late,
        "heldout_nats_per_token": losses.heldout,
        "more_than_adamw": 0.0,
        "curve": " ".join(f"{step}:{loss:.4f}" for step, loss in losses.curve.items()),
    }


if __name__ == "__main__":
    sys.exit(main())
