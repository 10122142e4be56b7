"""The tables of docs/guide.md, from docs/studies/strategies.csv, which `mesh-lm study strategies
--output=docs/studies` writes, and from those of `mesh-lm study scaling`: tests/docs/made.py writes
them into the page."""

from __future__ import annotations

from pathlib import Path

from mesh_lm.config import TrainConfig
from mesh_lm.model import DecoderConfig
from mesh_lm.planning.best import fields_as_they_are, options
from mesh_lm.planning.studies.guide import advice
from mesh_lm.planning.studies.output import read_csv
from mesh_lm.planning.studies.scaling import ScalingRow, beside_published
from mesh_lm.planning.studies.strategies import StrategyRow, points_of, winner
from sharding_rules import MeshConfig
from sharding_rules.lab.rates import OPTIMISTIC, SUSTAINED
from sharding_rules.mesh import AXES
from tests.docs.markdown import table

STUDIES = Path(__file__).resolve().parents[2] / "docs" / "studies"


def rows() -> list[StrategyRow]:
    """Returns the rows of the committed study."""
    return read_csv((STUDIES / "strategies.csv").read_text(encoding="utf-8"), StrategyRow)


def strategy_map() -> str:
    """Returns a row for each number of GPUs: the strategy for each size of model."""
    points = points_of(rows())
    sizes = list(dict.fromkeys(size for size, _ in points))
    lines = []
    for gpus in sorted({gpus for _, gpus in points}):
        winners = [winner(points[size, gpus]) for size in sizes]
        lines.append([f"{gpus:,}", *(best.strategy if best else "-" for best in winners)])
    return table(["GPUs", *(size.upper() for size in sizes)], lines)


def strategy_advice() -> str:
    """Returns a row for each size of model and range of GPUs: the strategy, why, and how to compile
    it on the first number of GPUs."""
    lines = []
    for one in advice(rows()):
        gpus = f"{one.first_gpus:,}"
        if one.last_gpus > one.first_gpus:
            gpus += f" to {one.last_gpus:,}"
        mfu = f"{one.mfu[0]:.0%} to {one.mfu[1]:.0%}" if one.mfu else ""
        command = f"`mesh-lm plan CONFIG --devices={one.first_gpus} {_shorter(one.options)}`"
        lines.append([
            one.size.upper(), gpus, one.strategy or "-", one.reason, mfu,
            command if one.strategy else "",
        ])  # fmt: skip
    return table(["model", "GPUs", "strategy", "why", "MFU", "on the first number of GPUs"], lines)


def scaling(study: str) -> list[ScalingRow]:
    """Returns the rows of a committed study: strong or weak."""
    text = (STUDIES / study / f"{study}_scaling.csv").read_text(encoding="utf-8")
    return read_csv(text, ScalingRow)


def _scaling_table(study: str) -> str:
    """Returns a row for each point: its bands, what is published, and what would explain that."""
    rates = {"fast": OPTIMISTIC.matmul.value, "slow": SUSTAINED.matmul.value}
    lines = []
    for row in scaling(study):
        _, *outside = beside_published([row], rates)
        why = outside[0].partition("; ")[2] if outside else "inside the band"
        lines.append([
            f"`{row.config}`", f"{row.gpus:,}", f"{row.step_fast_s:.2f} to {row.step_slow_s:.2f}",
            f"{row.tflops_fast:.0f} to {row.tflops_slow:.0f}", f"{row.published_tflops:.0f}", why,
        ])  # fmt: skip
    head = [
        "model",
        "GPUs",
        "step, s",
        "TFLOP/s of each GPU",
        "published",
        "beside what is published",
    ]
    return table(head, lines)


def strong_scaling() -> str:
    """Returns the points of one model with one batch."""
    return _scaling_table("strong")


def weak_scaling() -> str:
    """Returns the points of models that grow with the GPUs."""
    return _scaling_table("weak")


def _shorter(words: str) -> str:
    """Returns the words of a command line without those that set a default of the layout."""
    config = TrainConfig(model=DecoderConfig(), output="", mesh=MeshConfig(data=1))
    default = {f"mesh.{axis}": 1 for axis in AXES} | {"mesh.extra": ()} | fields_as_they_are(config)
    known = set(options(default))
    return " ".join(word for word in words.split() if word not in known)


TABLES = {
    "strategy map": strategy_map,
    "strategy advice": strategy_advice,
    "strong scaling": strong_scaling,
    "weak scaling": weak_scaling,
}
