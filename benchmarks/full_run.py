"""Runs every check of this repository that needs no GPU, and records the results: the tier "full"
of the tests, with those of CI.

Needs all extras: pip install -e '.[dev,aot,eval,wandb,oracle]'. It takes hours. The record is
written after each part, so that an interrupted run shows what it has done: `--resume` runs the
parts that the newest record lacks, `--only` some parts.
"""

from __future__ import annotations

import glob
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from record import ROOT, Record, Row, options

sys.path.insert(0, str(ROOT / "tests"))
import tiers

PYTHON = sys.executable
PYTEST = [PYTHON, "-m", "pytest", "-rs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = [
    text.rpartition(" ")[2]
    for text in PROJECT["classifiers"]
    if re.search(r"Python :: 3\.\d+$", text)
]
"""The versions that pyproject.toml promises."""
FOLDERS = ("tests/pallas_kernels", "tests/sharding_rules", "tests/mesh_lm")
"""Their tests of the tier "full" are parts of their own, because a part that is interrupted starts
again."""
ENVIRONMENTS = {
    "python 3.11": ("3.11", []),
    "python 3.12": ("3.12", ["jax==0.12.0.1"]),
    "python 3.12 jax 0.11.2": ("3.12", ["-c", "constraints/python3.12-jax0.11.txt"]),
    "python 3.13": ("3.13", ["jax==0.12.0.1"]),
}
"""Part -> the Python of its environment, and what pip installs besides the project: the newest jax
for each Python, and that of the GPU machines. Python 3.11 gets the last jax that supports it, which
pip finds by itself."""
PARTS = {
    "ruff": [PYTHON, "-m", "ruff", "check", "."],
    "format": [PYTHON, "-m", "ruff", "format", "--check", "."],
    "pyright": [PYTHON, "-m", "pyright", "--pythonpath", PYTHON],
    "configs": [PYTHON, "benchmarks/plan_table.py", "--check"],
    "fast": [*PYTEST, "-n", "auto", "-m", tiers.FAST],
    "ci": [*PYTEST, "-n", "auto", "-m", tiers.CI],
    **{f"full {folder}": [*PYTEST, "-n", "auto", "-m", tiers.FULL, folder] for folder in FOLDERS},
    "full, the rest": [
        *PYTEST,
        "-n",
        "auto",
        "-m",
        tiers.FULL,
        *(f"--ignore={folder}" for folder in FOLDERS),
    ],
    "mutations": [PYTHON, "tests/mutations/run.py", "--jobs=2"],
    "faults": [PYTHON, "benchmarks/faults.py"],
    **{name: [PYTHON, __file__, f"--environment={name}"] for name in ENVIRONMENTS},
}
"""The parts in the order in which they run. Faults run alone and three times, because their time
limits are in seconds."""
OUTCOMES = ("passed", "failed", "skipped")


def main() -> int:
    parser = options(__doc__ or "", quick_help="the parts that take seconds")
    parser.add_argument(
        "--only", default="", help=f"parts, with commas between: {', '.join(PARTS)}"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep what passed in the newest record, and run the other parts",
    )
    parser.add_argument(
        "--junit",
        type=Path,
        default=None,
        metavar="DIR",
        help="keep pytest's reports there, for suite_costs.py --junit",
    )
    parser.add_argument(
        "--environment",
        default="",
        choices=[*ENVIRONMENTS],
        help="run the fast tests alone, in a new environment",
    )
    arguments = parser.parse_args()
    if arguments.environment:
        return fast_tests_of(*ENVIRONMENTS[arguments.environment])
    chosen = (
        ["ruff", "format"]
        if arguments.quick
        else [name for name in arguments.only.split(",") if name] or [*PARTS]
    )
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")

    rows: dict[str, Row] = {name: {"part": name, "status": "not run"} for name in PARTS}
    if arguments.resume:
        done = passed_before(arguments.output)
        rows |= done
        chosen = [name for name in chosen if name not in done]
    record = Record(f"full_run{'-quick' * arguments.quick}", arguments.output, commit=commit())
    with tempfile.TemporaryDirectory() as cache:
        reports = arguments.junit or Path(cache)
        reports.mkdir(parents=True, exist_ok=True)
        for name in (name for name in PARTS if name in chosen):
            rows[name] = ran(name, Path(cache), reports.absolute())
            record.table(
                "Parts", list(rows.values()), "pytest -rs lists skipped tests with their reasons."
            )
            record.write()
    return 0 if all(rows[name]["status"] == 0 for name in chosen) else 1


