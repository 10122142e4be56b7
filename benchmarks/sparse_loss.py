"""gpt_tiny_moe beside gpt_tiny on the CPU: the loss of equal active parameters and equal tokens.

Both are tuned alike: each trains with the same learning rates from seed 0, and with the best of
them, by the held-out loss, from the other seeds. A run that has ended in --runs is not repeated.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from record import Record, Row, options
from trained_runs import SEEDS, curve_text, draw_curves, points, trained_once

from mesh_lm.config import load

CONFIGS = ("gpt_tiny", "gpt_tiny_moe")
RATES = (4e-3, 8e-3)


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run")
    parser.add_argument("--runs", type=Path, help="directory of the runs, to continue later")
    args = parser.parse_args()
    steps = 4 if args.quick else args.steps
    rates = RATES[:1] if args.quick else RATES
    seeds = SEEDS[:1] if args.quick else SEEDS
    name = "sparse_loss-quick" if args.quick else f"sparse_loss_{steps}_steps"
    record = Record(name, args.output)
    rows: list[Row] = []

    def add(config: str, rate: float, seed: int, runs: Path) -> Row:
        row = trained(config, rate, seed, steps, runs)
        rows.append(row)
        record.table(
            "A sparse model beside a dense one",
            rows,
            f"{steps} steps, less than one epoch, so that all training text is new to the model. "
            "Losses in nats per token. late: the mean training loss of the last sixth of the "
            "steps; heldout: the loss on all held-out documents, which are other modules than "
            "those of the training text.",
        )
        record.write()
        return row

    with tempfile.TemporaryDirectory() as directory:
        runs = args.runs or Path(directory)
        for config in CONFIGS:
            tuned = [add(config, rate, seeds[0], runs) for rate in rates]
            best = min(tuned, key=lambda row: row["heldout_nats_per_token"])
            for seed in seeds[1:]:
                add(config, best["learning_rate"], seed, runs)
    picture = f"{record.stem}.png"
    draw(rows, record.directory / picture)
    record.data["charts"] = [picture]
    record.write()
    return 0


def draw(rows: list[Row], path: Path) -> None:
    """Draws the losses of both models at the best learning rate of each."""
    best = {
        config: min(
            (row for row in rows if row["config"] == config and row["seed"] == SEEDS[0]),
            key=lambda row: row["heldout_nats_per_token"],
        )["learning_rate"]
        for config in CONFIGS
    }
    curves = {
        (row["config"], row["seed"]): points(row)
        for row in rows
        if row["learning_rate"] == best[row["config"]]
    }
    draw_curves(curves, *CONFIGS, path)


def trained(config: str, rate: float, seed: int, steps: int, runs: Path) -> Row:
    """Trains, unless the run has ended, and returns its row."""
    name = f"{config}-{rate:g}-{seed}"
    changes = [f"--optimizer.learning-rate={rate:g}"]
    losses = trained_once(config, name, changes, steps, seed, runs)
    loads = [line["expert_load"] for line in losses.lines if "expert_load" in line]
    return {
        "config": config,
        "learning_rate": rate,
        "seed": seed,
        "late_nats_per_token": losses.late,
        "heldout_nats_per_token": losses.heldout,
        "last_expert_load": loads[-1] if loads else None,
        "active_parameters": active_parameters(config),
        "curve": curve_text(losses.curve),
    }


def active_parameters(config: str) -> int:
    """Returns the parameters that a token uses: of a layer's experts, the active ones."""
    model = load(f"configs/{config}.py").model
    return model.n_params() - model.n_idle_params()


if __name__ == "__main__":
    sys.exit(main())
