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

from mesh_lm.commands.meanings import foreign_options
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
"""The launcher's own options, and the command that it starts."""
_ABOUT = (
    "Starts the processes of a run on this node, watches over them, and restarts them from the "
    "newest checkpoint when one is lost."
)
_COMMANDS = ("train", "generate", "evaluate", "import", "export")
"""Subcommands of mesh-lm that can be started by their names."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the words of a command line (default: of this process). Returns the status of `run`."""
    try:
        request = parse(list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CANNOT
    return run(request)


def run(request: Request) -> int:
    """Runs the program to its end, restarting it as often as needed.

    Returns its status, see docs/multi_host.md.
    """
    options, program = request
    if options.template:
        print(templates.fill(options, program), end="")
        return 0
    try:
        job = Job.of(options, program, os.environ)
        _require_program(program)
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
    # Node 0 has the controller, too.
    try:
        listener = listen(job.address[1], LOOPBACK if job.nodes == 1 else "")
    except OSError as error:
        raise ConfigError(
            f"node 0 cannot listen at --rendezvous={job.rendezvous}: {error.strerror}; choose a "
            "free port"
        ) from error
    agent = Agent(job, (LOOPBACK, listener.getsockname()[1]), secret)
    controller = Controller(job, listener, secret)
    thread = threading.Thread(target=_run_controller, args=(controller,), daemon=True)
    thread.start()
    status = agent.run()
    thread.join()
    return status


def _run_controller(controller: Controller) -> None:
    try:
        controller.run()
    except BaseException:
        # Without a controller nobody would end this process. Linux ends the workers with it.
        try:
            traceback.print_exc()
        finally:
            os._exit(EXIT_UNEXPECTED)


def parse(argv: Sequence[str], prog: str = "mesh-lm launch") -> Request:
    """Raises ConfigError, and SystemExit after printing the help."""
    # The launcher's words end at the first that is neither an option nor an option's value.
    words = []
    program = list(argv)
    while program and program[0].startswith("-") and program[0] != "-m":
        words.append(program.pop(0))
        if "=" not in words[-1] and program and not program[0].startswith("-"):
            words.append(program.pop(0))
    options = command(
        Options,
        words,
        f"{_ABOUT}\n\n{prog} [options] SCRIPT|-m MODULE|COMMAND [argument ...]",
        prog,
        foreign_options(TORCHRUN),
    )
    if not options.template and (not program or program == ["-m"]):
        raise ConfigError(
            "name a Python script, such as train.py, a command, such as train, or -m and a module, "
            "such as mesh_lm.generate"
        )
    if program and program[0] in _COMMANDS and not Path(program[0]).exists():
        program = ["-m", "mesh_lm", *program]
    return options, program


def _require_program(program: Sequence[str]) -> None:
    """Raises ConfigError if Python would find no such script or module.

    Starting that again would change nothing.
    """
    if program[0] == "-m":
        _require_module(program[1])
        return
    script = Path(program[0])
    if not script.exists():
        names = [*map(str, script.parent.glob("*.py")), *_COMMANDS]
        similar = difflib.get_close_matches(program[0], names, n=1, cutoff=0.7)
        raise ConfigError(
            f"{program[0]}: there is no such script in {Path.cwd()}{did_you_mean(similar)}"
        )


def _require_module(name: str) -> None:
    """Raises ConfigError if Python would find no such module. Imports no package."""
    path = [str(Path.cwd()), *sys.path]  # the worker looks in this directory, too
    parts = name.split(".")
    for i, part in enumerate(parts):
        prefix = ".".join(parts[: i + 1])
        spec = PathFinder.find_spec(prefix, path)
        if spec is None and i == 0 and part != "__main__":
            # This also asks the finder of an editable installation. For a module inside of a
            # package it would import the package.
            spec = find_spec(part)
        if spec is None:
            raise ConfigError(f"-m {name}: Python finds no module named {prefix}")
        path = spec.submodule_search_locations or []
