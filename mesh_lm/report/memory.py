"""The peak memory of a run."""

from __future__ import annotations

import resource
import sys
from typing import Literal, NamedTuple

import jax


class Memory(NamedTuple):
    """A high-water mark since the process started."""

    gib: float
    of: Literal["device", "process"]
    """device: allocated on this process's first device; process: resident set in host memory, for
    a backend that does not report its own (CPU)."""


def device_memory_gib() -> Memory:
    """Returns the peak of the first local device if its backend reports one, else of the process
    (getrusage(2)).
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return Memory(stats["peak_bytes_in_use"] / 2**30, "device")
    # ru_maxrss is in bytes on macOS, in KiB on Linux.
    unit = 1 if sys.platform == "darwin" else 1024
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return Memory(max_rss * unit / 2**30, "process")
