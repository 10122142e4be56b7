"""The tables of docs/experts.md, from a run's metrics and from the functions of the exchange:
tests/docs/made.py writes them into the page."""

from __future__ import annotations

import json
from pathlib import Path

from mesh_lm.model.exchange import chosen_share
from mesh_lm.model.experts_config import ExpertsConfig
from tests.docs.markdown import table

ROOT = Path(__file__).resolve().parents[2]
RUN = max((ROOT / "benchmarks" / "results").glob("gpt_tiny_moe_*"))
COMPARISON = max((ROOT / "benchmarks" / "results").glob("sparse_loss_600_steps_*.json"))
FACTOR = ExpertsConfig().factor
MODELS = ((8, 2), (64, 6), (128, 4), (128, 8), (256, 8))
"""Experts of a layer, and those of a token."""
NODE = 8
"""Devices of a node."""


def metrics(name: str) -> dict[int, dict[str, float]]:
    """Step -> the metrics of a run."""
    lines = (RUN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["step"]: row for row in map(json.loads, lines) if "expert_load" in row}


def first_steps() -> str:
    """Loss and load of both runs."""
    with_balance = metrics("balanced")
    without = metrics("unbalanced")
    rows = [
        [str(step), *_cells(with_balance[step]), *_cells(without[step])]
        for step in with_balance
        if step == 1 or step % 20 == 0
    ]
    head = ["step", "loss", "load", "idle", "loss, unbalanced", "load", "idle"]
    return table(head, rows)


def _cells(row: dict[str, float]) -> list[str]:
    return [f"{row['mean_loss']:.2f}", f"{row['expert_load']:.2f}", f"{row['expert_idle']:.1%}"]


def sent_share(number: int, active: int, n_devices: int) -> float:
    """Rows that a padded exchange sends, divided by those of a gather."""
    return min(1.0, FACTOR * chosen_share(number, active, number // n_devices))


def padded_of_gather() -> str:
    """How much less a padded exchange sends, over 2, 4 and 8 devices."""
    rows = [
        [f"{number}, {active}", *(f"{sent_share(number, active, g):.2f}" for g in (2, 4, 8))]
        for number, active in MODELS
    ]
    return table(["experts, active", "2 devices", "4 devices", "8 devices"], rows)


def across_nodes() -> str:
    """Rows that a device sends to other nodes, in units of its own tokens."""
    n_devices = NODE * NODE
    others = n_devices - NODE
    rows = []
    for number, active in MODELS:
        if number % n_devices:
            continue
        padded = others * sent_share(number, active, n_devices)
        by_node = (NODE - 1) * sent_share(number, active, NODE)
        rows.append([f"{number}, {active}", str(others), f"{padded:.1f}", f"{by_node:.1f}"])
    head = ["experts, active", "gather over all", "padded over all", "padded across, gather inside"]
    return table(head, rows)


def sparse_beside_dense() -> str:
    """Losses of three seeds, each model at its best learning rate."""
    found = json.loads(COMPARISON.read_text(encoding="utf-8"))["tables"]
    rows = found["A sparse model beside a dense one"]["rows"]
    cells = []
    for seed in sorted({row["seed"] for row in rows}):
        cell = [str(seed)]
        for key in ("late_nats_per_token", "heldout_nats_per_token"):
            losses = [
                min(row[key] for row in rows if row["config"] == config and row["seed"] == seed)
                for config in ("gpt_tiny", "gpt_tiny_moe")
            ]
            cell += [f"{loss:.3f}" for loss in losses]
        cells.append(cell)
    head = [
        "seed", "last 100 steps, gpt_tiny", "gpt_tiny_moe", "held out, gpt_tiny", "gpt_tiny_moe",
    ]  # fmt: skip
    return table(head, cells)


TABLES = {
    "sparse beside dense": sparse_beside_dense,
    "first steps of gpt_tiny_moe": first_steps,
    "padded of gather": padded_of_gather,
    "exchange across nodes": across_nodes,
}
