"""Orbax and TensorStore without their logs, and their errors on one line."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys

_BEGINNING, _END = 100, 200
"""Characters that are kept of both ends of a long reason: it begins with the names of arrays and
files, and often ends with the cause."""


@functools.cache
def quiet() -> None:
    """Silences the hundreds of lines that Orbax and TensorStore log for a failed save or restore;
    the manager prints one.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    default_hook = sys.unraisablehook

    def hook(error: sys.UnraisableHookArgs) -> None:
        # a write that ends after the first one has failed
        late = str(error.exc_value) == "Event loop is closed"
        pending = "orbax" in getattr(
            getattr(error.object, "cr_code", None), "co_filename", ""
        )  # a read that is pending when the first one fails
        if not (late or pending):
            default_hook(error)

    sys.unraisablehook = hook


def reason(error: Exception) -> str:
    """Returns why a save has failed, on one line: of TensorStore's long messages the errno, with
    its words.
    """
    text = " ".join(re.sub(r"\[source locations='[^']*'\]", "", str(error)).split()) or repr(error)
    if not isinstance(error, OSError) and (
        found := re.search(r"\[(?:os_error_code='|OS error )(\d+)", text)
    ):
        return f"[Errno {found[1]}] {os.strerror(int(found[1]))}"
    return text if len(text) <= _BEGINNING + _END else f"{text[:_BEGINNING]} ... {text[-_END:]}"
