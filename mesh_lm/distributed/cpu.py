"""Threads of XLA's CPU backend, enough for a process that has several CPU devices."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

import jax

THREADS = 8
"""Threads of each device."""
_VARIABLE = "PJRT_NPROC"
_FLAG = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def set_threads(processes: int, environment: MutableMapping[str, str] = os.environ) -> None:
    """Gives XLA's CPU backend `THREADS` threads a device if collectives will run on CPUs.

    A choice by PJRT_NPROC is kept. Must run before JAX first uses a device; later it has no effect.

    A collective blocks its thread until all devices have come to it, and a device starts
    independent collectives side by side, each on another thread. XLA makes one thread a device (or
    a core, if there are more): as soon as a device waits in two collectives at once, another device
    has no thread left to come to them, and XLA ends the process 40 s later ("Expected 8 threads to
    join the rendezvous").

    processes: of the run. With one device in all there are no collectives, and the number of
    threads stays that of the cores.
    """
    devices = local_devices(environment)
    if processes * devices > 1:
        n_threads = max(THREADS * devices, os.cpu_count() or 1)
        environment.setdefault(_VARIABLE, str(n_threads))


def local_devices(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the number of CPU devices that JAX will make in this process."""
    configured: int = jax.config.values["jax_num_cpu_devices"]
    flag = _FLAG.search(environment.get("XLA_FLAGS", ""))
    if configured > 0:
        return configured
    return int(flag[1]) if flag else 1
