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
    def count(self) -> dict[str, int]:
        """The number of GPUs that the last examination found, as {"gpus": number}; empty if it is
        not known, or none are used.
        """
        return {} if self.gpus is None or self.gpus.count is None else {"gpus": self.gpus.count}


def checks(job: Job, environment: Mapping[str, str]) -> Checks:
    """Returns the checks of this node by name. Some compare with what they found first: use the
    same ones for each examination.
    """
    if job.health == "off":
        return Checks()
    visible = {
        name: value for name, value in environment.items() if name not in (SECRET, SECRET_FILE)
    }
    found = Checks()
    found["temporary directory"] = system.Disk(Path(environment.get("TMPDIR") or "/tmp"))
    found["output"] = system.Disk(Path(system.named_in(job.command, "output") or "runs"))
    if local := system.named_in(job.command, "checkpoint.local"):
        found["local checkpoints"] = system.Disk(Path(local))
    if job.nodes > 1:
        found["network"] = system.Network()
    tool = (
        shutil.which("nvidia-smi", path=visible.get("PATH")) if _uses_gpus(job, visible) else None
    )
    if tool:
        found.gpus = gpus = gpu.Gpus(gpu.nvidia_smi(tool, visible), visible)
        found |= {
            "GPU memory": gpus.memory,
            "GPU clocks": gpus.clocks,
            "NVLink": gpus.nvlink,
            "kernel log": gpus.kernel_log,
        }
    if job.health == "all":
        found["matrix product"] = partial(
            programs.matrix_product, "gpu" if tool else "cpu", visible
        )
    if job.health_command:
        own = visible | {VARIABLES["node"]: str(job.node)}
        found["command"] = partial(programs.own_command, shlex.split(job.health_command), own)
    return found


def _uses_gpus(job: Job, environment: Mapping[str, str]) -> bool:
    return not job.devices and may_use_gpus(environment) and visible_gpus(environment) != []
