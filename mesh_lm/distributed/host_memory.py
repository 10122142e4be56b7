"""The memory of this process's host, and the part of it that XLA may pin for its GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""The environment variable with the memory, in GB, that a process of XLA pins at most."""
DEFAULT_LIMIT = 64
"""XLA's limit without it."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GB = 10**9


def size(cgroup_limit: Path = _CGROUP_LIMIT) -> int:
    """Returns the bytes of memory that the processes on this host, or in this container, have."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        text = cgroup_limit.read_text(encoding="utf-8").strip()
    except OSError:
        return total
    return min(total, int(text)) if text.isdecimal() else total


def raise_limit(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets XLA pin all of the host's memory, unless the user has set a limit.

    Call it before JAX first uses a device; later it has no effect.
    """
    environment.setdefault(LIMIT, str(-(-size() // _GB)))


def limit(environment: Mapping[str, str] = os.environ) -> float:
    """Returns the bytes that XLA may pin in this process."""
    text = environment.get(LIMIT, "")
    return (float(text) if text.isdecimal() else DEFAULT_LIMIT) * _GB
