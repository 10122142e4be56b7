"""gpt_tiny_moe beside gpt_tiny on the CPU: the loss of equal active parameters and equal tokens.

Both are tuned alike: each trains with the same learning rates from seed 0, and with the best of
them, by the held-out loss, from the other seeds. A run that has ended in --runs is not repeated.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from record import Record, Row, options
from trained_runs import SEEDS, trained_once

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
    """Draws how much lower the loss of the sparse model is in each step, by seed: both models see
    the same text in the same order, so that the difference is steadier than either loss."""
    best = {
        config: min(
            (row for row in rows if row["config"] == config and row["seed"] == SEEDS[0]),
            key=lambda row: row["heldout_nats_per_token"],
        )["learning_rate"]
        for config in CONFIGS
    }
    curves = {
        (row["config"], row["seed"]): dict(points(row))
        for row in rows
        if row["learning_rate"] == best[row["config"]]
    }
    with rc_context({"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        losses, differences = figure.subplots(1, 2)
        for seed in sorted({row["seed"] for row in rows}):
            dense, sparse = (smooth(curves[config, seed]) for config in CONFIGS)
            losses.plot(*zip(*dense.items(), strict=True), color="tab:gray", linewidth=1)
            losses.plot(*zip(*sparse.items(), strict=True), color="tab:blue", linewidth=1)
            steps = [step for step in dense if step in sparse]
            change = [sparse[step] - dense[step] for step in steps]
            differences.plot(steps, change, linewidth=1, label=f"seed {seed}")
        losses.set_title("loss, nats per token: gpt_tiny gray, gpt_tiny_moe blue", fontsize=9)
        losses.set_ylim(top=6)
        differences.set_title("gpt_tiny_moe minus gpt_tiny", fontsize=9)
        differences.axhline(0, color="black", linewidth=0.5)
        differences.legend(fontsize=8, frameon=False)
        for axes in (losses, differences):
            axes.set_xlabel("step", fontsize=9)
            axes.tick_params(labelsize=8)
        FigureCanvasAgg(figure).print_png(str(path))


def points(row: Row) -> list[tuple[int, float]]:
    """Returns (step, training loss) of a row."""
    pairs = (pair.split(":") for pair in row["curve"].split())
    return [(int(step), float(loss)) for step, loss in pairs]


def smooth(curve: dict[int, float], width: int = 5) -> dict[int, float]:
    """Returns the mean of each point and those before it, `width` in all."""
    steps = sorted(curve)
    return {
        step: sum(curve[s] for s in steps[i - width + 1 : i + 1]) / width
        for i, step in enumerate(steps)
        if i >= width - 1
    }


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
        "curve": " ".join(f"{step}:{round(loss, 4)}" for step, loss in losses.curve.items()),
    }


def active_parameters(config: str) -> int:
    """Returns the parameters that a token uses: of a layer's experts, the active ones."""
    model = load(f"configs/{config}.py").model
    return model.n_params() - model.n_idle_params()


if __name__ == "__main__":
    sys.exit(main())
