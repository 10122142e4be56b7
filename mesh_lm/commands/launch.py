"""Starts the processes of a run on this node, watches over them, and starts them again from the
newest checkpoint when one is lost.

mesh-lm launch --per-node=2 --devices=4 train.py --config=configs/gpt_tiny.py --config.mesh.tensor=2
"""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from mesh_lm.commands.meanings import of_command
from mesh_lm.commands.options import command
from mesh_lm.commands.other_names import TORCHRUN
from mesh_lm.errors import ConfigError, did_you_mean, storage_failed
from mesh_lm.launch import templates
from mesh_lm.launch.agent import Agent
from mesh_lm.launch.controller import Controller
from mesh_lm.launch.job import Job, Options
from mesh_lm.network.exit_status import EXIT_CANNOT, EXIT_STALLED, EXIT_UNEXPECTED
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import LOOPBACK, listen

Request = tuple[Options, list[str]]
_ABOUT = (
    "Starts the processes of a run on this node, watches over them, and restarts them from the "
    "newest checkpoint when one is lost."
)
_COMMANDS = ("train", "generate", "evaluate", "import", "export")
"""Subcommands of mesh-lm that can be started by their names."""


def main(argv: Sequence[str] | None = None) -> int:
    """As `run`, for the words of a command line (default: of this process)."""
    try:
        asked = parse(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CANNOT
    return run(asked)


def run(asked: Request) -> int:
    """Runs the program to its end, restarting it as often as needed. Returns its status, see
    docs/multi_host.md.
    """
    options, program = asked
    if options.template:
        print(templates.fill(options, program), end="")
        return 0
    try:
        job = Job.of(options, program, os.environ)
        _require(program)
        return _run(job)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_STALLED if storage_failed(error) else EXIT_CANNOT
    except Exception:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return EXIT_UNEXPECTED


def _run(job: Job) -> int:
    secret = Secret.shared() if job.nodes > 1 else Secret.new()
    if job.node:
        return Agent(job, job.address, secret).run()
    try:
        listener = listen(job.address[1], LOOPBACK if job.nodes == 1 else "")
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen at --rendezvous={job.rendezvous}: {error.strerror}; choose a "
            "free port"
        ) from error
    agent = Agent(job, (LOOPBACK, listener.getsockname()[1]), secret)
    controller = threading.Thread(
        target=_control, args=(Controller(job, listener, secret),), daemon=True
    )
    controller.start()
    status = agent.run()
    controller.join()
    return status


def _control(controller: Controller) -> None:
    try:
        controller.run()
    except (
        BaseException
    ):  # without it nobody would end this process, and Linux ends the workers with it
        try:
            traceback.print_exc()
        finally:
            os._exit(EXIT_UNEXPECTED)


def parse(argv: Sequence[str], prog: str = "mesh-lm launch") -> Request:
    """The launcher's own options and the command that it starts. Raises ConfigError, and SystemExit
    after printing the help.
    """
    words, rest = [], list(argv)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        words.append(rest.pop(0))
        if "=" not in words[-1] and rest and not rest[0].startswith("-"):
            words.append(rest.pop(0))
    options = command(
        Options,
        words,
        f"{_ABOUT}\n\n{prog} [options] SCRIPT|-m MODULE|COMMAND [argument ...]",
        prog,
        of_command(TORCHRUN),
    )
    if not options.template and (not rest or rest == ["-m"]):
        raise ConfigError(
            "name a Python script, such as train.py, a command, such as train, or -m and a module, "
            "such as mesh_lm.generate"
        )
    if rest and rest[0] in _COMMANDS and not Path(rest[0]).exists():
        rest = ["-m", "mesh_lm", *rest]
    return options, rest


def _require(program: Sequence[str]) -> None:
    """Raises ConfigError where Python would find no such script or module: starting that again
    would change nothing.
    """
    name = program[0]
    if name == "-m":
        # The worker looks in this directory, too. find_spec also asks the finder of an editable
        # installation; of a module inside of a package it would import the package.
        path, parts = [str(Path.cwd()), *sys.path], program[1].split(".")
        for i, part in enumerate(parts):
            found = PathFinder.find_spec(".".join(parts[: i + 1]), path)
            if found is None and i == 0 and part != "__main__":
                found = find_spec(part)
            if found is None:
                raise ConfigError(f"-m {program[1]}: no module named {'.'.join(parts[: i + 1])}")
            path = found.submodule_search_locations or []
        return
    if not Path(name).exists():
        beside = [str(other) for other in Path(name).parent.glob("*.py")]
        near = difflib.get_close_matches(name, [*beside, *_COMMANDS], n=1, cutoff=0.7)
        raise ConfigError(f"{name}: no such script in {Path.cwd()}{did_you_mean(near)}")
