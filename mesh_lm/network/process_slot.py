"""The index of this process in the run and the devices that belong to it, from flags, environment
variables, or whatever started it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import socket
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from mesh_lm.errors import ConfigError
from mesh_lm.network.wire import LOOPBACK

if TYPE_CHECKING:  # the launcher imports this file too, and needs no JAX
    from mesh_lm.config import LaunchConfig

VARIABLES = {
    "coordinator": "MESH_LM_COORDINATOR",
    "processes": "MESH_LM_PROCESSES",
    "index": "MESH_LM_PROCESS_INDEX",
}
"""Field of LaunchConfig -> the environment variable that can replace it."""
LOCAL_DEVICES = "MESH_LM_LOCAL_DEVICES"
"""Environment variable with the GPUs of this node that belong to the process, such as 0,1; empty:
all."""
_PORTS = range(61_440, 65_536)
_GPU = re.compile(r"\d+|(GPU|MIG)-.+")
"""An entry of CUDA_VISIBLE_DEVICES that names a GPU, by its number or its UUID."""
_NVIDIA_SMI_LIMIT = 30
"""Seconds that nvidia-smi may take."""


@dataclasses.dataclass(frozen=True)
class Starter:
    """A program that starts the processes of a run, and the environment variables in which it tells
    each of them its place.
    """

    name: str
    mark: str
    """A variable that only this program sets. Below `srun`, which may have started one of it per
    node, it is nearer to the process."""
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...] = ()
    """Variables that differ between runs on the same hosts."""


TORCHRUN = Starter(
    "torchrun",
    mark="TORCHELASTIC_RUN_ID",
    rank="RANK",
    size="WORLD_SIZE",
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
    job=("MASTER_PORT",),
)
_OPEN_MPI = Starter(
    "mpirun",
    mark="OMPI_COMM_WORLD_RANK",
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_MPICH = Starter(
    "mpirun",
    mark="MPI_LOCALRANKID",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    job=("PMI_PORT",),
)
"""MPICH's mpirun, and Intel's. `srun --mpi=pmi2` sets PMI_RANK and PMI_SIZE as well."""
_MVAPICH = Starter(
    "mpirun",
    mark="MV2_COMM_WORLD_RANK",
    rank="MV2_COMM_WORLD_RANK",
    size="MV2_COMM_WORLD_SIZE",
    local_rank="MV2_COMM_WORLD_LOCAL_RANK",
    local_size="MV2_COMM_WORLD_LOCAL_SIZE",
)
_PMI = Starter(
    "mpiexec",
    mark="PMI_RANK",
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="PMI_LOCAL_RANK",
    local_size="PMI_LOCAL_SIZE",
    job=("PALS_APID", "PMI_PORT"),
)
"""Any other that speaks PMI, such as Cray's PALS. `srun` may set these variables, too."""
_MARKED = (TORCHRUN, _OPEN_MPI, _MPICH, _MVAPICH)
"""Starters that are known by their marks, below `srun`, too."""


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
    def of(
        cls, config: LaunchConfig, environment: Mapping[str, str] = os.environ
    ) -> ProcessSlot | None:
        """Returns the slot from flags, else from variables, else from the starter of this process;
        None if the run has one process.

        The starter is torchrun, mpirun or Slurm, or anything that sets torchrun's RANK, WORLD_SIZE
        and MASTER_ADDR, as Kubernetes' PyTorchJob does.

        Raises ConfigError if the settings are incomplete or impossible.
        """
        flags = {
            "coordinator": config.coordinator,
            "processes": str(config.processes or ""),
            "index": "" if config.index < 0 else str(config.index),
        }
        if any(flags.values()):
            names = {field: f"launch.{field}" for field in VARIABLES}
            return cls._explicit(flags, names, _launcher_devices(environment))

        variables = {field: environment.get(name, "") for field, name in VARIABLES.items()}
        if any(variables.values()):
            return cls._explicit(variables, VARIABLES, _launcher_devices(environment))

        starter = starter_of(environment)
        if starter:
            return cls._started(starter, environment)
        if is_slurm_step(environment):
            return cls._slurm(environment)
        if environment.get("PMIX_RANK", "0") != "0":
            raise ConfigError(
                f"PMIX_RANK={environment['PMIX_RANK']}: this process was started as one of "
                f"several, but no variable says of how many; set {', '.join(VARIABLES.values())}"
            )
        return None

    @classmethod
    def _explicit(
        cls, values: Mapping[str, str], names: Mapping[str, str], devices: tuple[int, ...] | None
    ) -> ProcessSlot | None:
        """Returns the slot from all three settings. names: what the user calls each, for errors."""
        missing = [names[field] for field, value in values.items() if not value]
        if missing:
            present = [f"{names[field]}={value}" for field, value in values.items() if value]
            raise ConfigError(
                f"{', '.join(present)} is given without {' and '.join(missing)}; a run of several "
                "processes needs all three"
            )
        try:
            count = int(values["processes"])
            index = int(values["index"])
        except ValueError:
            raise ConfigError(
                f"{names['processes']}={values['processes']} and "
                f"{names['index']}={values['index']} "
                "must be integers, as in 2 processes and index 0"
            ) from None
        if not 0 <= index < count:
            raise ConfigError(
                f"{names['index']}={index} must be an index from 0 to "
                f"{names['processes']} - 1 = {count - 1}"
            )
        coordinator = values["coordinator"]
        if not re.fullmatch(r".+:\d+", coordinator):
            raise ConfigError(
                f"{names['coordinator']}={coordinator} must be host:port of process 0, such as "
                "node1:9876"
            )
        return cls(coordinator, count, index, devices) if count > 1 else None

    @classmethod
    def _started(cls, starter: Starter, environment: Mapping[str, str]) -> ProcessSlot | None:
        """Returns the slot of a process of torchrun or mpirun; None if that started one process."""
        rank = _number(environment, starter.rank, starter)
        count = _number(environment, starter.size, starter)
        if count <= 1:
            return None
        if not 0 <= rank < count:
            raise ConfigError(
                f"{starter.rank}={rank} must be a rank from 0 to {starter.size} - 1 = {count - 1}"
            )

        n_local = _number(environment, starter.local_size, starter, default=0)
        host = LOOPBACK if n_local == count else environment.get("MASTER_ADDR", "")
        if not host:
            raise ConfigError(
                f"{starter.rank}={environment[starter.rank]} and "
                f"{starter.size}={environment[starter.size]}: {starter.name} has started this "
                "process, but does not say on which host process 0 is; give all processes "
                "MASTER_ADDR (of Open MPI: mpirun -x MASTER_ADDR=node1), or set "
                f"{', '.join(VARIABLES.values())}"
            )
        if ":" in host:
            host = f"[{host}]"
        coordinator = f"{host}:{_started_port(starter, environment)}"

        if n_local:
            default_rank = 0 if n_local == 1 else None
            local = _number(environment, starter.local_rank, starter, default=default_rank)
            devices = _share_of_host(local, n_local, environment)
        else:
            devices = _gpu_of_local_rank(starter, environment)
        return cls(coordinator, count, rank, devices)

    @classmethod
    def _slurm(cls, environment: Mapping[str, str]) -> ProcessSlot:
        """Returns the slot of a task of `srun`.

        The tasks of a node share its GPUs equally (JAX's own detection would use one GPU per task).
        """
        n_local = tasks_here(
            environment.get("SLURM_STEP_TASKS_PER_NODE", "1"),
            int(environment.get("SLURM_NODEID", 0)),
        )
        required = ["SLURM_PROCID", "SLURM_STEP_NODELIST"]
        if n_local > 1:
            required.append("SLURM_LOCALID")
        missing = [name for name in required if name not in environment]
        if missing:
            raise ConfigError(
                f"SLURM_STEP_NUM_TASKS={environment['SLURM_STEP_NUM_TASKS']}, but "
                f"{' and '.join(missing)} is not set; pass all of Slurm's variables on to this "
                f"process, or set {', '.join(VARIABLES.values())}"
            )
        coordinator = slurm_address(environment)
        # Nothing outside this node needs to reach it.
        if environment.get("SLURM_STEP_NUM_NODES") == "1":
            _, port = host_and_port(coordinator)
            coordinator = f"{LOOPBACK}:{port}"
        local = int(environment.get("SLURM_LOCALID", 0))
        return cls(
            coordinator,
            int(environment["SLURM_STEP_NUM_TASKS"]),
            int(environment["SLURM_PROCID"]),
            _share_of_slurm(local, n_local, environment),
        )


