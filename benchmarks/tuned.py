"""The table of tiles that the GPU suite's part `autotune` measured, in place of the package's
own."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ATTENTION_TUNING"
"""Environment variable with the path of a tuning.json."""


def use_tuned() -> None:
    """Makes this process take its tiles from the table that the environment names, if it names
    one."""
    if path := os.environ.get(VARIABLE):
        from pallas_kernels.attention import tuning

        tuning.PATH = Path(path)
        tuning.entries.cache_clear()
