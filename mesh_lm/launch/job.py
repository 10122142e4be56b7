"""The settings that the launchers of a run need, from options, environment variables or Slurm."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from mesh_lm.errors import ConfigError
from mesh_lm.network.environment import NODES
from mesh_lm.network.process_slot import (
    gpus_here,
    host_and_port,
    is_slurm_step,
    share,
    slurm_address,
    starter_of,
)

VARIABLES = {"nodes": NODES, "node": "MESH_LM_NODE", "rendezvous": "MESH_LM_RENDEZVOUS"}
"""Option -> the environment variable that can replace it."""
_DIGEST = 32
"""Characters of a setting's digest."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run and how to keep it alive. Times are in seconds."""

    command: tuple[str, ...]
    """A script and its arguments, or -m and a module and its arguments."""
    nodes: int = 1
    node: int = 0
    """This node's number; the controller is on node 0."""
    rendezvous: str = "127.0.0.1:0"
    """host:port of the controller; port 0 (any free port) works for a single node only."""
    per_node: int = 1
    """Workers of each node."""
    devices: int = 0
    """CPU devices of each worker; 0: use the machine's hardware."""
    spares: int = 0
    """Nodes of these that stand by, and replace nodes that are lost or unhealthy."""
    min_nodes: int = 0
    """The fewest nodes with which the run continues when others do not return; 0: all but the
    spares."""
    restarts: int = 3
    """Restarts in a row without a new checkpoint before giving up."""
    heartbeat: float = 30.0
    """Time without a heartbeat after which a worker, or a node, is declared dead."""
    start: float = 300.0
    """Time allowed for a node to connect, and for a worker's first heartbeat; 0: no limit."""
    grace: float = 120.0
    """Time to save and exit after SIGTERM."""
    rejoin: float = 300.0
    """Time allowed for a node to reconnect."""
    health: Literal["all", "quick", "off"] = "all"
    """Checks of a node before the first start and after each failure (`mesh_lm.launch.health`);
    quick: without the matrix product."""
    health_command: str = ""
    """One more check: a command that ends with a status other than 0 on an unhealthy node."""

    @property
    def least(self) -> int:
        """The fewest nodes that can run the job."""
        return self.min_nodes or self.size

    @property
    def size(self) -> int:
        """The number of nodes that compute; the others are spares."""
        return self.nodes - self.spares

    @property
    def first_wait(self) -> float:
        """Time allowed for all nodes to connect."""
        return self.start or math.inf

    @property
    def pause(self) -> float:
        """The longest pause of a launcher's loop.

        One that pauses for longer was itself stopped, and excuses heartbeats that it missed.
        """
        return min(1.0, self.heartbeat / 2)

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of the controller."""
        return host_and_port(self.rendezvous)

    def shared(self) -> dict[str, Any]:
        """Returns the settings that must be equal on all nodes, as JSON values."""
        return {
            "nodes": self.nodes,
            "spares": self.spares,
            "per-node": self.per_node,
            "devices": self.devices,
            "command": " ".join(self.command),
        }

    def digests(self) -> dict[str, str]:
        """Returns a digest of each shared setting.

        Launchers compare these, without values on the network.
        """
        return {name: _digest(value) for name, value in self.shared().items()}

    def explained(self, names: Sequence[str]) -> str:
        """Returns those settings with their values here, for a message."""
        values = self.shared() | {"node": f"{self.node} of {self.nodes}"}
        phrases = []
        for name in names:
            phrases.append(f"{name} ({values[name]} here)" if name in values else name)
        return ", ".join(phrases)

    def devices_of(self, local: int, environment: Mapping[str, str]) -> str:
        """Returns the GPUs of local worker number `local`, such as 0,1; empty: all that it sees.

        Raises as `gpus_here` and `share`.
        """
        if self.devices or self.per_node == 1:
            return ""
        n_gpus = gpus_here(environment)
        if not n_gpus:
            return ""
        return ",".join(map(str, share(local, self.per_node, n_gpus, "worker")))

    @classmethod
    def of(cls, options: Options, command: list[str], environment: Mapping[str, str]) -> Job:
        """Returns the job from options and variables.

        Options win over variables, and variables over Slurm. Raises ConfigError if they are
        incomplete or impossible.
        """
        placement = _placement(options, environment)
        try:
            nodes = int(placement.nodes or 1)
            node = int(placement.node or 0)
        except ValueError:
            raise ConfigError(
                f"nodes={placement.nodes} and node={placement.node} "
                "must both be integers, as nodes=2 and node=0"
            ) from None
        _require_valid_placement(placement, nodes, node)
        _require_valid(options, nodes, environment)
        same_names = {field.name for field in dataclasses.fields(cls)} - {*VARIABLES, "command"}
        return cls(
            tuple(command),
            nodes,
            node,
            placement.rendezvous if nodes > 1 and placement.rendezvous else cls.rendezvous,
            **{name: getattr(options, name) for name in same_names},
        )


@dataclasses.dataclass(frozen=True)
class Options:
    """The launcher's own options. Times are in seconds."""

    nodes: int | None = None
    """Launchers of the run, one per node, spares included; else MESH_LM_NODES, else from Slurm,
    else 1."""
    node: int | None = None
    """Index of this node, from 0; else MESH_LM_NODE, else from Slurm."""
    rendezvous: str | None = None
    """host:port of node 0, reachable from the others; else MESH_LM_RENDEZVOUS, else from Slurm."""
    per_node: int = Job.per_node
    """Processes on each node: 1, or one per GPU."""
    devices: int = Job.devices
    """CPU devices of each process; 0: use the machine's hardware."""
    spares: int = Job.spares
    """This many of the nodes stand by, and replace nodes that are lost or unhealthy."""
    min_nodes: int = Job.min_nodes
    """Continue on a smaller mesh if at least this many nodes remain; 0: all are needed."""
    restarts: int = Job.restarts
    """Give up after this many restarts in a row without a new checkpoint."""
    heartbeat: float = Job.heartbeat
    """Seconds without a heartbeat before a process is declared dead."""
    start: float = Job.start
    """Seconds to wait for all nodes, and for each process's first heartbeat; 0: no limit."""
    grace: float = Job.grace
    """Seconds that processes have to save and exit after SIGTERM."""
    rejoin: float = Job.rejoin
    """Seconds allowed for a lost node to reconnect."""
    health: Literal["all", "quick", "off"] = Job.health
    """Check nodes before the first start and after failures; quick: without a matrix product on
    each device."""
    health_command: str = Job.health_command
    """A check of your own: a command that ends with a status other than 0 on an unhealthy node."""
    template: Literal["", "slurm", "jobset", "dockerfile", "dockerfile-pip"] = ""
    """Print a file that starts the command there, and do nothing else."""
    gpus: int = 8
    """GPUs of a node, for a template."""

    def __post_init__(self) -> None:
        """Raises ConfigError with every value that is out of range."""
        problems = []
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None or least <= value < math.inf:
                continue
            finite = "" if value < math.inf else ", and finite"
            problems.append(
                f"--{name.replace('_', '-')}={value:g} must be at least {least}{finite}"
            )
        if problems:
            raise ConfigError("\n  - ".join(["bad command line", *problems]))