# Starters, addresses and ports.


def starter_of(environment: Mapping[str, str]) -> Starter | None:
    """Returns the program that has started this process, if any but Slurm says so."""
    for starter in _MARKED:
        if starter.mark in environment:
            return starter
    # A batch script may export the variables below for all of its tasks, whose places only Slurm
    # knows.
    if is_slurm_step(environment):
        return None
    for starter in (TORCHRUN, _PMI):
        if starter.rank in environment and starter.size in environment:
            return starter
    return None


def is_slurm_step(environment: Mapping[str, str]) -> bool:
    """Returns whether `srun` has started this process as one of several tasks."""
    return int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1


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
    """Returns host:port on the first node of a step.

    The port differs between concurrent steps of a job.
    """
    job = int(environment.get("SLURM_JOB_ID", 0))
    step = int(environment.get("SLURM_STEP_ID", 0))
    port = _PORTS[(job * 31 + step) % len(_PORTS)]
    return f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}"


def tasks_here(tasks_per_node: str, node: int) -> int:
    """Returns the number of tasks on node number `node`, from Slurm's format 8(x3),4.

    Raises ConfigError if it has no such node.
    """
    counts = []
    for n_tasks, n_nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        counts += [int(n_tasks)] * int(n_nodes or 1)
    if node >= len(counts):
        raise ConfigError(
            f"SLURM_NODEID={node}, but SLURM_STEP_TASKS_PER_NODE={tasks_per_node} counts the tasks "
            f"of {len(counts)} nodes, as in a step of several job components; set "
            f"{', '.join(VARIABLES.values())}, and {LOCAL_DEVICES} where tasks share GPUs"
        )
    return counts[node]


