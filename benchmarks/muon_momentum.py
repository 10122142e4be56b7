"""Muon with two forms of momentum, optax's and its author's: gpt_tiny on the CPU, with equal seeds,
text and learning rate.

They differ in the first some hundred steps only (jordan_muon.py). The text and its order depend on
the seed alone, so that each row of the author's form is compared with optax's of its seed. A run
that has ended in --runs is not repeated.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from record import Record, Row, options
from trained_runs import trained_once

CONFIG = "gpt_tiny"
RULES = {
    "optax": "muon",
    "jordan": f"{Path(__file__).with_name('jordan_muon.py')}:JordanMuon",
}
"""The form of the momentum -> optimizer.rule."""
SEEDS = (0, 1, 2)


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run")
    parser.add_argument("--runs", type=Path, help="directory of the runs, to continue later")
    args = parser.parse_args()
    steps = 4 if args.quick else args.steps
    seeds = SEEDS[:1] if args.quick else SEEDS
    name = "muon_momentum-quick" if args.quick else f"muon_momentum_{steps}_steps"
    record = Record(name, args.output)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        runs = args.runs or Path(directory)
        for seed in seeds:
            optax_row = trained("optax", seed, steps, runs)
            jordan_row = trained("jordan", seed, steps, runs)
            jordan_row["more_than_optax"] = (
                jordan_row["heldout_nats_per_token"] - optax_row["heldout_nats_per_token"]
            )
            rows += [optax_row, jordan_row]
            record.table(
                "two forms of momentum in Muon",
                rows,
                f"{CONFIG}, {steps} steps, less than one epoch. Losses in nats per token. late: "
                "the mean training loss of the last sixth of the steps; heldout: the loss on all "
                "held-out documents, which are other modules than those of the training text; "
                "more_than_optax: its difference to that of optax's form of the same seed.",
            )
            record.write()
    return 0


def trained(form: str, seed: int, steps: int, runs: Path) -> Row:
    """Trains, unless the run has ended, and returns its row."""
    changes = [f"--optimizer.rule={RULES[form]}"]
    losses = trained_once(CONFIG, f"{form}-{seed}", changes, steps, seed, runs)
    return {
        "momentum": form,
        "seed": seed,
        "late_nats_per_token": losses.late,
        "heldout_nats_per_token": losses.heldout,
        "more_than_optax": 0.0,
        "curve": " ".join(f"{step}:{loss:.4f}" for step, loss in losses.curve.items()),
    }


if __name__ == "__main__":
    sys.exit(main())
