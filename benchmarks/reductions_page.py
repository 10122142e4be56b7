"""Writes the figures of docs/gradients.md from the results of reductions.py and reduced_loss.py, so that none is written by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gradients.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKS = {name: (f"<!-- figures of {name}.py -->\n", f"<!-- end of {name}.py -->\n") for name in ("reductions", "reduced_loss")}


def newest(name: str) -> Path:
    """Returns the newest results of a benchmark."""
    return max(RESULTS.glob(f"{name}_2*.json"), key=lambda path: re.findall(r"\d{4}-\d\d-\d\d", path.name))


def write() -> None:
    """Replaces what is between the marks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, (begin, end) in MARKS.items():
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{figures(name)}{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


def figures(name: str) -> str:
    """Returns the tables between two marks, from the newest results."""
    source = newest(name)
    data = json.loads(source.read_text(encoding="utf-8"))
    made = f"The figures are made by `python benchmarks/{name}.py` from [these raw\nresults](../benchmarks/results/{source.name}).\n"
    return "\n\n".join([made.rstrip(), *(_bytes if name == "reductions" else _losses)(data["tables"]), ""])


def _bytes(tables: Mapping[str, Any]) -> list[str]:
    head = ["sum", "`--rules=`", "across nodes", "inside nodes", "exposed", "waits, s", "peak"]
    parts = []
    for title, table in tables.items():
        if "step" in title:
            continue
        lines = [
            [row["form"], f"`{row['rules']}`", *(f"{row[f'{key}_gib']:.2f}" for key in ("across_nodes", "inside_nodes", "exposed")),
             f"{row['waits_s']:.2f}", f"{row['peak_gib']:.1f}{'' if row['fits'] else ', too large'}"]
            for row in table["rows"]
        ]  # fmt: skip
        lines += [
            [row["form"], "`diloco+megatron_sp`", f"{row['sent_gib']:.2f}", "0.00", f"{row['sent_gib']:.2f}", "", ""]
            for row in tables["An outer step every H steps"]["rows"]
            if title.startswith("One")
        ]
        parts += [f"**{title}**, {table['note'].partition('. ')[0].rstrip('.')}:", _table(head, lines)]
    return parts


def _losses(tables: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in tables["Relative to float32"]["rows"]:
        if row["loss"] == "heldout_loss":
            seeds = ", ".join(f"{value:+.2f}" for key, value in row.items() if key.startswith("seed_") and value is not None)
            spread = "" if row["deviation_pct"] is None else f"{row['deviation_pct']:.2f}"
            lines.append([f"{row['learning_rate']:g}", row["sums"], seeds, f"{row['mean_pct']:+.2f}", spread])
    return [_table(["learning rate", "sums", "each seed, %", "mean, %", "standard deviation, %"], lines)]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))
