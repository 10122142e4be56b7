"""The tables of docs/planner.md, from the results of benchmarks/best_layouts.py, random_layouts.py
and fit_formulas.py: tests/docs/made.py writes them into the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.docs.markdown import table

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def tables_of(benchmark: str) -> dict[str, list[dict[str, Any]]]:
    """Returns the rows of the newest results by the titles of their tables."""
    newest = max(RESULTS.glob(f"{benchmark}_2*.json"))
    tables = json.loads(newest.read_text(encoding="utf-8"))["tables"]
    return {title: table["rows"] for title, table in tables.items()}


def found_layouts() -> str:
    """Returns a row for each config: its own step, the best found, and its layout."""
    rows = []
    for row in tables_of("best_layouts")["The best layout found, and the config's own"]:
        rows.append([
            f"`{row['config']}`", f"{row['devices']:,}",
            _band(row["own_step_s"], row["own_slow_s"]),
            _band(row["best_step_s"], row["best_slow_s"]),
            f"{row['ratio'] - 1:+.1%}", f"{row['compiles']}",
            _layout(row["best"]) or "its own",
        ])  # fmt: skip
    head = ["config", "GPUs", "its own step, s", "best found, s", "change", "compiled", "layout"]
    return table(head, rows)


def random_models() -> str:
    """Returns a row for each random model: the layout chosen, and the best of those drawn."""
    rows = []
    for row in tables_of("random_layouts")["The layout chosen, and the best of those drawn"]:
        rows.append([
            row["config"].partition("/")[2], f"{row['parameters'] / 1e9:.1f}",
            str(row["devices"]), str(row["compiles"]), str(row["drawn"]),
            f"{row['ratio'] - 1:+.1%}", _layout(row["chosen"]),
        ])  # fmt: skip
    head = ["seed", "parameters, 10^9", "GPUs", "compiled", "drawn", "change", "layout"]
    return table(head, rows)


def formula_errors() -> str:
    """Returns the errors of formulas, priced before anything was compiled; those of the shipped
    configs alone; and those of formulas that were fitted again without the model.
    """
    tables = tables_of("fit_formulas")
    rows = []
    for row in tables["Errors"]:
        rows.append([
            row["programs"], str(row["number"]), f"{row['step_mean']:.0%}",
            f"{row['step_max']:.0%}", f"{row['peak_mean']:.0%}", f"{row['peak_max']:.0%}",
        ])  # fmt: skip
    models = tables["Errors by model"]
    shipped = [row for row in models if "/" not in row["config"]]
    rows.append([
        "those of the shipped configs", str(sum(row["programs"] for row in shipped)),
        _mean(shipped, "predicted_mean", "fit"), f"{_most(shipped, 'predicted_max'):.0%}",
        _mean(shipped, "peak_mean", "programs"), f"{_most(shipped, 'peak_max'):.0%}",
    ])  # fmt: skip
    rows.append([
        "of each model, by formulas fitted without it",
        str(sum(row["programs"] for row in models)),
        _mean(models, "left_out_mean", "fit"), f"{_most(models, 'left_out_max'):.0%}",
        _mean(models, "peak_left_out_mean", "programs"), "",
    ])  # fmt: skip
    head = ["programs", "number", "step, mean", "step, most", "peak, mean", "peak, most"]
    return table(head, rows)


def _mean(models: list[dict[str, Any]], column: str, weight: str) -> str:
    """Returns the mean of a column over all programs, of which each model has `weight`."""
    total = sum(model[weight] for model in models)
    return f"{sum(model[column] * model[weight] for model in models) / total:.0%}"


def _most(models: list[dict[str, Any]], column: str) -> float:
    return max(model[column] for model in models)


def _layout(options: str) -> str:
    """Returns the fields of a command line without their sections."""
    words = [word.removeprefix("--") for word in options.split()]
    return " ".join(word if word.startswith("rules=") else word.partition(".")[2] for word in words)


def _band(fast: float, slow: float) -> str:
    return f"{fast:.3f} to {slow:.3f}"


TABLES = {
    "found layouts": found_layouts,
    "random models": random_models,
    "formula errors": formula_errors,
}
