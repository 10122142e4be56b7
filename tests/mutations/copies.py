"""Copies of the repository, of which each but the first has one mistake, and what tests say about
them."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tiers
from mutations import planted, server
from mutations.planted import Mutation

PATIENCE = 600.0
"""Seconds that the tests of one mutation may take."""
PREPARED = (
    "numpy", "hypothesis", "xdist", "jax", "flax.nnx", "optax", "orbax.checkpoint", "tensorstore",
    "grain", "tokenizers",
    "safetensors.numpy", "xxhash", "tyro", "rich.console", "tensorboardX",
)  # fmt: skip
"""Modules that are imported once for all mutations. Others do at their import what a fork would
miss: torch and pyarrow start threads, and JAX's Mosaic GPU looks for CUDA, where
`sharding_rules.lab` has said that it is."""
KILLED, SURVIVED, MISPLACED = "killed", "SURVIVED", "does not apply"
NOT_IN_CI = "not in CI"
EQUIVALENT = "equivalent"
"""No mistake, as its entry explains; its test has shown that the numbers stay right."""
ACCEPTED = (KILLED, EQUIVALENT)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Of one mutation, or of tests without any."""

    status: str
    seconds: float = 0.0
    why: str = ""
    """The first test that failed and what it said, or what stood in the way."""

    @property
    def of_unchanged(self) -> str:
        """What it says of tests without any mutation."""
        return f"{'a test fails' if self.status == KILLED else self.status}: {self.why}"

    def proves_nothing(self) -> Verdict:
        """That of a mutation whose tests have this one without it."""
        return Verdict("proves nothing", self.seconds, f"without it: {self.of_unchanged}")


