"""Several programs compiled at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from sharding_rules.lab.child import TURN, server
from sharding_rules.lab.report import LabError, Report

# Bytes of this machine's memory for each program that compiles; gpt_175b on 1,024 takes 0.6 GiB.
_CHILD = 3 * 2**30


def parallel() -> int:
    """Returns the programs that may compile at once here: at least one.

    It is limited by the cores and the memory that is free.
    """
    n_cores = os.cpu_count() or 1
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        free_bytes = int(available.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):  # not Linux
        return n_cores
    return max(1, min(n_cores, free_bytes // _CHILD))


def compiled_side_by_side(
    programs: Mapping[str, Callable[[], Report]], workers: int, say: Callable[[str], None]
) -> Iterator[tuple[str, Report | LabError]]:
    """Yields the name and the report of each program, in the order in which they are ready.

    A program that does not compile has an error in place of a report. An interruption (control-C)
    ends the children.

    Args:
      programs: by name, how to compile them.
      workers: programs at once.
      say: told the name of each program when it begins.
    """

    def compiled(name: str) -> Report | LabError:
        # Tracing is one thread's at a time; while its child compiles, another has its turn.
        with TURN:
            say(f"trying {name}")
            try:
                return programs[name]()
            except LabError as error:
                return error

    threads = ThreadPoolExecutor(workers)
    running = {threads.submit(compiled, name): name for name in programs}
    try:
        for future in as_completed(running):
            yield running[future], future.result()
    except BaseException:
        threads.shutdown(wait=False, cancel_futures=True)
        server().close()  # with the children, for which the threads wait
        raise
    threads.shutdown()