def commit() -> str:
    """Returns the commit of the checkout, "with changes" if files differ from it; empty outside of
    a repository."""
    head, changes = (
        subprocess.run(
            ["git", *words.split()], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        for words in ("rev-parse --short=12 HEAD", "status --porcelain --untracked-files=no")
    )
    return head + " with changes" * bool(head and changes)


def passed_before(directory: Path) -> dict[str, Row]:
    """Returns the rows of parts that passed, of the newest record in the directory."""
    records = sorted(directory.glob("full_run_*.json"), key=lambda path: path.stat().st_mtime)
    if not records:
        return {}
    rows = json.loads(records[-1].read_text(encoding="utf-8"))["tables"]["Parts"]["rows"]
    return {row["part"]: row for row in rows if row["part"] in PARTS and row["status"] == 0}


def ran(name: str, cache: Path, reports: Path) -> Row:
    """Runs a part, and returns its row.

    cache: a directory with the compilation cache that all parts share. reports: one for pytest's
    reports, absolute.
    """
    command = list(PARTS[name])
    report = reports / f"{name.replace('/', '-')}.xml"
    report.unlink(missing_ok=True)
    is_pytest = command[: len(PYTEST)] == PYTEST
    if is_pytest:
        command.append(f"--junitxml={report}")
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "MESH_LM_TEST_CACHE": str(cache),
        "MESH_LM_DEVICELESS": "required",
    }
    started = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env=environment).returncode
    row: Row = {
        "part": name,
        "status": status,
        "seconds": round(time.monotonic() - started),
        "commit": commit(),
    }
    return row | counted(report) if report.exists() else row


def counted(report: Path) -> Row:
    """Returns how many tests passed, failed (errors included) and were skipped."""
    counts = dict.fromkeys(OUTCOMES, 0)
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        tags = {child.tag for child in case}
        counts[
            "failed"
            if tags & {"failure", "error"}
            else "skipped"
            if "skipped" in tags
            else "passed"
        ] += 1
    return counts


def fast_tests_of(version: str, packages: list[str]) -> int:
    """Returns the status of the fast tests on this version of Python, in an environment that is
    made for them; 2 without that Python.

    packages: arguments of pip beside the project.
    """
    interpreter = find_python(version)
    if not interpreter:
        print(f"no Python {version} on this machine", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as directory:
        environment = Path(directory) / "venv"
        subprocess.run([interpreter, "-m", "venv", str(environment)], check=True)
        python = str(environment / "bin" / "python")
        # Not editable: an editable installation of another Python would write the same files into
        # the checkout. With XLA's compiler for CUDA, because golden ledgers are those of a version
        # of jax.
        subprocess.run(
            [python, "-m", "pip", "install", "-q", f"{ROOT}[test,aot]", *packages],
            cwd=ROOT,
            check=True,
        )
        return subprocess.run([python, "-m", "pytest", "-n", "auto"], cwd=ROOT).returncode


def find_python(version: str) -> str:
    """Returns the path of an interpreter of this version, on PATH or of pyenv; empty if there is
    none."""
    versions = f"{os.environ.get('PYENV_ROOT', Path.home() / '.pyenv')}/versions/{version}.*/bin/python{version}"
    for candidate in (f"python{version}", *sorted(glob.glob(versions))):
        check = (
            f"import sys; sys.exit(sys.version_info[:2] != {tuple(map(int, version.split('.')))})"
        )
        try:
            if subprocess.run([candidate, "-c", check], capture_output=True).returncode == 0:
                return candidate
        except OSError:
            continue
    return ""


if __name__ == "__main__":
    sys.exit(main())
