"""The log of a run: `<output>/log.txt`. It has the lines that a terminal's bar overwrites, and
those that a batch system discards.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from mesh_lm.errors import ConfigError

_FILE = "log.txt"
_MAX_PENDING_BYTES = 2**20
"""Bytes of lines that wait for a disk that takes none; older ones are dropped."""


class RunLog:
    """The lines that the first process of a run prints. Each start appends to the file.

    Lines that come before `open`, and those that a full disk does not take, are written later: no
    OSError leaves this class, because a log must not end a run.
    """

    def __init__(self, say: Callable[[str], None], *, speaks: bool) -> None:
        """Begins with a line that names the time and the process.

        Args:
          say: prints a line for the terminal.
          speaks: whether this is the first process; the log of others stays empty.
        """
        self._print = say
        self._speaks = speaks
        self._file: int | None = None
        self._pending = b""
        self._failed = False
        time = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        self.write(f"--- {time}, process {os.getpid()} on {socket.gethostname()}\n")

    def open(self, output: Path) -> bool:
        """Appends to log.txt in this directory from this call on, and returns whether an earlier
        start has written to it.

        Call it when no other run writes to this directory.
        """
        if not self._speaks:
            return False
        path = output / _FILE
        continues = False
        try:
            output.mkdir(parents=True, exist_ok=True)
            continues = path.exists()
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            self._report(error)
        self.flush()
        return continues

    def say(self, text: str) -> None:
        """Prints a line and writes it to the log."""
        self._print(text)
        self.write(f"{text}\n")

    def write(self, text: str) -> None:
        """Writes text to the log alone, as `print(..., file=log)` does."""
        if not self._speaks:
            return
        self._pending += text.encode("utf-8", "backslashreplace")
        self._pending = self._pending[-_MAX_PENDING_BYTES:]
        if text.endswith("\n"):
            self.flush()

    def flush(self) -> None:
        """Writes pending lines, as far as the disk takes them."""
        if self._file is None:
            return
        try:
            while self._pending:
                n_written = os.write(self._file, self._pending)
                self._pending = self._pending[n_written:]
            self._failed = False
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError) -> None:
        if not self._failed:
            self._print(
                f"warning: log.txt cannot be written: {error.strerror}; training continues, and "
                "its lines are written later"
            )
        self._failed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Writes pending lines and the error that ended the run, and closes the file."""
        if isinstance(error, ConfigError):
            self.write(f"error: {error}\n")
        elif error is not None and not isinstance(error, SystemExit):
            self.write(f"error: {type(error).__name__}: {error}\n")
        self.flush()
        if self._file is not None:
            try:
                os.close(self._file)
            except OSError as error:  # NFS reports a full disk here
                self._report(error)
        self._file = None
