"""The names under which TensorBoard and Weights & Biases show metrics: train/, eval/, perf/ and
data/, a tab or a section each.
"""

from __future__ import annotations

from collections.abc import Mapping

_CHARTS = {
    "train_bpb": "train/bpb",
    "mean_train_bpb": "train/mean_bpb",
    "heldout_loss": "eval/loss",
    "heldout_bpb": "eval/bpb",
    "step_ms": "perf/step_ms",
    "tokens_per_s": "perf/tokens_per_s",
    "mfu": "perf/mfu",
    "memory_gib": "perf/memory_gib",
    "tokens": "data/tokens",
    "epoch": "data/epoch",
    "wait_ms": "data/wait_ms",
    "labels": "data/labels",
}
"""Charts by metric; that of any other metric is train/ and its name."""


def grouped(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns the metrics of a row of metrics.jsonl by chart."""
    return {_CHARTS.get(name, f"train/{name}"): value for name, value in metrics.items()}
