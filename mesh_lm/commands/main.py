"""`mesh-lm`, or `python -m mesh_lm`: one command for all that the project does.

Imports what the chosen subcommand needs, and no more.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.metadata
import os
import platform
import signal
import sys
from collections.abc import Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import mesh_lm
from mesh_lm import output
from mesh_lm.errors import ConfigError, did_you_mean
from mesh_lm.network.exit_status import EXIT_CANNOT, EXIT_INTERRUPTED

PROG = "mesh-lm"
_STOPPED = "stopped by Ctrl-C\n"
_STOPPED_TWICE = "ended at once by a second Ctrl-C\n"
SHELLS = ("bash", "zsh", "fish")
OLDEST_PYTHON = (3, 11)
"""The requires-python of pyproject.toml, which a clone that is not installed does not consult."""


class Command(NamedTuple):
    """A subcommand.

    In its module, parse(argv, prog) reads its arguments, and run(arguments) returns its status.
    """

    module: str
    summary: str
    jax: bool = True
    """Whether `run` may start JAX with other processes; then `mesh_lm.distributed.run` watches over
    it."""
    cannot: int = EXIT_CANNOT
    """Status after a mistake in its arguments."""
    suffix: str = ""
    """The end of the names of its parse and run functions, if a module has several commands."""


COMMANDS = {
    "train": Command("train", "Train a model"),
    "configs": Command("configs", "List the configs that come with mesh_lm", jax=False),
    "plan": Command(
        "plan_options",
        "Compile a run for GPUs that you do not have; show memory, communication and time",
    ),
    "explain": Command(
        "explain",
        "Find the collective that a name in a log belongs to, and the ranks that it joins",
    ),
    "study": Command(
        "study",
        "Figures over many GPUs and models, without them: bytes, strategies, scaling",
        jax=False,
    ),
    "prepare": Command("prepare", "Tokenize a corpus into .bin/.idx files", jax=False),
    "generate": Command("generate", "Continue texts with a trained model"),
    "evaluate": Command(
        "evaluate", "Measure perplexity on a text, or run lm-evaluation-harness tasks"
    ),
    "import": Command(
        "huggingface", "Make a run from a Hugging Face model directory", suffix="_import"
    ),
    "export": Command(
        "huggingface", "Write a run as a Hugging Face model directory", suffix="_export"
    ),
    "convert": Command(
        "convert", "Write a config from DeepSpeed's JSON or Megatron-LM's arguments", jax=False
    ),
    "checkpoint": Command(
        "checkpoint", "List, verify or compare checkpoints (ls, verify, diff)", cannot=2
    ),
    "launch": Command(
        "launch", "Start and supervise the processes of a run on this node", jax=False
    ),
    "pipeline": Command("pipeline", "Draw pipeline schedules and compare their costs", jax=False),
    "bench": Command("bench", "Run a benchmark of this repository", jax=False),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the subcommand that `argv` (default: of this process) begins with.

    Returns its exit status; mistakes are one message.
    """
    output.accept_any_text()
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words else "--help"
    if name in ("--help", "-h", "help"):
        print(overview())
        return 0
    if name in ("--version", "-V"):
        print(version())
        return 0
    try:
        option, _, value = name.partition("=")
        if option == "--print-completion":
            print(_completion(value or "".join(words[:1])))
            return 0
        if name not in COMMANDS:
            raise ConfigError(f"{PROG} has no command of the name {name!r}{_suggestion(name)}")
    except ConfigError as error:
        return _refuse(error, EXIT_CANNOT)
    return run(name, words)


def door(name: str, **options: Any) -> NoReturn:
    """Runs a subcommand as `python -m mesh_lm.NAME` does, and ends the process.

    options: more arguments of the function that executes it.
    """
    _prepare_process()
    leave(run(name, sys.argv[1:], **options))


def script() -> NoReturn:
    """The console script `mesh-lm`."""
    _prepare_process()
    leave(main())


def _prepare_process() -> None:
    """Refuses a Python that is too old, and sets up Ctrl-C and what this process prints."""
    output.accept_any_text()
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        sys.exit(
            f"error: mesh_lm needs Python {oldest} or newer, and this is Python "
            f"{platform.python_version()}"
        )
    # Background jobs ignore Ctrl-C, and go on doing so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, or ends the process if it is importing a module.

    JAX's libraries crash when an exception passes through their start. A second Ctrl-C ends the
    process, too, whatever it waits for on its way out: there, an exception would be a traceback.
    """
    signal.signal(signal.SIGINT, _end_at_once)
    while frame:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, _STOPPED.encode())
            os._exit(EXIT_INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, _STOPPED_TWICE.encode())
    os._exit(EXIT_INTERRUPTED)


def run(name: str, argv: Sequence[str], **options: Any) -> int:
    """Returns the status of a subcommand: 130 and a line for a Ctrl-C that it does not handle.

    options: as in `door`.
    """
    try:
        return _run(name, argv, options)
    except BrokenPipeError:
        # What reads this output, such as `head`, has enough. Python's flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            print(_STOPPED, end="", file=sys.stderr, flush=True)
        return EXIT_INTERRUPTED


def _run(name: str, argv: Sequence[str], options: dict[str, Any]) -> int:
    """Returns the status of a subcommand. Its arguments are read before JAX is imported."""
    command = COMMANDS[name]
    module: Any = importlib.import_module(f"mesh_lm.commands.{command.module}")
    try:
        arguments = getattr(module, f"parse{command.suffix}")(list(argv), f"{PROG} {name}")
        execute = partial(getattr(module, f"run{command.suffix}"), **options)
        if not command.jax:
            return execute(arguments)
    except ConfigError as error:
        return _refuse(error, command.cannot)
    from mesh_lm import distributed

    return distributed.run(execute, arguments)


def leave(status: int) -> NoReturn:
    """Ends the process with this status, even if its last output cannot be written.

    Python would end with 120 if a full disk, or a closed pipe, takes no more of the log.
    """
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        os._exit(status)
    sys.exit(status)


def overview() -> str:
    """Returns the help of `mesh-lm` itself."""
    width = max(map(len, COMMANDS))
    commands = [f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items()]
    lines = [
        f"usage: {PROG} COMMAND [argument ...]",
        "",
        *commands,
        "",
        f"  {PROG} COMMAND --help             the options of a command",
        f"  {PROG} --version                  the versions of mesh_lm, JAX and Python",
        f"  {PROG} --print-completion=SHELL   a script that completes commands and options in "
        f"{', '.join(SHELLS)}",
    ]
    return "\n".join(lines)


def version() -> str:
    """Returns the versions of mesh_lm, JAX and Python."""
    return (
        f"mesh_lm {mesh_lm.__version__}, jax {importlib.metadata.version('jax')}, Python "
        f"{platform.python_version()}"
    )


def _suggestion(name: str) -> str:
    similar = difflib.get_close_matches(name, COMMANDS, n=1)
    if not similar:
        return f"; it has {', '.join(COMMANDS)}"
    return did_you_mean([f"{PROG} {similar[0]}"])


def _completion(shell: str) -> str:
    if shell not in SHELLS:
        raise ConfigError(
            f"--print-completion={shell}: expected one of the shells {', '.join(SHELLS)}"
        )
    from mesh_lm.commands.completion import shell_script

    summaries = {name: command.summary for name, command in COMMANDS.items()}
    return shell_script(shell, PROG, summaries)


def _refuse(error: ConfigError, status: int) -> int:
    with contextlib.suppress(OSError):
        print(f"error: {error}", file=sys.stderr, flush=True)
    return status
