"""The processes and devices of a run, before anything asks JAX for them; what they agree on; and the signal that ends them.

`python -m mesh_lm.launch` starts the processes, watches over them and starts them again. It needs no JAX, whose import takes seconds: so
what a process of the run itself uses is in `mesh_lm.launch.processes`, and read from there when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_lm.launch.processes import FewerNodes as FewerNodes
    from mesh_lm.launch.processes import StopOnSigterm as StopOnSigterm
    from mesh_lm.launch.processes import agree as agree
    from mesh_lm.launch.processes import first_before_others as first_before_others
    from mesh_lm.launch.processes import from_all as from_all
    from mesh_lm.launch.processes import from_first as from_first
    from mesh_lm.launch.processes import join as join
    from mesh_lm.launch.processes import prefix as prefix
    from mesh_lm.launch.processes import require_shared as require_shared
    from mesh_lm.launch.processes import run as run
    from mesh_lm.launch.processes import say as say
    from mesh_lm.launch.processes import start as start
    from mesh_lm.launch.processes import together as together

EXIT_CANNOT = 1
"""Status of a run that cannot run as it was asked to; starting it again would change nothing."""
EXIT_UNEXPECTED = 70
"""Status after an error that nobody foresaw (EX_SOFTWARE of sysexits.h); its traceback is above."""
EXIT_STALLED = 75
"""Status of a process that its watchdog ended, and of a run whose nodes do not come back (EX_TEMPFAIL)."""
EXIT_FEWER = 76
"""Status of a process whose mesh needs fewer nodes than there are; the launcher starts so many."""
EXIT_PREEMPTED = 99
"""Status of a run that SIGTERM ended: it saved, and the same command continues it."""


_OF_PROCESSES = (
    "FewerNodes", "StopOnSigterm", "agree", "first_before_others", "from_all", "from_first", "join", "prefix", "require_shared", "run",
    "say", "start", "together",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _OF_PROCESSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("mesh_lm.launch.processes"), name)
