"""Health checks of a node: its agent runs them before the first start and after each failure, and a node that fails one is left out.

A check returns ok, failed or unknown, with one line. What cannot be found out is unknown, and leaves no node out.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from mesh_lm.launch.environment import SECRET, SECRET_FILE
from mesh_lm.launch.health import programs
from mesh_lm.launch.health.finding import Check
from mesh_lm.launch.health.finding import Examination as Examination
from mesh_lm.launch.job import VARIABLES, Job


def checks(job: Job, environment: Mapping[str, str]) -> dict[str, Check]:
    """Returns the checks of this node by name. Some remember what they found first: use the same ones for each examination."""
    visible = {name: value for name, value in environment.items() if name not in (SECRET, SECRET_FILE)}
    found: dict[str, Check] = {}
    if job.health_command and job.health != "off":
        node = visible | {VARIABLES["node"]: str(job.node)}
        found["command"] = lambda: programs.own_command(shlex.split(job.health_command), node)
    return found
