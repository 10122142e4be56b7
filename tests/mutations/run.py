"""Plants mistakes into copies of the code, one at a time, and says which of them the tests let live.

python tests/mutations/run.py [--list] [--jobs=N] [--write=KIND] [id ...]

The mistakes are data: the .toml files beside this one. For each, the files that git tracks are copied to a temporary directory, the text is
replaced there, and the tests that must fail run on the copy. The working tree is never touched. The same tests run on an unchanged copy
first: where they fail without the mistake, they prove nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PATIENCE = 600.0
"""Seconds that the tests of one mutation may take."""
KILLED, SURVIVED, MISPLACED = "killed", "SURVIVED", "does not apply"


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One planted mistake."""

    id: str
    file: str
    """Of the repository."""
    old: str
    """Is in the file exactly once."""
    new: str
    plants: str
    """The wrong behaviour, in one sentence."""
    tests: tuple[str, ...]
    """Ids of tests that must fail."""

    def place(self, root: Path) -> str:
        """Why it does not apply to the files below `root`, or nothing."""
        path = root / self.file
        times = path.read_text().count(self.old) if path.is_file() else 0
        return "" if times == 1 else f"its old text is {times} times in {self.file}" if path.is_file() else f"there is no {self.file}"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one mutation, or of tests without any."""

    status: str
    seconds: float = 0.0
    why: str = ""
    """The first test that failed and what it said, or what stood in the way."""


def load() -> list[Mutation]:
    """All, in the order of the files and of the entries in them."""
    entries = [entry for path in sorted(HERE.glob("*.toml")) for entry in tomllib.loads(path.read_text())["mutation"]]
    return [Mutation(**entry | {"tests": tuple(entry["tests"])}) for entry in entries]


def tracked() -> list[str]:
    """The files that git tracks and that are there, by their paths in the repository."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


class Copies:
    """Copies of the repository in a temporary directory, and what JAX compiled for their tests, which they share."""

    def __init__(self, where: Path) -> None:
        self._where, self._files = where, tracked()
        (where / "compiled").mkdir()

    def run(self, tests: Sequence[str], mutation: Mutation | None = None) -> Verdict:
        """The verdict of the tests on a new copy, which is removed after it: killed where one of them fails."""
        copy = Path(tempfile.mkdtemp(prefix="copy-", dir=self._where))
        try:
            for name in self._files:
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
            if mutation:
                if problem := mutation.place(copy):
                    return Verdict(MISPLACED, why=problem)
                path = copy / mutation.file
                path.write_text(path.read_text().replace(mutation.old, mutation.new))
            return self._tested(copy, tests)
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def _tested(self, copy: Path, tests: Sequence[str]) -> Verdict:
        (copy / ".tmp").mkdir()
        python_path = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
        changes = {"PYTHONPATH": os.pathsep.join(python_path), "TMPDIR": str(copy / ".tmp"), "MESH_LM_REPORTS": str(copy / ".reports")}
        changes["MESH_LM_TEST_CACHE"] = str(self._where / "compiled")
        # Any mark will do, so that a slow test can be named.
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "", "--junitxml=.junit.xml", *tests]
        before = time.monotonic()
        try:
            done = subprocess.run(command, cwd=copy, env=os.environ | changes, capture_output=True, text=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            return Verdict("timed out", time.monotonic() - before, f"no end after {PATIENCE:g} s")
        seconds = time.monotonic() - before
        if done.returncode not in (0, 1):  # of 0 and 1 pytest says: the tests ran
            return Verdict("broken", seconds, (done.stdout + done.stderr).strip()[-600:])
        cases = list(ElementTree.parse(copy / ".junit.xml").iter("testcase"))
        if done.returncode:
            return Verdict(KILLED, seconds, _failure(cases))
        skipped = sum(case.find("skipped") is not None for case in cases)
        return Verdict("skipped" if skipped else SURVIVED, seconds, f"{skipped} of {len(cases)} skipped" if skipped else "")


def _failure(cases: Iterable[ElementTree.Element]) -> str:
    for case in cases:
        for found in (*case.iter("failure"), *case.iter("error")):
            said = next(iter((found.get("message") or "").strip().splitlines()), "")
            said = re.sub(rf"\b{re.escape(platform.node())}\b", "HOST", said)  # it may be kept, and the host is nobody's business
            return f"{case.get('name')}: {said[:200]}"
    return ""


def judge(mutations: Sequence[Mutation], jobs: int) -> dict[str, Verdict]:
    """The verdict of each by its id, printed as it comes."""
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="mesh_lm-mutations-") as where, ThreadPoolExecutor(jobs) as pool:
        copies = Copies(Path(where))
        sets = dict.fromkeys(mutation.tests for mutation in mutations)
        unchanged = dict(zip(sets, pool.map(copies.run, sets), strict=True))
        for tests, verdict in unchanged.items():
            if verdict.status != SURVIVED:
                print(f"without any mutation: {' '.join(tests)}: {_outcome(verdict)}: {verdict.why}", flush=True)

        def one(mutation: Mutation) -> Verdict:
            alone = unchanged[mutation.tests]
            if alone.status != SURVIVED:
                return Verdict("proves nothing", alone.seconds, f"without it: {_outcome(alone)}: {alone.why}")
            return copies.run(mutation.tests, mutation)

        for mutation, verdict in zip(mutations, pool.map(one, mutations), strict=True):
            verdicts[mutation.id] = verdict
            more = f": {verdict.why}" if verdict.status not in (KILLED, SURVIVED) else ""
            print(f"{verdict.status:14} {verdict.seconds:6.1f} s  {mutation.id}{more}", flush=True)
            if verdict.status == SURVIVED:
                print(f"  {mutation.file}: {mutation.plants}\n  {' '.join(mutation.tests)}", flush=True)
    return verdicts


