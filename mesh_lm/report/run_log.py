"""The log of a run: `<output>/log.txt`, which keeps what a terminal's bar writes over, and what a
batch system throws away.
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

_KEPT = 2**20
"""Bytes of lines that wait for a disk that takes none; older ones are dropped."""


class RunLog:
    """What the first process of a run says. Each start appends to the file.

    Lines from before `open`, and those that a full disk does not take, are kept and written later:
    no OSError leaves this class, because a log must not end a run.
    """

    def __init__(self, say: Callable[[str], None], *, speaks: bool) -> None:
        """Takes the function that prints a line for the terminal. speaks: whether this is the first
        process; others keep nothing.
        """
        self._print, self._speaks = say, speaks
        self._file: int | None = None
        self._waiting = b""
        self._failed = False
        now = datetime.datetime.now().astimezone().isoformat(" ", "seconds")
        self.write(f"--- {now}, process {os.getpid()} on {socket.gethostname()}\n")

    def open(self, output: Path) -> bool:
        """Appends to log.txt in this directory from here on, and returns whether an earlier start
        has written there.

        Call it when no other run writes there.
        """
        if not self._speaks:
            return False
        continues = False
        try:
            output.mkdir(parents=True, exist_ok=True)
            continues = (output / "log.txt").exists()
            self._file = os.open(output / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
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
        if self._speaks:
            self._waiting = (self._waiting + text.encode("utf-8", "backslashreplace"))[-_KEPT:]
            if text.endswith("\n"):
                self.flush()

    def flush(self) -> None:
        """Writes what waits, as far as the disk takes it."""
        if self._file is None:
            return
        try:
            while self._waiting:
                self._waiting = self._waiting[os.write(self._file, self._waiting) :]
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
        """Writes what waits and what ended the run, and closes the file."""
        if error is not None and not isinstance(error, SystemExit):
            self.write(
                f"error: {error}\n"
                if isinstance(error, ConfigError)
                else f"error: {type(error).__name__}: {error}\n"
            )
        self.flush()
        if self._file is not None:
            try:
                os.close(self._file)
            except OSError as error:  # NFS reports a full disk here
                self._report(error)
        self._file = None
