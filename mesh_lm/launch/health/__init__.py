"""Health checks of a node: its agent runs them before the first start and after each failure, and a
node that fails one is left out.

A check returns ok, failed or unknown, with one line. What cannot be found out is unknown, and
leaves no node out.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from mesh_lm.launch.health import gpu, programs, system
from mesh_lm.launch.health.finding import Check
from mesh_lm.launch.health.finding import Examination as Examination
from mesh_lm.launch.job import VARIABLES, Job
from mesh_lm.network.environment import SECRET, SECRET_FILE
from mesh_lm.network.process_slot import may_use_gpus, visible_gpus


class Checks(dict[str, Check]):
    """Checks by name."""

    gpus: gpu.Gpus | None = None

    @property
    def n_gpus(self) -> int | None:
        """The number of GPUs that the last examination counted; None: not known, or none are
        used.
        """
        return self.gpus.count if self.gpus else None


def checks(job: Job, environment: Mapping[str, str]) -> Checks:
    """Returns the checks of this node by name.

    Some compare with what they found first: use the same ones for each examination.
    """
    node_checks = Checks()
    if job.health == "off":
        return node_checks
    # The programs that checks run need not know the secret.
    variables = {**environment}
    variables.pop(SECRET, None)
    variables.pop(SECRET_FILE, None)

    node_checks["temporary directory"] = system.Disk(Path(environment.get("TMPDIR") or "/tmp"))
    node_checks["output"] = system.Disk(Path(system.option_value(job.command, "output") or "runs"))
    local_checkpoints = system.option_value(job.command, "checkpoint.local")
    if local_checkpoints:
        node_checks["local checkpoints"] = system.Disk(Path(local_checkpoints))
    if job.nodes > 1:
        node_checks["network"] = system.Network()

    tool = None
    if _uses_gpus(job, variables):
        tool = shutil.which("nvidia-smi", path=variables.get("PATH"))
    if tool:
        gpus = gpu.Gpus(gpu.nvidia_smi(tool, variables), variables)
        node_checks.gpus = gpus
        node_checks["GPU memory"] = gpus.memory
        node_checks["GPU clocks"] = gpus.clocks
        node_checks["NVLink"] = gpus.nvlink
        node_checks["kernel log"] = gpus.kernel_log

    if job.health == "all":
        kind = "gpu" if tool else "cpu"
        node_checks["matrix product"] = partial(programs.matrix_product, kind, variables)
    if job.health_command:
        command = shlex.split(job.health_command)
        variables = variables | {VARIABLES["node"]: str(job.node)}
        node_checks["command"] = partial(programs.own_command, command, variables)
    return node_checks


def _uses_gpus(job: Job, environment: Mapping[str, str]) -> bool:
    return not job.devices and may_use_gpus(environment) and visible_gpus(environment) != []
