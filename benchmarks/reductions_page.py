"""Writes the figures of docs/gradients.md from the results of reductions.py and reduced_loss.py, so
that none is written by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gradients.md"
RESULTS = ROOT / "benchmarks" / "results"
MARKS = {
    name: (f"<!-- figures of {name}.py -->\n", f"<!-- end of {name}.py -->\n")
    for name in ("reductions", "reduced_loss")
}


def newest(name: str) -> Path:
    """Returns the newest results of a benchmark."""
    return max(
        RESULTS.glob(f"{name}_2*.json"), key=lambda path: re.findall(r"\d{4}-\d\d-\d\d", path.name)
    )


def write() -> None:
    """Replaces what is between the marks of the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, (begin, end) in MARKS.items():
        head, _, tail = text.partition(begin)
        text = f"{head}{begin}{figures(name)}{end}{tail.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


def figures(name: str) -> str:
    """Returns the tables between two marks, from the newest results."""
    source = newest(name)
    data = json.loads(source.read_text(encoding="utf-8"))
    made = (
        f"`python benchmarks/{name}.py` makes these figures "
        f"([raw\nresults](../benchmarks/results/{source.name}))."
    )
    return "\n\n".join([made, *(_bytes if name == "reductions" else _losses)(data["tables"]), ""])


def _bytes(tables: Mapping[str, Any]) -> list[str]:
    """A table for each mesh, with the bytes inside nodes only where a row has any."""
    parts = []
    for title, table in tables.items():
        if "step" in title:
            continue
        rows = table["rows"]
        axes = [
            key
            for key in ("across_nodes", "inside_nodes")
            if any(f"{row[f'{key}_gib']:.2f}" != "0.00" for row in rows)
        ]
        head = ["sum", "`--rules=`", *(key.replace("_", " ") for key in axes), "waits, s", "peak"]
        lines = [
            [row["form"], f"`{row['rules']}`", *(f"{row[f'{key}_gib']:.2f}" for key in axes),
             f"{row['waits_s']:.2f} to {row['sustained_waits_s']:.2f}",
             f"{row['peak_gib']:.1f}{'' if row['fits'] else ', too large'}"]
            for row in rows
        ]  # fmt: skip
        parts += [
            f"**{title}**, {table['note'].partition('. ')[0].rstrip('.')}:",
            _table(head, lines),
        ]
    return parts


def _losses(tables: Mapping[str, Any]) -> list[str]:
    lines = []
    for row in tables["Relative to float32"]["rows"]:
        if row["loss"] == "heldout_loss":
            mean = f"{row['mean_pct']:+.2f}".replace("-0.00", "+0.00")
            spread = "" if row["deviation_pct"] is None else f"{row['deviation_pct']:.2f}"
            lines.append([f"{row['learning_rate']:g}", row["sums"], mean, spread])
    return [_table(["learning rate", "sums", "mean, %", "deviation, %"], lines)]


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))
