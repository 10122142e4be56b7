"""What the launchers of a run have to know, and where they learn it: options, variables, or Slurm."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from mesh_lm.errors import ConfigError
from mesh_lm.launch.process_slot import gpus_here, host_and_port, share, slurm_address

VARIABLES = {"nodes": "MESH_LM_NODES", "node": "MESH_LM_NODE", "rendezvous": "MESH_LM_RENDEZVOUS"}
"""Option -> the variable that stands for it."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run and how it is to be kept alive. Times in seconds."""

    command: tuple[str, ...]
    """A script and its arguments, or -m and a module and its arguments."""
    nodes: int = 1
    node: int = 0
    """This one's number; the controller is on node 0."""
    rendezvous: str = "127.0.0.1:0"
    """host:port of the controller; port 0: any, which only one node can find."""
    per_node: int = 1
    """Workers of each node."""
    devices: int = 0
    """CPU devices of each worker; 0: the hardware that is there."""
    min_nodes: int = 0
    """Nodes with which the run goes on when others are gone for good; 0: all of them."""
    restarts: int = 3
    """Restarts in a row that bring no new checkpoint, before giving up."""
    heartbeat: float = 30.0
    """Silence after which a worker, or a node, counts as dead."""
    start: float = 300.0
    """Time that a node has to come, and a worker before its first heartbeat; 0: any."""
    grace: float = 120.0
    """Time to save and leave after SIGTERM."""
    rejoin: float = 300.0
    """Time that a node has to come back."""

    @property
    def least(self) -> int:
        """Nodes without which nothing runs."""
        return self.min_nodes or self.nodes

    @property
    def first_wait(self) -> float:
        """Time that nodes have to come."""
        return self.start or math.inf

    @property
    def pause(self) -> float:
        """Time between two looks around after which a launcher was itself stopped, and forgives others what it did not hear."""
        return min(1.0, self.heartbeat / 2)

    @property
    def address(self) -> tuple[str, int]:
        return host_and_port(self.rendezvous)

    def shared(self) -> dict[str, Any]:
        """What must be the same on all nodes, as JSON values."""
        return {"nodes": self.nodes, "per-node": self.per_node, "devices": self.devices, "command": " ".join(self.command)}

    def devices_of(self, local: int, environment: Mapping[str, str]) -> str:
        """The GPUs of local worker number `local`, such as 0,1; empty: all that it sees. Raises as `gpus_here` and `share`."""
        gpus = 0 if self.devices or self.per_node == 1 else gpus_here(environment)
        return ",".join(map(str, share(local, self.per_node, gpus, "worker"))) if gpus else ""

    @classmethod
    def of(cls, options: argparse.Namespace, command: list[str], environment: Mapping[str, str]) -> Job:
        """Options win over variables, and these over Slurm. Raises ConfigError for what is incomplete or impossible."""
        found = {name: getattr(options, name) for name in VARIABLES}
        if all(value is None for value in found.values()):
            found = {name: environment.get(variable) or None for name, variable in VARIABLES.items()}
        if all(value is None for value in found.values()) and int(environment.get("SLURM_STEP_NUM_NODES", 1)) > 1:
            found = _slurm(environment)
        try:
            nodes, node = int(found["nodes"] or 1), int(found["node"] or 0)
        except ValueError:
            raise ConfigError(f"nodes={found['nodes']} and node={found['node']} must be whole numbers") from None
        rendezvous = found["rendezvous"]
        names = ", ".join(f"--{option} (or {variable})" for option, variable in VARIABLES.items())
        if nodes > 1 and (rendezvous is None or found["node"] is None):
            raise ConfigError(f"several nodes need all of {names}: --nodes={nodes} --node={found['node']} --rendezvous={rendezvous}")
        if not 0 <= node < nodes:
            raise ConfigError(f"node={node} must be 0 to nodes - 1 = {nodes - 1}; see {names}")
        if rendezvous is not None and not re.fullmatch(r".+:\d+", rendezvous):
            raise ConfigError(f"rendezvous={rendezvous} must be host:port of node 0, such as node1:9876")
        if not options.heartbeat:
            raise ConfigError("heartbeat=0 would count everybody as dead; the least that makes sense is a few seconds")
        if options.min_nodes > nodes:
            raise ConfigError(f"min-nodes={options.min_nodes} must be at most nodes={nodes}")
        rest = {f.name: getattr(options, f.name) for f in dataclasses.fields(cls) if f.name not in (*VARIABLES, "command")}
        return cls(tuple(command), nodes, node, rendezvous if nodes > 1 and rendezvous else cls.rendezvous, **rest)


def _slurm(environment: Mapping[str, str]) -> dict[str, str | None]:
    nodes, tasks = environment["SLURM_STEP_NUM_NODES"], environment.get("SLURM_STEP_NUM_TASKS")
    if tasks != nodes:
        raise ConfigError(f"srun starts {tasks} launchers on {nodes} nodes; give it --ntasks-per-node=1, and the launcher --per-node")
    return {"nodes": nodes, "node": environment["SLURM_NODEID"], "rendezvous": slurm_address(environment)}
