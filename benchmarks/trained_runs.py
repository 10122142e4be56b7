"""A short run of a shipped config on the CPU, and the losses that its log has."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from extend_context import called


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