def tracked() -> list[str]:
    """The files that git tracks and that are there, by their paths in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=planted.ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [name for name in listed.split("\0") if name and (planted.ROOT / name).is_file()]


class Outcome(NamedTuple):
    """How tests ended on a copy."""

    status: int | None
    """Of pytest; None: it took too long."""
    seconds: float
    cases: Mapping[str, Sequence[Any]]
    """Test id -> [outcome, seconds, what it said]."""
    log: str
    """What pytest printed."""


class Server:
    """A process that runs pytest in forks; see server.py."""

    def __init__(self, compiled: Path) -> None:
        """compiled: the directory for what JAX compiles, which all copies share."""
        self._environment = os.environ | {"MESH_LM_TEST_CACHE": str(compiled)}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [
            sys.executable,
            server.__file__,
            str(planted.ROOT / "tests" / "conftest.py"),
            *PREPARED,
        ]
        self._process = subprocess.Popen(
            command,
            cwd=compiled,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self, copy: Path, expression: str, tests: Sequence[str], *, seconds: float, first_only: bool
    ) -> Outcome:
        """Runs those of the tests of a copy that the marker expression selects. first_only: end at
        the first that fails."""
        python_path = [str(copy), *filter(None, [os.environ.get("PYTHONPATH")])]
        changes = {
            "PYTHONPATH": os.pathsep.join(python_path),
            "TMPDIR": str(copy / ".tmp"),
            "MESH_LM_REPORTS": str(copy / ".reports"),
        }
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            expression,
            *(["-x"] if first_only else []),
        ]
        request = {
            "root": str(copy),
            "environment": self._environment | changes,
            "arguments": [*options, *tests],
            "seconds": seconds,
        }
        (copy / ".tmp").mkdir()
        began = time.monotonic()
        assert self._process.stdin and self._process.stdout
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        log = copy / server.LOG
        said = log.read_text(errors="replace", encoding="utf-8") if log.exists() else ""
        return Outcome(answer["status"], time.monotonic() - began, answer["cases"], said)

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


class Copies:
    """Copies of the repository in a temporary directory, and one server per job that runs tests on
    them. A context manager.

    The first copy, `pristine`, has files of its own. The others have links to them, because copying
    takes seconds and links take none. What a mutation changes is a new file, and a file of
    `pristine` into which a test has written is copied once more.
    """

    def __init__(self, where: Path, jobs: int) -> None:
        self._where, self._pristine = where, where / "pristine"
        (where / "compiled").mkdir()
        self._stamps: dict[str, tuple[int, int]] = {}
        for name in tracked():
            (self._pristine / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(planted.ROOT / name, self._pristine / name)
            self._stamps[name] = self._stamp(name)
        self._servers: queue.SimpleQueue[Server] = queue.SimpleQueue()
        for _ in range(jobs):
            self._servers.put(Server(where / "compiled"))
        self._jobs = jobs

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        for _ in range(self._jobs):
            self._servers.get().close()

    def run(self, tests: Sequence[str], mutation: Mutation | None = None) -> Verdict:
        """The verdict of the tests on a copy of their own, which is removed after it: killed where
        one of them fails."""
        if mutation and (problem := mutation.place(self._pristine)):
            return Verdict(MISPLACED, why=problem)
        return verdict(tests, self._outcome(tests, mutation, seconds=PATIENCE, first_only=True))

    def run_unchanged(self, sets: Sequence[tuple[str, ...]]) -> dict[tuple[str, ...], Verdict]:
        """The verdicts of several sets of tests, all in one process. Those that do not pass there
        run once more, each set alone."""
        tests = sorted({test for each in sets for test in each})
        outcome = self._outcome(tests, None, seconds=PATIENCE * len(sets), first_only=False)
        verdicts = {}
        for each in sets:
            verdicts[each] = verdict(each, outcome)
            if verdicts[each].status not in (SURVIVED, NOT_IN_CI):
                verdicts[each] = self.run(each)
        return verdicts

    def run_kernels(self, kernels: Sequence[Mutation]) -> dict[str, Verdict]:
        """The verdicts of mistakes that their tests plant, by id."""
        unchanged = f"{planted.KERNELS}::test_nothing_is_wrong_without_a_fault"
        tests = [unchanged, *(test for each in kernels for test in each.tests)]
        outcome = self._outcome(tests, None, seconds=PATIENCE, first_only=False)
        alone = verdict([unchanged], outcome)
        verdicts = {}
        for each in kernels:
            own = verdict(each.tests, outcome)
            if own.status == SURVIVED:  # the test has passed, and so found the mistake
                own = dataclasses.replace(
                    own, status=EQUIVALENT if each.equivalent else KILLED, why=each.equivalent
                )
            elif own.status == KILLED:
                own = dataclasses.replace(own, status=SURVIVED)
            if alone.status != SURVIVED:
                own = alone.proves_nothing()
            verdicts[each.id] = own
        return verdicts

    def _outcome(
        self, tests: Sequence[str], mutation: Mutation | None, *, seconds: float, first_only: bool
    ) -> Outcome:
        copy = Path(tempfile.mkdtemp(prefix="copy-", dir=self._where))
        running = self._servers.get()
        try:
            shutil.copytree(self._pristine, copy, copy_function=os.link, dirs_exist_ok=True)
            if mutation:
                path = copy / mutation.file
                changed = path.read_text(encoding="utf-8").replace(mutation.old, mutation.new)
                path.unlink()
                path.write_text(changed, encoding="utf-8")
                # Python takes old bytecode for that of a file with the same size and second.
                for bytecode in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
                    bytecode.unlink()
            [expression] = {tiers.ci_selects(test.partition("::")[0]) for test in tests}
            outcome = running.run(copy, expression, tests, seconds=seconds, first_only=first_only)
            if not mutation:
                self._keep_bytecode(copy)
            return outcome
        finally:
            self._restore()
            self._servers.put(running)
            shutil.rmtree(copy, ignore_errors=True)

    def _stamp(self, name: str) -> tuple[int, int]:
        about = (self._pristine / name).stat()
        return about.st_size, about.st_mtime_ns

    def _restore(self) -> None:
        for name, stamp in self._stamps.items():
            if self._stamp(name) != stamp:
                (self._pristine / name).unlink()
                shutil.copy2(planted.ROOT / name, self._pristine / name)
                self._stamps[name] = self._stamp(name)

    def _keep_bytecode(self, copy: Path) -> None:
        """Moves what Python compiled in a copy to the pristine files, so that it compiles only what
        a mutation changes.

        pytest's own bytecode, of tests, is left out: it has the paths of the copy in it.
        """
        for path in copy.rglob("__pycache__/*.pyc"):
            if "-pytest-" in path.name:
                continue
            kept = self._pristine / path.relative_to(copy)
            if not kept.parents[1].is_dir():  # a module that a test wrote
                continue
            kept.parent.mkdir(exist_ok=True)
            path.replace(kept)


def verdict(tests: Sequence[str], outcome: Outcome) -> Verdict:
    """Of tests that ran, perhaps with others: killed where one of them failed."""
    own = {case: result for case, result in outcome.cases.items() if is_of(case, tests)}
    seconds = (
        sum(result[1] for result in own.values())
        if len(own) < len(outcome.cases)
        else outcome.seconds
    )
    if outcome.status is None:
        return Verdict("timed out", seconds, f"no end after {PATIENCE:g} s")
    # with these pytest says: the tests ran, and: none was selected
    if outcome.status not in (0, 1, 5):
        return Verdict("broken", seconds, outcome.log.strip()[-600:])
    if not own:
        return Verdict(NOT_IN_CI, seconds, "CI selects none of its tests")
    for case, (result, _, said) in own.items():
        if result == "failed":
            return Verdict(KILLED, seconds, f"{case.rpartition('::')[2]}: {_first_line(said)}")
    skipped = sum(result == "skipped" for result, *_ in own.values())
    return Verdict(
        "skipped" if skipped else SURVIVED,
        seconds,
        f"{skipped} of {len(own)} skipped" if skipped else "",
    )


def is_of(case: str, tests: Sequence[str]) -> bool:
    """Whether a case, as pytest names it, is one of the tests, or one of theirs if they name files
    or functions."""
    return any(case == test or case.startswith((f"{test}::", f"{test}[")) for test in tests)


def _first_line(said: str) -> str:
    line = next(iter(said.strip().splitlines()), "")
    # it may be kept, and the host is nobody's business
    return re.sub(rf"\b{re.escape(platform.node())}\b", "HOST", line)[:200]
