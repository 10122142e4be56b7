"""The tables of docs/guide.md, from docs/studies/strategies.csv, which `mesh-lm study strategies
--output=docs/studies` writes: tests/docs/made.py writes them into the page."""

from __future__ import annotations

from pathlib import Path

from mesh_lm.config import TrainConfig
from mesh_lm.model import DecoderConfig
from mesh_lm.planning.best import fields_as_they_are, options
from mesh_lm.planning.studies.guide import advice
from mesh_lm.planning.studies.output import read_csv
from mesh_lm.planning.studies.strategies import StrategyRow, points_of, winner
from sharding_rules import MeshConfig
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


def _shorter(words: str) -> str:
    """Returns the words of a command line without those that set a default of the layout."""
    config = TrainConfig(model=DecoderConfig(), output="", mesh=MeshConfig(data=1))
    default = {f"mesh.{axis}": 1 for axis in AXES} | {"mesh.extra": ()} | fields_as_they_are(config)
    known = set(options(default))
    return " ".join(word for word in words.split() if word not in known)


TABLES = {"strategy map": strategy_map, "strategy advice": strategy_advice}
