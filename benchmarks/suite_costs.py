"""Measures what the tests cost: runs those of CI, and writes tests/seconds.json and a table of the
dearest tests.

A row has the seconds of a test or of a file's tests, its processor seconds (its processes
included), traces, XLA compilations and the seconds of both, and the processes that it started.
tests/costs.py counts them. JUnit files of earlier runs can be read instead of running the tests:
python benchmarks/suite_costs.py --junit fast=fast.xml ci=ci.xml
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from record import ROOT, Record, Row, options

sys.path.insert(0, str(ROOT / "tests"))
import tiers

SECONDS = ROOT / "tests" / "seconds.json"
"""Costs of each file's tests, by tier. tests/conftest.py orders the files by their seconds."""
_CONFIG = re.compile(r"(\w+Config)\((?:[^()]|\([^()]*\))*\)")
"""A config among a test's parameters, with all of its fields."""
COUNTS = ("cpu_s", "traces", "trace_s", "compiles", "compile_s", "processes")
DEAREST = 40


def main() -> int:
    parser = options(__doc__ or "", quick_help="the fast tests alone")
    parser.add_argument(
        "--junit",
        nargs="+",
        default=[],
        metavar="TIER=FILE",
        help=f"reports of earlier runs: {', '.join(tiers.TIERS)}",
    )
    arguments = parser.parse_args()
    reports = dict(text.partition("=")[::2] for text in arguments.junit)
    unknown = reports.keys() - tiers.TIERS.keys()
    if unknown:
        parser.error(f"no tier {min(unknown)!r}; there are {', '.join(tiers.TIERS)}")
    missing = [path for path in reports.values() if not Path(path).is_file()]
    if missing:
        parser.error(f"no file {missing[0]}")

    record = Record("suite_costs", arguments.output)
    with tempfile.TemporaryDirectory() as directory:
        if not reports:
            reports = run(["fast"] if arguments.quick else ["fast", "ci"], Path(directory))
        rows = [row for tier, report in reports.items() for row in costs(Path(report), tier)]
    for tier in reports:
        remember(tier, [row for row in rows if row["tier"] == tier])
    record.table("Tiers", [{"tier": tier, **total(rows, tier)} for tier in reports])
    dearest = sorted(rows, key=lambda row: row["cpu_s"], reverse=True)[:DEAREST]
    record.table(
        f"The {DEAREST} dearest tests", dearest, "By processor seconds, fixtures included."
    )
    record.write()
    return 0


def run(names: Sequence[str], directory: Path) -> dict[str, str]:
    """Returns the JUnit file of each tier, after running its tests; they share one compilation
    cache."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MESH_LM_TEST_CACHE": str(directory)}
    reports = {}
    for name in names:
        reports[name] = str(directory / f"{name}.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-n",
            "auto",
            "-m",
            tiers.TIERS[name],
            f"--junitxml={reports[name]}",
        ]
        started = time.monotonic()
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        print(f"{name}: status {status} after {time.monotonic() - started:.0f} s", flush=True)
    return reports


def costs(report: Path, tier: str) -> list[Row]:
    """Returns a row for each test of a JUnit file."""
    rows: list[Row] = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        counted = {item.get("name"): float(item.get("value", 0)) for item in case.iter("property")}
        row: Row = {
            "file": case.get("file", ""),
            "test": _CONFIG.sub(r"\1(…)", case.get("name", "")),
            "tier": tier,
        }
        row["seconds"] = float(case.get("time", 0))
        rows.append(row | {count: _number(counted.get(count, 0.0)) for count in COUNTS})
    return rows


def total(rows: Sequence[Row], tier: str) -> Row:
    """Returns the sums over a tier's tests."""
    chosen = [row for row in rows if row["tier"] == tier]
    sums = {count: _number(sum(row[count] for row in chosen)) for count in ("seconds", *COUNTS)}
    return {"files": len({row["file"] for row in chosen}), "tests": len(chosen), **sums}


def remember(tier: str, rows: Sequence[Row]) -> None:
    """Writes a tier's costs by file into SECONDS. Those of other tiers stay; files that no longer
    exist are dropped."""
    old_costs: dict[str, dict[str, Row]] = (
        json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}
    )
    costs = {
        file: {name: row for name, row in row_by_tier.items() if name != tier}
        for file, row_by_tier in old_costs.items()
    }
    sums: dict[str, Counter[str]] = {}
    for row in rows:
        sums.setdefault(row["file"], Counter()).update(
            {count: row[count] for count in ("seconds", *COUNTS)}
        )
    for file, counts in sums.items():
        costs.setdefault(file, {})[tier] = {
            count: _number(value) for count, value in counts.items()
        }
    present = {
        file: row_by_tier
        for file, row_by_tier in sorted(costs.items())
        if row_by_tier and (ROOT / file).is_file()
    }
    lines = (
        f"{json.dumps(file)}: {json.dumps(row_by_tier)}" for file, row_by_tier in present.items()
    )
    SECONDS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 1)


if __name__ == "__main__":
    sys.exit(main())
