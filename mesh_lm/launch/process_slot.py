"""The index of this process in the run and the devices that belong to it, from flags, environment variables or Slurm."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping
from typing import TYPE_CHECKING

from mesh_lm.errors import ConfigError

if TYPE_CHECKING:  # the launcher imports this file too, and needs no JAX
    from mesh_lm.config import LaunchConfig

VARIABLES = {"coordinator": "MESH_LM_COORDINATOR", "processes": "MESH_LM_PROCESSES", "index": "MESH_LM_PROCESS_INDEX"}
"""Field of LaunchConfig -> the environment variable that can replace it."""
LOCAL_DEVICES = "MESH_LM_LOCAL_DEVICES"
"""Environment variable with the GPUs of this node that belong to the process, such as 0,1; empty: all."""
_PORTS = range(61_440, 65_536)


@dataclasses.dataclass(frozen=True)
class ProcessSlot:
    """The position of one process among several."""

    coordinator: str
    """host:port at which process 0 listens."""
    count: int
    """The number of processes in the run."""
    index: int
    """This process's index, 0 to count - 1."""
    local_devices: tuple[int, ...] | None = None
    """The GPUs of this node that belong to the process, numbered as it sees them; None: all."""

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of the coordinator."""
        return host_and_port(self.coordinator)

    @classmethod
    def of(cls, config: LaunchConfig, environment: Mapping[str, str] = os.environ) -> ProcessSlot | None:
        """Returns the slot that flags give, else variables, else Slurm; None if the run has one process.

        Raises ConfigError if the settings are incomplete or impossible.
        """
        names = {field: f"launch.{field}" for field in VARIABLES}
        index = "" if config.index < 0 else str(config.index)
        given = {"coordinator": config.coordinator, "processes": str(config.processes or ""), "index": index}
        if not any(given.values()):
            names, given = VARIABLES, {field: environment.get(name, "") for field, name in VARIABLES.items()}
        if any(given.values()):
            devices = tuple(int(device) for device in environment.get(LOCAL_DEVICES, "").split(",") if device)
            return cls._explicit(given, names, devices or None)
        return cls._slurm(environment) if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1 else None

    @classmethod
    def _explicit(cls, given: Mapping[str, str], names: Mapping[str, str], devices: tuple[int, ...] | None) -> ProcessSlot | None:
        if missing := [names[field] for field, value in given.items() if not value]:
            have = ", ".join(f"{names[field]}={value}" for field, value in given.items() if value)
            raise ConfigError(f"{have} is given without {' and '.join(missing)}; a run of several processes needs all three")
        try:
            count, index = int(given["processes"]), int(given["index"])
        except ValueError:
            pair = f"{names['processes']}={given['processes']} and {names['index']}={given['index']}"
            raise ConfigError(f"{pair} must be integers") from None
        if not 0 <= index < count:
            raise ConfigError(f"{names['index']}={index} must be 0 to {names['processes']} - 1 = {count - 1}")
        if not re.fullmatch(r".+:\d+", coordinator := given["coordinator"]):
            raise ConfigError(f"{names['coordinator']}={coordinator} must be host:port of process 0, such as node1:9876")
        return cls(coordinator, count, index, devices) if count > 1 else None

    @classmethod
    def _slurm(cls, environment: Mapping[str, str]) -> ProcessSlot:
        """The slot of a task of `srun`. The tasks of a node share its GPUs equally (JAX's own detection would use one GPU per task)."""
        tasks = tasks_here(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"), int(environment.get("SLURM_NODEID", 0)))
        address = slurm_address(environment)
        if environment.get("SLURM_STEP_NUM_NODES") == "1":  # nothing outside this node needs to reach it
            address = f"127.0.0.1:{host_and_port(address)[1]}"
        return cls(
            address,
            int(environment["SLURM_STEP_NUM_TASKS"]),
            int(environment["SLURM_PROCID"]),
            _share(int(environment.get("SLURM_LOCALID", 0)), tasks, environment),
        )


def host_and_port(address: str) -> tuple[str, int]:
    """Splits node1:9876 or [fd00::1]:9876 into the (host, port) that a socket takes."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def first_host(nodelist: str) -> str:
    """Returns the first name of Slurm's list: gpu[003-004,7],login -> gpu003."""
    match = re.match(r"([^,\[]*)(?:\[([0-9]+)[^\]]*\]([^,\[]*))?", nodelist)
    assert match is not None  # every part may be empty
    return "".join(part or "" for part in match.groups())


def slurm_address(environment: Mapping[str, str]) -> str:
    """Returns host:port on the first node of a step. The port differs between concurrent steps of a job."""
    job, step = (int(environment.get(name, 0)) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return f"{first_host(environment['SLURM_STEP_NODELIST'])}:{_PORTS[(job * 31 + step) % len(_PORTS)]}"


def tasks_here(tasks_per_node: str, node: int) -> int:
    """Returns the number of tasks on node number `node`, from Slurm's format 8(x3),4."""
    counts = [
        int(count) for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node) for _ in range(int(times or 1))
    ]  # fmt: skip
    return counts[node]


def _share(local: int, tasks: int, environment: Mapping[str, str]) -> tuple[int, ...] | None:
    ids = environment.get("CUDA_VISIBLE_DEVICES")
    gpus = len(ids.split(",")) if ids else int(environment.get("SLURM_GPUS_ON_NODE", 0))
    if tasks == 1 or gpus == 1 or 0 < gpus < int(environment.get("SLURM_GPUS_ON_NODE", 0)):
        return None  # the only task here, or Slurm has divided the GPUs already (--gpus-per-task)
    return share(local, tasks, gpus, "task") if gpus else (local,)


def share(local: int, tasks: int, gpus: int, what: str) -> tuple[int, ...]:
    """Returns the GPUs of task number `local` of `tasks` on a node. Raises ConfigError if they cannot be divided equally."""
    if gpus % tasks:
        fix = f"start one {what} per node, or one per GPU"
        raise ConfigError(f"{gpus} GPUs of this node cannot be divided equally among its {tasks} {what}s; {fix}")
    return tuple(range(local * (gpus // tasks), (local + 1) * (gpus // tasks)))


def gpus_here(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of GPUs of this node that JAX would see, without importing it; 0 if there are none, or JAX is set to use the CPU.

    Raises RuntimeError if nvidia-smi exists, but fails.
    """
    if environment.get("JAX_PLATFORMS", "").split(",")[0] not in ("", "cuda", "gpu"):
        return 0
    if (ids := environment.get("CUDA_VISIBLE_DEVICES")) is not None:
        return 0 if ids in ("", "-1") else len(ids.split(","))
    if not (tool := shutil.which("nvidia-smi", path=environment.get("PATH"))):
        return 0
    try:
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:  # a node with a failed GPU must not count as a CPU node
        why = f"cannot count the GPUs of {socket.gethostname()}: {error}; if it has none, use --devices or JAX_PLATFORMS=cpu"
        raise RuntimeError(why) from error
    return sum(line.startswith("GPU ") for line in listing.splitlines())
