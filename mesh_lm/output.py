"""What a process prints, in any locale."""

from __future__ import annotations

import io
import sys


def accept_any_text() -> None:
    """Lets stdout and stderr escape characters that the locale's encoding lacks, instead of raising: a line must not end a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
