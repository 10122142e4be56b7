"""Starts the processes of a run on this node, watches over them, and starts them again from the newest checkpoint when one is lost.

python -m mesh_lm.launch --per-node=2 --devices=4 train.py --config=configs/gpt_tiny.py --config.mesh.tensor=2
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import NoReturn

from mesh_lm.errors import ConfigError
from mesh_lm.launch import EXIT_CANNOT, EXIT_UNEXPECTED, templates
from mesh_lm.launch.agent import Agent
from mesh_lm.launch.controller import Controller
from mesh_lm.launch.job import VARIABLES, Job
from mesh_lm.launch.wire import listen


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script to its end, however often it takes. Returns its status, see docs/multi_host.md."""
    options, command = _parse(list(sys.argv[1:] if argv is None else argv))
    if options.template:
        print(templates.fill(options, command), end="")
        return 0
    try:
        return _run(Job.of(options, command, os.environ))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CANNOT
    except Exception:
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return EXIT_UNEXPECTED


def _run(job: Job) -> int:
    if job.node:
        return Agent(job, job.address).run()
    try:
        listener = listen(job.address[1], "127.0.0.1" if job.nodes == 1 else "")
    except OSError as error:
        raise ConfigError(f"node 0 cannot listen at --rendezvous={job.rendezvous}: {error.strerror}; choose a free port") from error
    agent = Agent(job, ("127.0.0.1", listener.getsockname()[1]))
    controller = threading.Thread(target=_control, args=(Controller(job, listener),), daemon=True)
    controller.start()
    status = agent.run()
    controller.join()
    return status


def _control(controller: Controller) -> None:
    try:
        controller.run()
    except BaseException:  # without it nobody would end this process, and Linux ends the workers with it
        try:
            traceback.print_exc()
        finally:
            os._exit(EXIT_UNEXPECTED)


def leave(status: int) -> NoReturn:
    """Python would end with 120 where the log takes no more."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        os._exit(status)
    sys.exit(status)


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    words = []
    while argv and argv[0].startswith("--"):
        words += [argv.pop(0)] if "=" in argv[0] or len(argv) == 1 or argv[0] == "--help" else [argv.pop(0), argv.pop(0)]
    parser = argparse.ArgumentParser(
        prog="python -m mesh_lm.launch", usage="%(prog)s [options] SCRIPT|-m MODULE [argument ...]", allow_abbrev=False,
        description=(__doc__ or "").split("\n")[0],
    )  # fmt: skip
    add = parser.add_argument
    add("--nodes", type=_count, help=f"launchers of the run, one a node (else {VARIABLES['nodes']}, else from Slurm, else 1)")
    add("--node", type=_count0, help=f"number of this one, from 0 (else {VARIABLES['node']}, else from Slurm)")
    add("--rendezvous", help=f"host:port of node 0, reachable from the others (else {VARIABLES['rendezvous']}, else from Slurm)")
    add("--per-node", type=_count, default=1, help="processes of each node: 1, or one a GPU (default 1)")
    add("--devices", type=_count, default=0, help="CPU devices of each process, instead of the hardware that is there")
    add("--min-nodes", type=_count, default=0, help="go on with so many, on a smaller mesh, when others do not come back (default: all)")
    add("--restarts", type=_count0, default=Job.restarts, help="restarts in a row without a new checkpoint (default %(default)s)")
    add("--heartbeat", type=_seconds, default=Job.heartbeat, help="seconds of silence after which one is dead (default %(default)g)")
    add("--start", type=_seconds, default=Job.start, help="seconds to come, and before the first heartbeat; 0: any (default %(default)g)")
    add("--grace", type=_seconds, default=Job.grace, help="seconds to save and leave after SIGTERM (default %(default)g)")
    add("--rejoin", type=_seconds, default=Job.rejoin, help="seconds that a node has to come back (default %(default)g)")
    add("--template", choices=templates.NAMES, help="print a file that starts the command there, and do nothing else")
    add("--gpus", type=_count, default=8, help="GPUs of a node, for a template (default %(default)s)")
    options = parser.parse_args(words)
    if not options.template and (not argv or (argv[0].startswith("-") and argv[0] != "-m") or argv == ["-m"]):
        parser.error("name a Python script, such as train.py, or -m and a module, such as mesh_lm.generate")
    return options, argv


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{count} must be at least 1")
    return count


def _count0(text: str) -> int:
    if (count := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{count} must be at least 0")
    return count


def _seconds(text: str) -> float:
    if not 0 <= (seconds := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be at least 0")
    return seconds
