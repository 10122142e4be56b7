"""docs/kernels.md: its code runs, its numbers are those of the last result of benchmarks/hot_spots.py."""

import importlib
import json
import re
import sys
from pathlib import Path

import jax
import pytest
from gpt_175b import MATRICES, TOKENS

import pallas_kernels
from pallas_kernels.grouped_matmul import IMPLEMENTATIONS
from pallas_kernels.stacked.plan import plan_for, plan_to_add
from pallas_kernels.stacked_matmul import GOAL

COMPILE_BUDGET = 32
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/kernels.md").read_text()
LINES = re.findall(r"^\| (.+) \|$", TEXT, re.M)
RESULTS = max((ROOT / "benchmarks/results").glob("hot_spots_*.json"))
TABLES = {title: table["rows"] for title, table in json.loads(RESULTS.read_text())["tables"].items()}
COLUMNS = {
    "Share of a layer": ("model", "part", "ratio", "share_percent"),
    "Loss": ("model", "ratio", "share_percent", "wait_percent"),
    "Temp memory of grouped matmul": ("groups", "mosaic_mib", "xla_mib", "jax.lax.ragged_dot_mib"),
}


def test_its_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    # One program for the call, not one for each operation in it.
    monkeypatch.setattr(pallas_kernels, "grouped_matmul", jax.jit(pallas_kernels.grouped_matmul))
    exec("\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.S)), {})


@pytest.mark.parametrize("title", COLUMNS)
def test_its_numbers(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    cell = importlib.import_module("record")._cell
    rows = [row for row in TABLES[title] if row.get("part") != "norm"]
    assert rows
    for row in rows:
        assert " | ".join(cell(row[column]) for column in COLUMNS[title]) in LINES


def test_its_verdict() -> None:
    """What the page says of kernels is what the threshold says."""
    needed = {(row["model"], row["part"]) for row in TABLES["Share of a layer"] if row["kernel"] and row["part"] != "norm"}
    assert needed == {("gpt_1_3b", "residual and norm")} and not any(row["kernel"] for row in TABLES["Loss"])
    assert all(f"`{name}`" in TEXT for name in IMPLEMENTATIONS) and json.loads(RESULTS.read_text())["versions"]["jax"] in TEXT


def test_the_bytes_of_an_addition() -> None:
    """The closed forms that test_stacked_matmul_compiled finds in the compiled programs."""
    for name, (K, N) in MATRICES.items():
        factors = 2 * TOKENS * (K + N)
        mib = [size / 2**20 for size in (factors + 12 * K * N, factors + 8 * K * N)]
        assert f"{name} | {K:,} | {N:,} | {mib[0]:,g} | {mib[1]:,g}" in LINES


def test_the_estimates_of_the_stacked_matmul() -> None:
    found = [
        about.tensor
        for K, N in MATRICES.values()
        for _, about in (plan_for(TOKENS, N, K), plan_for(TOKENS, K, N), plan_to_add(K, N, TOKENS))
    ]
    assert f"in at most {min(found):.2f} to {max(found):.2f} of the time" in TEXT and f"reaches {GOAL:g} of cuBLAS" in TEXT