def _number(
    environment: Mapping[str, str], name: str, starter: Starter, default: int | None = None
) -> int:
    value = environment.get(name, "")
    if not value and default is not None:
        return default
    try:
        return int(value)
    except ValueError:
        if name in environment:
            fault = f"{name}={value}"
        else:
            evidence = starter.mark if starter.mark in environment else starter.rank
            fault = f"{name} is not set, but {evidence} is"
        raise ConfigError(
            f"{fault}: {starter.name} gives each process an integer; unset its variables to start "
            "a single process"
        ) from None


def _started_port(starter: Starter, environment: Mapping[str, str]) -> int:
    """Returns the coordinator's port, the same for all processes.

    It is the user's MASTER_PORT, except that torchrun listens there itself.
    """
    port = environment.get("MASTER_PORT", "")
    if port.isdecimal() and starter.mark not in environment:
        return int(port)
    job = "".join(environment.get(name, "") for name in starter.job)
    return _PORTS[zlib.crc32(job.encode()) % len(_PORTS)]


# The GPUs of a process.


def _launcher_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the GPUs that the launcher gives to this process; None: all."""
    text = environment.get(LOCAL_DEVICES, "")
    try:
        return tuple(int(device) for device in text.split(",") if device) or None
    except ValueError:
        raise ConfigError(
            f"{LOCAL_DEVICES}={text} must be numbers of GPUs as this process sees them, such as 0,1"
        ) from None


def _gpu_of_local_rank(starter: Starter, environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """Returns the one GPU that a process has by its rank on its host, as in PyTorch.

    This is for starters that do not say how many processes the host has.
    """
    local = environment.get(starter.local_rank, "")
    if not local.isdecimal() or not may_use_gpus(environment):
        return None
    visible = visible_gpus(environment)
    if visible is not None and len(visible) <= 1:
        return None
    return (int(local),)


def _share_of_slurm(
    local: int, tasks: int, environment: Mapping[str, str]
) -> tuple[int, ...] | None:
    if tasks == 1 or not may_use_gpus(environment):
        return None
    visible = visible_gpus(environment)
    on_node = int(environment.get("SLURM_GPUS_ON_NODE") or 0)
    if not on_node and (visible is None or len(visible) > 1):
        # Slurm says nothing about GPUs; perhaps the driver does.
        with contextlib.suppress(RuntimeError):
            on_node = _gpus_of_node(environment)
    if visible is None and not on_node:
        return (local,)
    return _share(local, tasks, visible, on_node)


def _share_of_host(
    local: int, tasks: int, environment: Mapping[str, str]
) -> tuple[int, ...] | None:
    """Returns the GPUs of one of several tasks, as `_share`.

    Raises ConfigError if nothing says which GPUs there are: nvidia-smi fails, and
    CUDA_VISIBLE_DEVICES is not set.
    """
    if tasks == 1 or not may_use_gpus(environment):
        return None
    visible = visible_gpus(environment)
    try:
        on_node = _gpus_of_node(environment)
    except RuntimeError as error:
        if visible is None:
            raise ConfigError(
                f"{error}, or set CUDA_VISIBLE_DEVICES to the GPUs of each task"
            ) from error
        on_node = 0
    return _share(local, tasks, visible, on_node)


def _gpus_of_node(environment: Mapping[str, str]) -> int:
    """Returns the number of GPUs of this node, visible or not; 0: not known."""
    every_gpu = {**environment}
    every_gpu.pop("CUDA_VISIBLE_DEVICES", None)
    return gpus_here(every_gpu)


def _share(
    local: int, tasks: int, visible: Sequence[str] | None, on_node: int
) -> tuple[int, ...] | None:
    """Returns the GPUs of one of several tasks, numbered as it sees them; None: all of them.

    visible: the GPUs that each task sees; None: all of the node's. on_node: GPUs of the node; 0:
    not known. If the node has as many as its tasks see together, each of them has its own already
    (--gpus-per-task, or a script that sets CUDA_VISIBLE_DEVICES). Otherwise they see the same, and
    divide them.
    """
    n_visible = on_node if visible is None else len(visible)
    if not n_visible:
        return None
    if visible and visible[0].startswith("MIG-"):
        if n_visible > 1:
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={','.join(visible)}: CUDA shows a process one MIG device "
                f"only, the first; give each of the {tasks} tasks a CUDA_VISIBLE_DEVICES of its own"
            )
        return None
    if n_visible * tasks <= on_node or (n_visible == 1 and not on_node):
        return None
    return share(local, tasks, n_visible, "task")


def share(local: int, tasks: int, gpus: int, noun: str) -> tuple[int, ...]:
    """Returns the GPUs of task number `local` of `tasks` on a node.

    noun: what a task is called. Raises ConfigError if the GPUs cannot be divided equally.
    """
    if gpus % tasks:
        raise ConfigError(
            f"{gpus} GPUs of this node cannot be divided equally among its {tasks} {noun}s; start "
            f"one {noun} per node, or one per GPU"
        )
    return tuple(range(local * (gpus // tasks), (local + 1) * (gpus // tasks)))


def may_use_gpus(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether JAX_PLATFORMS lets JAX use GPUs."""
    return environment.get("JAX_PLATFORMS", "").split(",")[0] in ("", "cuda", "gpu")


