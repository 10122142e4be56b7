"""Orbax and TensorStore without their logs, and their errors on one line."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys

_BEGINNING = 100
_END = 200
"""Characters that a long reason keeps at both ends: it begins with the names of arrays and files,
and often ends with the cause."""


@functools.cache
def quiet() -> None:
    """Silences the hundreds of lines that Orbax and TensorStore log for a failed save or restore.

    The manager prints one.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    default_hook = sys.unraisablehook

    def hook(error: sys.UnraisableHookArgs) -> None:
        # A write that ends after the first one has failed.
        is_late_write = str(error.exc_value) == "Event loop is closed"
        # A read that is pending when the first one fails.
        code = getattr(error.object, "cr_code", None)
        is_pending_read = "orbax" in getattr(code, "co_filename", "")
        if not (is_late_write or is_pending_read):
            default_hook(error)

    sys.unraisablehook = hook


def reason(error: Exception) -> str:
    """Returns why a save has failed, on one line.

    TensorStore's long messages become the errno that they contain, with its words.
    """
    text = re.sub(r"\[source locations='[^']*'\]", "", str(error))
    text = " ".join(text.split()) or repr(error)
    if not isinstance(error, OSError):
        errno = re.search(r"\[(?:os_error_code='|OS error )(\d+)", text)
        if errno:
            return f"[Errno {errno[1]}] {os.strerror(int(errno[1]))}"
    if len(text) <= _BEGINNING + _END:
        return text
    return f"{text[:_BEGINNING]} ... {text[-_END:]}"
