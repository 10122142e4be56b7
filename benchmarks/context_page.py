"""Writes the figures of docs/context.md from the results of context_lengths.py, so that none is written by hand."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, CHART = ROOT / "docs" / "context.md", ROOT / "docs" / "images" / "context.png"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- figures of context_lengths.py -->\n", "<!-- end of figures -->\n"
FORMS = ("context_gather", "ulysses", "ring", "usp")


def newest() -> Path:
    """Returns the newest results of context_lengths.py."""
    return max(RESULTS.glob("context_lengths_*.json"), key=lambda path: re.findall(r"\d{4}-\d\d-\d\d", path.name))


def write(data: Mapping[str, Any], source: str) -> None:
    """Replaces what is between the two marks of the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{figures(data, source)}{END}{rest.partition(END)[2]}", encoding="utf-8")


def figures(data: Mapping[str, Any], source: str) -> str:
    """Returns the tables and the sentences between the marks. source: the results' file name."""
    tables = {title: table["rows"] for title, table in data["tables"].items()}
    crossovers = tables.pop("Crossovers")
    parts = [
        "The figure is made by `python benchmarks/context_lengths.py` from [these raw\n"
        f"results](../benchmarks/results/{source}).\n"
        "The predicted step, never measured, in seconds, and the GiB that a GPU sends in attention:"
    ]
    for title, rows in tables.items():
        parts += [f"**{title}.** {data['tables'][title]['note']}", _table(rows)]
    return "\n\n".join([*(textwrap.fill(part, 118) if part[0] == "*" else part for part in parts), _crossings(crossovers), ""])


def short(tokens: int) -> str:
    """8k, 1M."""
    return f"{tokens / 1024:.3g}k" if tokens < 2**20 else f"{tokens / 2**20:.3g}M"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    forms = [form for form in FORMS if any(row["form"] == form for row in rows)]
    lines = [["tokens", "ways", *(f"`{form}`" for form in forms)], ["---:"] * (2 + len(forms))]
    for length in dict.fromkeys(row["tokens"] for row in rows):
        of_length = {row["form"]: row for row in rows if row["tokens"] == length}
        if "none" in of_length:
            continue
        best = min(row["step_s"] for row in of_length.values())
        ways = next(iter(of_length.values()))["ways"]
        lines.append([short(length), str(ways), *(_cell(of_length.get(form), best) for form in forms)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(row: Mapping[str, Any] | None, best: float) -> str:
    """The step in bold if it is the best one, and the bytes; empty where the form is not possible."""
    if row is None:
        return ""
    step = f"{row['step_s']:.2f}"
    return f"{f'**{step}**' if row['step_s'] == best else step} s, {row['sent_gib']:.1f} GiB{'' if row['fits'] else ', too large'}"


def _crossings(rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence for each table and quantity."""
    words = {"sent_gib": "sends least", "step_s": "is predicted to be fastest"}
    said = []
    for ways, of in dict.fromkeys((row["ways"], row["of"]) for row in rows):
        changes = [row for row in rows if (row["ways"], row["of"]) == (ways, of)]
        path = "".join(f", from {short(row['tokens'])} tokens `{row['to']}`" for row in changes)
        said.append(f"{ways}: `{changes[0]['from']}` {words[of]}{path}.")
    return textwrap.fill("Where the best form changes: " + " ".join(said), 118) if said else "The best form is the same at all lengths."
