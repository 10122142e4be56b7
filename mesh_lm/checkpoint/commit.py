"""Gives a save its step's name as soon as it is complete, if this run still holds the output's
lease.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from mesh_lm.checkpoint.lease import Lease

_POLL = 0.1
"""Seconds between looks at whether Orbax has completed the save, which it shows by a rename before
its last barrier."""
_TRIES = 5
"""Attempts to read the lease before a commit."""
_PAUSE = 1.0
"""Seconds between two attempts."""


class Commit:
    """The commit of one save, in a thread of process 0; the other processes do nothing."""

    def __init__(self, saving_directory: Path, step_directory: Path, lease: Lease | None) -> None:
        """Starts the thread.

        Args:
          saving_directory: the directory under whose name Orbax completes the save.
          step_directory: the step's directory, which no save may replace.
        """
        self._saving_directory = saving_directory
        self._step_directory = step_directory
        self._finished = threading.Event()
        self.error: Exception | None = None
        self._thread: threading.Thread | None = None
        if lease:
            self._thread = threading.Thread(
                target=self._run, args=(lease,), name="commit", daemon=True
            )
            self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether process 0 has yet to commit.

        Always False on the others, which may see the directory late.
        """
        return self._thread is not None and not os.path.isdir(self._step_directory)

    def finish(self) -> None:
        """Waits for the commit. Call it after Orbax has completed the save, or has failed to."""
        self._finished.set()
        if self._thread:
            self._thread.join()

    def _run(self, lease: Lease) -> None:
        try:
            # os.path.isdir is False where Path.is_dir would raise, as on a network file system that
            # does not answer for a moment.
            while not os.path.isdir(self._saving_directory):
                # Looks once more after `finish`: Orbax may have completed the save just before it.
                if self._finished.wait(_POLL) and not os.path.isdir(self._saving_directory):
                    return
            _require(lease)
            os.rename(self._saving_directory, self._step_directory)
        except Exception as error:
            self.error = error


def _require(lease: Lease) -> None:
    """Reads the lease, and raises ReplacedError if another run holds it.

    It tries again after OSError: a disk that fails for a moment does not cost a save that is
    complete.
    """
    for _ in range(_TRIES - 1):
        try:
            lease.require()
            return
        except OSError:
            time.sleep(_PAUSE)
    lease.require()
