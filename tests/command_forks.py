"""Runs commands of mesh-lm in forks of one process that has imported mesh_lm, which takes most of
the time of a short command.

python tests/command_forks.py

is that process. It reads requests from its standard input, one JSON object a line, and answers each
before it reads the next:

- request: `words` after mesh-lm; `cwd`; the `environment`; `input`, `output` and `errors`, files of
  the standard streams; `seconds`;
- answer: the exit status, as `subprocess` gives it, or null after `seconds`.

A fork is a session of its own with nothing but the imports: no device of JAX is initialised before
it. What JAX reads from its own variables while it is imported is that of the server; commands that
set such a variable need a process of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import Any, NoReturn

from mutations.server import ended

IMPORTED = (
    "mesh_lm.commands.main",
    "mesh_lm.commands.train",
    "mesh_lm.commands.generate",
    "mesh_lm.commands.evaluate",
    "mesh_lm.commands.plan",
    "mesh_lm.training.loop",
    "mesh_lm.inference.trained",
)


class Forks:
    """A process that runs commands of mesh-lm in forks. `run` is like `subprocess.run`."""

    def __init__(self, python: str, environment: dict[str, str]) -> None:
        """python: an interpreter, in whose `environment` mesh_lm can be imported."""
        self._process = subprocess.Popen(
            [python, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(
        self,
        words: list[str],
        *,
        cwd: Path,
        environment: dict[str, str],
        stdin: str = "",
        timeout: float,
    ) -> subprocess.CompletedProcess[str]:
        """Returns the outcome of `mesh-lm WORDS`. Raises subprocess.TimeoutExpired, once its
        processes are killed."""
        assert self._process.stdin and self._process.stdout
        with tempfile.TemporaryDirectory() as directory:
            streams = {name: str(Path(directory) / name) for name in ("input", "output", "errors")}
            Path(streams["input"]).write_text(stdin, encoding="utf-8")
            request = {
                "words": words,
                "cwd": str(cwd),
                "environment": environment,
                "seconds": timeout,
                **streams,
            }
            print(json.dumps(request), file=self._process.stdin, flush=True)
            status = json.loads(self._process.stdout.readline())
            output, errors = (
                Path(streams[name]).read_text(encoding="utf-8") for name in ("output", "errors")
            )
        if status is None:
            raise subprocess.TimeoutExpired(words, timeout, output, errors)
        return subprocess.CompletedProcess(words, status, output, errors)


def serve() -> None:
    """Answers requests until there are no more."""
    before = dict(os.environ)
    for name in IMPORTED:
        importlib.import_module(name)
    # Mosaic GPU's import tells XLA in a variable where its runtime library is, and a fork does not
    # import it again.
    set_by_imports = {
        name: value for name, value in os.environ.items() if before.get(name) != value
    }
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if process == 0:
            _run(request, set_by_imports)
        print(json.dumps(ended(process, request["seconds"])), flush=True)


def _run(request: dict[str, Any], set_by_imports: dict[str, str]) -> NoReturn:
    """Is the command, in a fork."""
    status = 1
    try:
        os.setsid()
        for name in ("output", "errors"):
            Path(request[name]).touch()
        for descriptor, name, flags in (
            (0, "input", os.O_RDONLY),
            (1, "output", os.O_WRONLY),
            (2, "errors", os.O_WRONLY),
        ):
            os.dup2(os.open(request[name], flags), descriptor)
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115, the server's has read ahead
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(set_by_imports | request["environment"])
        tempfile.tempdir = None  # so that TMPDIR is read again
        sys.argv = ["mesh-lm", *request["words"]]
        runpy.run_module("mesh_lm", run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]  # as an interpreter does before its exit
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the server's clean-up is not the fork's


if __name__ == "__main__":
    del sys.path[0]  # this directory, which a reader's process does not have
    serve()
