"""Whether the hosts have the memory that optimizer.offload needs."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import NamedTuple

import jax

from mesh_lm import distributed
from mesh_lm.distributed import host_memory
from mesh_lm.errors import ConfigError, listed
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import disk_form, parts
from mesh_lm.state.placement import HOST

_GIB = 2**30


class Share(NamedTuple):
    """What one process needs of its host."""

    host: str
    host_bytes: int
    """Memory of the host."""
    limit: float | None
    """Bytes that XLA may pin in the process; None: any number, on CPUs."""
    needed: int
    """Bytes for what is offloaded, and for a copy of it while a checkpoint is saved."""


def require_host_memory(layout: ModelLayout, optimizer: Optimizer) -> None:
    """Raises ConfigError on all processes, which must all call it, if a device has no pinned host
    memory, or a host has less than its processes need together.
    """
    if not optimizer.config.offload:
        return
    setting = f"optimizer.offload={','.join(optimizer.config.offload)}"
    devices = layout.shard.mesh.local_devices
    kinds = [memory.kind for memory in devices[0].addressable_memories()]
    if HOST not in kinds:
        raise ConfigError(
            f"{setting}: {devices[0].device_kind} has no {HOST} memory with jax {jax.__version__} "
            f"(it has {', '.join(kinds)}); leave optimizer.offload empty"
        )
    declared = parts(layout, optimizer).values()
    n_bytes = sum(part.nbytes for part in declared if part.on_host)
    n_bytes += disk_form.host_bytes(layout, optimizer)
    is_gpu = devices[0].platform == "gpu"
    share = Share(
        socket.gethostname(),
        host_memory.size(),
        host_memory.limit() if is_gpu else None,
        n_bytes * len(devices),
    )
    shares = [Share(*values) for values in distributed.gather_from_all(list(share))]
    problems = host_problems(setting, shares)
    if problems:
        raise ConfigError(listed("the hosts lack memory for what this run offloads", problems))


def host_problems(setting: str, shares: Sequence[Share]) -> list[str]:
    """Returns a sentence for each host that lacks memory, and for each limit of XLA that is too
    low.
    """
    by_host: dict[str, list[Share]] = {}
    for share in shares:
        by_host.setdefault(share.host, []).append(share)
    problems = []
    for host, on_host in by_host.items():
        needed = sum(share.needed for share in on_host)
        host_bytes = min(share.host_bytes for share in on_host)
        if needed > host_bytes:
            problems.append(
                f"{setting} needs {needed / _GIB:.1f} GiB of host memory on {host}, with the copy "
                "that a checkpoint is saved from, "
                f"{on_host[0].needed / _GIB:.1f} GiB for each of its {len(on_host)} processes, and "
                f"it has {host_bytes / _GIB:.1f} GiB; offload fewer parts, or use more hosts"
            )
        for share in on_host:
            if share.limit is not None and share.needed > share.limit:
                problems.append(
                    f"{setting} needs {share.needed / _GIB:.1f} GiB of pinned memory in a process "
                    f"on {host}, and XLA pins at most {share.limit / _GIB:.1f} GiB; unset the "
                    f"environment variable {host_memory.LIMIT}, or raise it"
                )
                break
    return problems
