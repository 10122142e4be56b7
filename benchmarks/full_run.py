"""Runs every check of this repository that needs no GPU, and records the results. CI leaves out exhaustive tests and most faults.

Needs all extras: pip install -e '.[dev,aot,eval,wandb,oracle]'. The record is written after each part, so that an interrupted run shows
what it has done; --only runs the missing parts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

from record import ROOT, Record, Row, options

PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-rs"]
PARTS = {
    "ruff": [PYTHON, "-m", "ruff", "check", "."],
    "format": [PYTHON, "-m", "ruff", "format", "--check", "."],
    "pyright": [PYTHON, "-m", "pyright", "--pythonpath", PYTHON],
    "configs": [PYTHON, "benchmarks/plan_table.py", "--check"],
    "fast": [*PYTEST, "-n", "auto", "-m", "not slow and not gpu and not fault"],
    "slow": [*PYTEST, "-n", "auto", "-m", "slow and not exhaustive and not gpu and not fault"],
    "exhaustive": [*PYTEST, "-n", "auto", "-m", "exhaustive and not gpu and not fault"],
    "faults": [*PYTEST, "-m", "fault", "tests/fault"],
}
"""The parts in the order in which they run. Faults run alone, because their time limits are in seconds."""
SECONDS = ROOT / "tests" / "seconds.json"
"""Seconds of each file's tests, by part, by which tests/conftest.py orders them."""
OUTCOMES = ("passed", "failed", "skipped")


def main() -> int:
    parser = options(__doc__ or "", quick_help="the parts that take seconds")
    parser.add_argument("--only", default="", help=f"parts, with commas between: {', '.join(PARTS)}")
    arguments = parser.parse_args()
    wanted = ["ruff", "format"] if arguments.quick else [name for name in arguments.only.split(",") if name] or [*PARTS]
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    record = Record(f"full_run{'-quick' * arguments.quick}", arguments.output, commit=commit())
    rows: dict[str, Row] = {name: {"part": name, "status": "not run"} for name in PARTS}
    with tempfile.TemporaryDirectory() as cache:
        for name in (name for name in PARTS if name in wanted):
            rows[name] = ran(name, Path(cache))
            record.table("Parts", list(rows.values()), "pytest -rs lists skipped tests with their reasons.")
            record.write()
    return 0 if all(rows[name]["status"] == 0 for name in wanted) else 1


def commit() -> str:
    """Returns the commit of the checkout, "with changes" if files differ from it; empty outside of a repository."""
    found = [
        subprocess.run(["git", *words.split()], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        for words in ("rev-parse --short=12 HEAD", "status --porcelain --untracked-files=no")
    ]
    return found[0] + " with changes" * bool(found[0] and found[1])


def ran(name: str, cache: Path) -> Row:
    """Runs a part, and returns its row. cache: a directory with the compilation cache that all parts share."""
    command, report = list(PARTS[name]), cache / f"{name}.xml"
    if command[:3] == PYTEST[:3]:
        command.append(f"--junitxml={report}")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "MESH_LM_TEST_CACHE": str(cache), "MESH_LM_DEVICELESS": "required"}
    begin = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    row: Row = {"part": name, "status": status, "seconds": round(time.monotonic() - begin)}
    if not report.exists():
        return row
    if name in ("fast", "slow", "exhaustive") and not status:
        remember(name, report)
    return row | counted(report)


def counted(report: Path) -> Row:
    """Returns how many tests passed, failed (errors included) and were skipped."""
    found = dict.fromkeys(OUTCOMES, 0)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        tags = {child.tag for child in case}
        found["failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"] += 1
    return found


def remember(name: str, report: Path) -> None:
    """Writes the seconds of a part's files into SECONDS, and keeps those of other parts."""
    known: dict[str, dict[str, float]] = json.loads(SECONDS.read_text())
    found: Counter[str] = Counter()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        found[case.get("file", "")] += float(case.get("time", 0))
    kept = {file: {part: s for part, s in parts.items() if part != name} for file, parts in known.items()}
    for file, seconds in found.items():
        kept.setdefault(file, {})[name] = round(seconds, 1)
    lines = (f"{json.dumps(file)}: {json.dumps(parts)}" for file, parts in sorted(kept.items()) if parts and (ROOT / file).is_file())
    SECONDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
