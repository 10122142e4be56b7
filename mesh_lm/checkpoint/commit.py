"""Gives a save its step's name as soon as it is complete, if this run still holds the output's
lease.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from mesh_lm.checkpoint.lease import Lease

_LOOK = 0.1
"""Seconds between looks at whether Orbax has completed the save, which it shows by a rename before
its last barrier."""
_TRIES, _PAUSE = 5, 1.0
"""How often the lease is read before a commit if that fails, and seconds between two times."""


class Commit:
    """The commit of one save, in a thread of process 0; the other processes do nothing."""

    def __init__(self, saved: Path, named: Path, lease: Lease | None) -> None:
        """saved: the directory under whose name Orbax completes the save. named: the step's
        directory, which no save may replace.
        """
        self._saved, self._named, self._lease = saved, named, lease
        self._finished = threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="commit", daemon=True)
        if lease:
            self._thread.start()

    @property
    def pending(self) -> bool:
        """Whether process 0 has yet to commit; always False on the others, which may see the
        directory late.
        """
        return self._lease is not None and not os.path.isdir(self._named)

    def finish(self) -> None:
        """Waits for the commit. Call it after Orbax has completed the save, or has failed to."""
        self._finished.set()
        if self._lease:
            self._thread.join()

    def _run(self) -> None:
        assert self._lease
        try:
            # os.path.isdir is False where Path.is_dir would raise, as on a network file system that
            # does not answer for a moment.
            while not os.path.isdir(self._saved):
                if self._finished.wait(_LOOK) and not os.path.isdir(self._saved):
                    return
            self._require(self._lease)
            os.rename(self._saved, self._named)
        except Exception as error:
            self.error = error

    def _require(self, lease: Lease) -> None:
        """As `Lease.require`, but a disk that fails for a moment does not cost a save that is
        complete.
        """
        for _ in range(_TRIES - 1):
            try:
                return lease.require()
            except OSError:
                time.sleep(_PAUSE)
        lease.require()
