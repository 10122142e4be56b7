"""Short runs of a shipped config on the CPU, the losses that their logs have, and a comparison of
optimizer rules by them."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from extend_context import called
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
                    "curve": " ".join(f"{step}:{loss:.4f}" for step, loss in losses.curve.items()),
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
    return 0
