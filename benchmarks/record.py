"""The results of every benchmark: a JSON file with all its numbers and a Markdown file with its
tables.

Only this file writes results. Importing it also makes the packages of this repository importable,
installed or not.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT))

Row = dict[str, Any]
"""One line of a table: column -> number, text or None. A column's name ends in its unit."""

PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "grain", "tokenizers",
    "jax-cuda12-plugin", "jax-cuda13-plugin",
    "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
)  # fmt: skip


def options(
    description: str, *, quick: str = "--quick", quick_help: str = "a tiny version, for the tests"
) -> argparse.ArgumentParser:
    """The command line that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument(quick, action="store_true", help=quick_help)
    parser.add_argument(
        "--output",
        type=Path,
        default=RESULTS,
        help="directory for the .json and .md (default: benchmarks/results)",
    )
    return parser


def machine() -> Row:
    """Returns what the numbers depend on, without the host's name. The load average shows how busy
    it was."""
    names = re.findall(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20, 1) if memory else None,
        "load_at_start": round(os.getloadavg()[0], 2),
        "system": platform.system(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages."""
    versions_found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions_found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions_found


class Record:
    """Collects tables. `write` may be called after each of them, so that results survive a later
    failure."""

    def __init__(self, name: str, directory: Path, *, kind: str = "", **facts: Any) -> None:
        """kind: the kind of host, for the file name (default: its processor and cores). facts:
        further values to record."""
        words = re.sub(r"--output[= ]\S+", "", " ".join(sys.argv[1:])).split()
        machine_facts = machine()
        self.directory, self.data = (
            directory,
            {
                "name": name,
                "date": datetime.date.today().isoformat(),
                "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words]),
                "machine": machine_facts,
                "versions": versions(),
                "xla_flags": os.environ.get("XLA_FLAGS", ""),
                **facts,
                "tables": {},
            },
        )
        machine_kind = kind or "{cpu} {cores} cores".format(**machine_facts)
        self.stem = f"{name}_{self.data['date']}_{slug(machine_kind)}"

    def table(self, title: str, rows: Sequence[Row], note: str = "", *, show: bool = True) -> None:
        """Adds or replaces a table, and prints it unless show is False."""
        self.data["tables"][title] = {"note": note, "rows": list(rows)}
        if show:
            print(f"\n{markdown(title, rows, note)}", flush=True)

    def earlier(self) -> dict[str, list[Row]]:
        """Returns the rows of today's results of this name, by the table's title, as an interrupted
        run has left them.
        """
        path = self.directory / f"{self.stem}.json"
        if not path.is_file():
            return {}
        tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
        return {title: table["rows"] for title, table in tables.items()}

    def write(self) -> Path:
        """Writes <stem>.json and <stem>.md; returns the path of the first."""
        self.directory.mkdir(parents=True, exist_ok=True)
        head = {key: self.data[key] for key in self.data if key not in ("name", "tables", "charts")}
        lines = [
            f"# {self.data['name']}",
            "",
            *(f"- {key}: {_plain(value)}" for key, value in head.items() if value),
        ]
        lines += [
            line for chart in self.data.get("charts", ()) for line in ("", f"![{chart}]({chart})")
        ]
        lines += [
            "",
            *(
                "\n" + markdown(title, table["rows"], table["note"])
                for title, table in self.data["tables"].items()
            ),
        ]
        for suffix, text in (
            (".json", json.dumps(self.data, indent=1)),
            (".md", "\n".join(lines) + "\n"),
        ):
            part = self.directory / f".{self.stem}{suffix}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(self.directory / f"{self.stem}{suffix}")
        return self.directory / f"{self.stem}.json"


def markdown(title: str, rows: Sequence[Row], note: str = "") -> str:
    """Returns a Markdown table that is readable as text, too; columns are in the order in which
    they first occur."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    cells = [columns, *([_cell(row.get(column)) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in cells
    ]
    rule = " | ".join("-" * max(3, width) for width in widths)
    table = (
        [f"| {line} |" for line in (lines[0], rule, *lines[1:])]
        if columns
        else ["(nothing measured)"]
    )
    return "\n".join([f"## {title}", "", *([note, ""] if note else []), *table])


def milliseconds(f: Callable[[], Any], repeats: int, warm_up: int = 1) -> float:
    """Returns the median wall time of f(), which must wait for its own results."""
    times = []
    for i in range(warm_up + repeats):
        start_time = time.perf_counter()
        f()
        if i >= warm_up:
            times.append(time.perf_counter() - start_time)
    return 1e3 * statistics.median(times)


def slug(text: str) -> str:
    """Returns the text as part of a file name: lower case, digits, dots and dashes."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _cell(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return (
        f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/").replace("\n", " ")
    )


def _plain(value: Any) -> str:
    return (
        ", ".join(f"{key} {item}" for key, item in value.items())
        if isinstance(value, dict)
        else str(value)
    )


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
