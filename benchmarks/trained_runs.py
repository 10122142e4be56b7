"""Short runs of a shipped config on the CPU, the losses that their logs have, and comparisons by
them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from extend_context import called
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from record import Record, Row, options

SEEDS = (0, 1, 2)
_CONFIG = "gpt_tiny"


class Losses(NamedTuple):
    """Losses of a run, in nats per token."""

    lines: list[dict[str, Any]]
    """All lines of metrics.jsonl."""
    heldout: float
    """On all held-out documents, after the last step."""
    late: float
    """The mean of the training losses of the last sixth of the rows."""
    curve: dict[int, float]
    """Step -> training loss."""


def trained_once(
    config: str, name: str, changes: Sequence[str], steps: int, seed: int, runs: Path
) -> Losses:
    """Trains, unless the run has ended, and returns its losses.

    Args:
      name: the run's directory in `runs`, which is made if it is not there.
      changes: further words of the command line.
    """
    command = [
        *("train", config, f"--output={name}", f"--train.steps={steps}", f"--seed={seed}"),
        *(*changes, "--train.eval-every=0", "--train.eval-sequences=0"),
        *("--train.sample-tokens=0", "--checkpoint.every=0"),
    ]
    runs.mkdir(parents=True, exist_ok=True)
    metrics = runs / name / "metrics.jsonl"
    if not (metrics.exists() and "heldout_loss" in metrics.read_text(encoding="utf-8")):
        called(command, runs)
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    (heldout,) = (line["heldout_loss"] for line in lines if "heldout_loss" in line)
    means = [line["mean_loss"] for line in lines if "mean_loss" in line]
    last_means = means[-max(1, len(means) // 6) :]
    curve = {line["step"]: line["loss"] for line in lines if "loss" in line}
    return Losses(lines, heldout, sum(last_means) / len(last_means), curve)


def compare_rules(
    description: str, name: str, title: str, column: str, rules: Mapping[str, str]
) -> int:
    """Trains gpt_tiny by several optimizer rules from each of SEEDS, records the losses after each
    seed, and returns 0.

    Args:
      description: the docstring of the benchmark.
      name: of the results.
      title: of their table.
      column: what the rules differ in, such as "rule".
      rules: what the column shows -> optimizer.rule. The others are compared with the first.
    """
    parser = options(description)
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each run")
    parser.add_argument("--runs", type=Path, help="directory of the runs, to continue later")
    args = parser.parse_args()
    steps = 4 if args.quick else args.steps
    seeds = SEEDS[:1] if args.quick else SEEDS
    record = Record(f"{name}-quick" if args.quick else f"{name}_{steps}_steps", args.output)
    baseline = next(iter(rules))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        runs = args.runs or Path(directory)
        for seed in seeds:
            first: Losses | None = None
            for shown, rule in rules.items():
                changes = [f"--optimizer.rule={rule}"]
                losses = trained_once(_CONFIG, f"{shown}-{seed}", changes, steps, seed, runs)
                first = first or losses
                rows.append({
                    column: shown,
                    "seed": seed,
                    "late_nats_per_token": losses.late,
                    "heldout_nats_per_token": losses.heldout,
                    f"more_than_{baseline}": losses.heldout - first.heldout,
                    "curve": curve_text(losses.curve),
                })  # fmt: skip
            record.table(
                title,
                rows,
                f"{_CONFIG}, {steps} steps, less than one epoch. Losses in nats per token. late: "
                "the mean training loss of the last sixth of the steps; heldout: the loss on all "
                "held-out documents, which are other modules than those of the training text; "
                f"more_than_{baseline}: its difference to that of {baseline} from the same seed.",
            )
            record.write()
    _, other = rules
    picture = f"{record.stem}.png"
    curves = {(row[column], row["seed"]): points(row) for row in rows}
    draw_curves(curves, baseline, other, record.directory / picture)
    record.data["charts"] = [picture]
    record.write()
    return 0


def curve_text(curve: Mapping[int, float]) -> str:
    """Returns a curve as the text of a column."""
    return " ".join(f"{step}:{loss:.4f}" for step, loss in curve.items())


def points(row: Row) -> dict[int, float]:
    """Returns step -> training loss of a row with a column "curve"."""
    pairs = (pair.split(":") for pair in row["curve"].split())
    return {int(step): float(loss) for step, loss in pairs}


def draw_curves(
    curves: Mapping[tuple[str, int], Mapping[int, float]], first: str, second: str, path: Path
) -> None:
    """Draws the losses of two kinds of runs, and how much higher those of the second are, by seed:
    runs of one seed see the same text in the same order, so that the difference is steadier than
    either loss.

    curves: (kind, seed) -> step -> training loss.
    """
    with rc_context({"font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        losses, differences = figure.subplots(1, 2)
        for seed in sorted({seed for _, seed in curves}):
            before, after = (_smooth(curves[kind, seed]) for kind in (first, second))
            losses.plot(*zip(*before.items(), strict=True), color="tab:gray", linewidth=1)
            losses.plot(*zip(*after.items(), strict=True), color="tab:blue", linewidth=1)
            steps = [step for step in before if step in after]
            change = [after[step] - before[step] for step in steps]
            differences.plot(steps, change, linewidth=1, label=f"seed {seed}")
        losses.set_title(f"loss, nats per token: {first} gray, {second} blue", fontsize=9)
        losses.set_ylim(top=6)
        differences.set_title(f"{second} minus {first}", fontsize=9)
        differences.axhline(0, color="black", linewidth=0.5)
        differences.legend(fontsize=8, frameon=False)
        for axes in (losses, differences):
            axes.set_xlabel("step", fontsize=9)
            axes.tick_params(labelsize=8)
        FigureCanvasAgg(figure).print_png(str(path))


def _smooth(curve: Mapping[int, float], width: int = 5) -> dict[int, float]:
    """Returns the mean of each point and those before it, `width` in all, or as many as there are."""
    width = min(width, len(curve))
    steps = sorted(curve)
    return {
        step: sum(curve[s] for s in steps[i - width + 1 : i + 1]) / width
        for i, step in enumerate(steps)
        if i >= width - 1
    }
