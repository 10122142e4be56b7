"""Orbax and TensorStore without their logs."""

from __future__ import annotations

import functools
import logging
import sys


@functools.cache
def quiet() -> None:
    """Silences the hundreds of lines that Orbax and TensorStore log for a failed save or restore; the manager prints one."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    default_hook = sys.unraisablehook

    def hook(error: sys.UnraisableHookArgs) -> None:
        late = str(error.exc_value) == "Event loop is closed"  # a write that ends after the first one has failed
        pending = "orbax" in getattr(
            getattr(error.object, "cr_code", None), "co_filename", ""
        )  # a read that is pending when the first one fails
        if not (late or pending):
            default_hook(error)

    sys.unraisablehook = hook