def visible_gpus(environment: Mapping[str, str] = os.environ) -> list[str] | None:
    """Returns the GPUs that CUDA_VISIBLE_DEVICES names; None if it is not set, so that all are
    visible.

    The list ends at the first entry that names none, as CUDA reads it: -1, an empty one, or Slurm's
    NoDevFiles.
    """
    ids = environment.get("CUDA_VISIBLE_DEVICES")
    if ids is None:
        return None
    entries = map(str.strip, ids.split(","))
    return list(itertools.takewhile(_GPU.fullmatch, entries))


def gpus_here(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of GPUs of this node that JAX would see, without importing it; 0 if there
    are none, or JAX is set to use the CPU.

    Raises RuntimeError if nvidia-smi exists, but fails.
    """
    if not may_use_gpus(environment):
        return 0
    visible = visible_gpus(environment)
    if visible is not None:
        is_mig = bool(visible) and visible[0].startswith("MIG-")
        return 1 if is_mig else len(visible)  # CUDA shows a process one MIG device
    tool = shutil.which("nvidia-smi", path=environment.get("PATH"))
    if not tool:
        return 0
    try:
        listing = subprocess.run(
            [tool, "-L"],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_NVIDIA_SMI_LIMIT,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        # A node with a failed GPU must not count as a CPU node.
        raise RuntimeError(
            f"cannot count the GPUs of {socket.gethostname()}: {error}; if it has none, use "
            "--devices or JAX_PLATFORMS=cpu"
        ) from error
    return sum(line.startswith("GPU ") for line in listing.splitlines())
