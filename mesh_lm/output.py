"""Text that a process prints, and names of files, in any locale."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path


def accept_any_text() -> None:
    """Lets stdout and stderr escape characters that the locale's encoding lacks.

    Otherwise they raise, and a line must not end a run.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def is_utf_8(path: Path) -> bool:
    """Whether a path has the same bytes for Python, which encodes it as the locale says, and for
    TensorStore, which takes UTF-8.
    """
    try:
        return os.fsencode(path) == str(path).encode()
    except UnicodeEncodeError:
        return False
