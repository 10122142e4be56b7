"""The table of docs/planner.md, from the results of benchmarks/best_layouts.py: tests/docs/made.py
writes it into the page."""

from __future__ import annotations

import json
from pathlib import Path

from tests.docs.markdown import table

ROOT = Path(__file__).resolve().parents[2]
RESULTS = max((ROOT / "benchmarks" / "results").glob("best_layouts_2*.json"))


def found_layouts() -> str:
    """Returns a row for each config: its own step, the best found, and its layout."""
    tables = json.loads(RESULTS.read_text(encoding="utf-8"))["tables"]
    rows = []
    for row in tables["The best layout found, and the config's own"]["rows"]:
        options = [word.removeprefix("--") for word in row["best"].split()]
        words = [word if word.startswith("rules=") else word.partition(".")[2] for word in options]
        rows.append([
            f"`{row['config']}`", f"{row['devices']:,}",
            _band(row["own_step_s"], row["own_slow_s"]),
            _band(row["best_step_s"], row["best_slow_s"]),
            f"{row['ratio'] - 1:+.1%}", f"{row['compiles']}",
            " ".join(words) or "its own",
        ])  # fmt: skip
    head = ["config", "GPUs", "its own step, s", "best found, s", "change", "compiled", "layout"]
    return table(head, rows)


def _band(fast: float, slow: float) -> str:
    return f"{fast:.3f} to {slow:.3f}"


TABLES = {"found layouts": found_layouts}
