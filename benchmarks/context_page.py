"""Writes the figures of docs/context.md from the results of context_lengths.py, so that none is
written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, CHART = ROOT / "docs" / "context.md", ROOT / "docs" / "images" / "context.png"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures of context_lengths.py -->\n", "<!-- end of figures -->\n"
FORMS = ("context_gather", "ulysses", "ring", "usp")
CAPTIONS = {
    "As few ways as hold it": "As few ways as possible (a sequence of up to 16,384 tokens is not sharded):",
    "8 ways, in a node": "8 ways, in a node:",
    "64 ways, over 8 nodes": "64 ways, over 8 nodes (Ulysses is not possible, because 64 ways do not divide 32 heads):",
}
"""Title of a table of the results -> what the page says above it."""


def newest() -> Path:
    """Returns the newest results of context_lengths.py."""
    return max(
        RESULTS.glob("context_lengths_*.json"),
        key=lambda path: re.findall(r"\d{4}-\d\d-\d\d", path.name),
    )


def write(data: Mapping[str, Any], source: str) -> None:
    """Replaces what is between the two marks of the page."""
    head, _, tail = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(
        f"{head}{BEGIN}{figures(data, source)}{END}{tail.partition(END)[2]}", encoding="utf-8"
    )


def figures(data: Mapping[str, Any], source: str) -> str:
    """Returns the tables between the marks. source: the results' file name."""
    parts = [
        "`python benchmarks/context_lengths.py` makes this figure ([raw\n"
        f"results](../benchmarks/results/{source})).\n"
        "A step of Llama 3 8B on 64 H100s has 1,048,576 tokens, 16,384 on each GPU. The tables "
        "have the predicted step in\n"
        "seconds, from the fast to the slow end of its [band](lab.md#rates-and-bands), then the GiB "
        "that a GPU sends in\nattention."
    ]
    for title, table in data["tables"].items():
        if title != "Crossovers":
            parts += [CAPTIONS[title], _table(table["rows"])]
    return "\n\n".join([*parts, ""])


def short(tokens: int) -> str:
    """8k, 1M."""
    return f"{tokens / 1024:.3g}k" if tokens < 2**20 else f"{tokens / 2**20:.3g}M"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each length; with the ways, if they differ."""
    forms = [form for form in FORMS if any(row["form"] == form for row in rows)]
    rows = [row for row in rows if row["ways"] > 1]
    several = len({row["ways"] for row in rows}) > 1
    head = ["tokens", *["ways"] * several, *(f"`{form}`" for form in forms)]
    lines = [head, ["---:"] * len(head)]
    for length in dict.fromkeys(row["tokens"] for row in rows):
        row_by_form = {row["form"]: row for row in rows if row["tokens"] == length}
        best = min(row["step_s"] for row in row_by_form.values())
        ways = [str(row["ways"]) for row in row_by_form.values()][: int(several)]
        lines.append(
            [short(length), *ways, *(_cell(row_by_form.get(form), best) for form in forms)]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: Mapping[str, Any] | None, best: float) -> str:
    """The band of the step, in bold if its fast end is the best one, and the bytes; empty where the
    form is not possible."""
    if row is None:
        return ""
    band = f"{row['step_s']:.2f} to {row['sustained_step_s']:.2f}"
    step = f"**{band}**" if row["step_s"] == best else band
    return f"{step}, {row['sent_gib']:.1f}{'' if row['fits'] else ', too large'}"
