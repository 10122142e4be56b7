"""Runs pytest in forks of one process that has imported the packages of others, which takes most of
the time of a short test.

python tests/mutations/server.py CONFTEST [module ...]

It imports the conftest, which sets the environment in which JAX must be imported, and the modules;
nothing of this repository stays imported, and no device of JAX is initialised. Then it reads
requests from its standard input and answers each before it reads the next, one JSON object a line:

- request: `root`, the directory in which pytest runs; its `environment` and `arguments`; `seconds`
  that it may take;
- answer: `status` of pytest, as `subprocess` gives it, or null after `seconds`; `cases`: test id ->
  [outcome, seconds, what it said].

A fork begins with nothing but these imports, in a session of its own, which is killed when pytest
has ended.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any, NoReturn

ANSWER, LOG = ".answer.json", ".log"
"""Files below `root`: the cases of a fork, and what it printed."""
_POLL = 0.01


class Recorder:
    """A pytest plugin that notes how each test ended."""

    def __init__(self) -> None:
        self.cases: dict[str, tuple[str, float, str]] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome, seconds, said = self.cases.get(report.nodeid, ("passed", 0.0, ""))
        if outcome == "passed":
            outcome = report.outcome
        if report.failed and not said:
            crash = getattr(report.longrepr, "reprcrash", None)
            said = crash.message if crash else str(report.longrepr)
        self.cases[report.nodeid] = outcome, seconds + report.duration, said


def prepare(conftest: Path, modules: list[str]) -> None:
    """Imports the conftest, if there is one, and those modules that are installed; what belongs to
    the repository is forgotten again."""
    if conftest.is_file():
        sys.path.insert(0, str(conftest.parent))
        spec = importlib.util.spec_from_file_location("prepared_conftest", conftest)
        assert spec and spec.loader
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
        sys.path.remove(str(conftest.parent))
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name, module in [*sys.modules.items()]:
        file = str(getattr(module, "__file__", None) or "")
        if (
            file.startswith(f"{conftest.parents[1]}{os.sep}")
            and "site-packages" not in file
            and name != "__main__"
        ):
            del sys.modules[name]


def serve() -> None:
    """Answers requests until there are no more."""
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            run(request)
        status = ended(process, request["seconds"])
        try:
            cases = json.loads((Path(request["root"]) / ANSWER).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # pytest did not get as far
            cases = {}
        print(json.dumps({"status": status, "cases": cases}), flush=True)


def run(request: dict[str, Any]) -> NoReturn:
    """Is pytest, in a fork."""
    status = 70
    try:
        os.setsid()
        os.chdir(request["root"])
        log = os.open(LOG, os.O_WRONLY | os.O_CREAT, 0o666)
        for descriptor, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(file, descriptor)
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115, the server's has read ahead
        os.environ.clear()
        os.environ.update(request["environment"])
        tempfile.tempdir = None  # so that TMPDIR is read again
        sys.path[0] = request["root"]
        # processes that tests spawn would import this file
        sys.modules["__main__"] = types.ModuleType("__main__")
        importlib.invalidate_caches()

        import pytest

        recorder = Recorder()
        status = int(pytest.main(request["arguments"], plugins=[recorder]))
        Path(request["root"], ANSWER).write_text(json.dumps(recorder.cases), encoding="utf-8")
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the server's clean-up is not the fork's


def ended(process: int, seconds: float) -> int | None:
    """Returns the status of a fork, once all processes of its session are killed; None if it did
    not end within `seconds`."""
    limit = time.monotonic() + seconds
    found, status = os.waitpid(process, os.WNOHANG)
    while not found and time.monotonic() < limit:
        time.sleep(_POLL)
        found, status = os.waitpid(process, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process, signal.SIGKILL)
    if found:
        return os.waitstatus_to_exitcode(status)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return None


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), sys.argv[2:])
    serve()