def _outcome(verdict: Verdict) -> str:
    return "a test fails" if verdict.status == KILLED else verdict.status


def summary(statuses: Sequence[str], seconds: float) -> str:
    """A line: how many mutations there were, of each verdict how many, and how long it took."""
    counts = {status: statuses.count(status) for status in dict.fromkeys([KILLED, SURVIVED, *statuses])}
    return f"{len(statuses)} mutations: {', '.join(f'{n} {status}' for status, n in counts.items())}; {seconds:.0f} s"


def write(kind: str, verdicts: dict[str, Verdict]) -> Path:
    """Leaves the verdicts in benchmarks/results, with the machine and the versions; those that it holds of others stay."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.record import RESULTS, Record

    record = Record("mutations", RESULTS, kind=kind)
    record.data["command"] = f"python tests/mutations/run.py --write={kind}"
    before = RESULTS / f"{record.stem}.json"
    rows = {row["id"]: row for row in json.loads(before.read_text())["tables"]["Verdicts"]["rows"]} if before.exists() else {}
    for mutation in load():
        if verdict := verdicts.get(mutation.id):
            rows[mutation.id] = {
                "id": mutation.id, "file": mutation.file, "verdict": verdict.status, "wall_s": round(verdict.seconds, 1),
                "plants": mutation.plants, "said": verdict.why,
            }  # fmt: skip
    kept = [rows[mutation.id] for mutation in load() if mutation.id in rows]
    record.data["summary"] = summary([row["verdict"] for row in kept], sum(row["wall_s"] for row in kept))
    record.table("Verdicts", kept, "wall_s: of the tests of the mutation, up to the first that failed.", show=False)
    return record.write()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python tests/mutations/run.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("ids", nargs="*", metavar="id", help="of mutations, or how they begin; none: all")
    parser.add_argument("--list", action="store_true", help="say what each plants, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at once")
    parser.add_argument("--write", metavar="KIND", default="", help="write benchmarks/results/mutations_<date>_<KIND>.json and .md")
    arguments = parser.parse_args(argv)
    mutations = [m for m in load() if not arguments.ids or m.id.startswith(tuple(arguments.ids))]
    if unknown := [each for each in arguments.ids if not any(m.id.startswith(each) for m in mutations)]:
        parser.error(f"no mutation {', '.join(unknown)}; --list says which there are")
    if arguments.jobs < 1:
        parser.error(f"--jobs={arguments.jobs} must be at least 1")
    if arguments.list:
        print("\n".join(f"{m.id} ({m.file}): {m.plants}" for m in mutations))
        return 0
    before = time.monotonic()
    verdicts = judge(mutations, arguments.jobs)
    print(summary([verdict.status for verdict in verdicts.values()], time.monotonic() - before))
    if arguments.write:
        print(write(arguments.write, verdicts).relative_to(ROOT))
    return 0 if all(verdict.status == KILLED for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