_LEAST = {
    "nodes": 1,
    "node": 0,
    "per_node": 1,
    "devices": 0,
    "spares": 0,
    "min_nodes": 0,
    "restarts": 0,
    "gpus": 1,
    "heartbeat": 0,
    "start": 0,
    "grace": 0,
    "rejoin": 0,
}
"""Option -> its least value."""


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:_DIGEST]


class _Placement(NamedTuple):
    """The placement of a launcher in the run, as its source spells it; None: that does not say."""

    nodes: int | str | None
    node: int | str | None
    rendezvous: str | None


def _placement(options: Options, environment: Mapping[str, str]) -> _Placement:
    """Returns the placement from options, else from variables, else from Slurm.

    Raises ConfigError if Slurm started several launchers on a node, or another program started this
    one as one of several.
    """
    placement = _Placement(options.nodes, options.node, options.rendezvous)
    if placement != _NO_PLACEMENT:
        return placement
    placement = _Placement(*(environment.get(variable) or None for variable in VARIABLES.values()))
    if placement != _NO_PLACEMENT:
        return placement
    if is_slurm_step(environment):
        return _slurm_placement(environment)
    _require_one_launcher(environment)
    return _NO_PLACEMENT


_NO_PLACEMENT = _Placement(None, None, None)


def _slurm_placement(environment: Mapping[str, str]) -> _Placement:
    nodes = environment.get("SLURM_STEP_NUM_NODES", "1")
    tasks = environment["SLURM_STEP_NUM_TASKS"]
    if tasks != nodes:
        raise ConfigError(
            f"srun starts {tasks} launchers on {nodes} nodes; pass --ntasks-per-node=1 to srun and "
            "use --per-node"
        )
    return _Placement(nodes, environment["SLURM_NODEID"], slurm_address(environment))


def _require_one_launcher(environment: Mapping[str, str]) -> None:
    """Raises ConfigError if several launchers were started, of which each would take the whole run
    for its own.
    """
    starter = starter_of(environment)
    if starter is None or environment.get(starter.size) in (None, "", "1"):
        return
    raise ConfigError(
        f"{starter.size}={environment[starter.size]}: {starter.name} has started this launcher as "
        f"one of several, of which each would train alone; give each of them "
        f"{_placement_options()}, or --nodes=1 if it is to"
    )


def _placement_options() -> str:
    return ", ".join(f"--{option} (or {variable})" for option, variable in VARIABLES.items())


def _require_valid_placement(placement: _Placement, nodes: int, node: int) -> None:
    """nodes, node: those of `placement`, as numbers."""
    if nodes > 1 and (placement.rendezvous is None or placement.node is None):
        raise ConfigError(
            f"several nodes need all of {_placement_options()}: --nodes={nodes} "
            f"--node={placement.node} --rendezvous={placement.rendezvous}"
        )
    if not 0 <= node < nodes:
        raise ConfigError(
            f"node={node} must be 0 to nodes - 1 = {nodes - 1}; see {_placement_options()}"
        )
    if placement.rendezvous is not None and not re.fullmatch(r".+:\d+", placement.rendezvous):
        raise ConfigError(
            f"rendezvous={placement.rendezvous} must be host:port of node 0, such as node1:9876"
        )


def _require_valid(options: Options, nodes: int, environment: Mapping[str, str]) -> None:
    """Raises ConfigError if an option does not go with the number of nodes, or cannot be used."""
    if not options.heartbeat:
        raise ConfigError(
            "heartbeat=0 would declare every process dead; set at least a few seconds"
        )
    if options.spares >= nodes:
        raise ConfigError(
            f"spares={options.spares} are among the nodes={nodes}, "
            "and at least one must compute; use more nodes"
        )
    if options.min_nodes > nodes - options.spares:
        spares = f" - spares={options.spares}" if options.spares else ""
        raise ConfigError(
            f"min-nodes={options.min_nodes} must not be more than nodes={nodes}{spares}"
        )
    try:
        words = shlex.split(options.health_command)
    except ValueError as error:
        raise ConfigError(
            f"health-command={options.health_command} cannot be split into words: {error}"
        ) from error
    if words and not shutil.which(words[0], path=environment.get("PATH")):
        raise ConfigError(
            f"health-command={options.health_command}: there is no such program on this node, "
            "or it is not executable"
        )
