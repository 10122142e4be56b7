"""Checks of a node's network links and disks, from what Linux reports about them."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from mesh_lm.launch.health.finding import Result

FREE = 100 * 10**6
"""Bytes below which the launcher mentions a disk."""
_SIZE = 4096
_DEAD = {
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.EHOSTDOWN,
    errno.ENODEV,
    errno.ENXIO,
    errno.EROFS,
}
"""Errors of a disk or mount that does not work. Others, such as a missing permission, are mistakes
of the whole run, which reports them."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


class Network:
    """The InfiniBand and RoCE ports of a node. Those that were active at the first check must stay
    so.

    Other network cards are not checked: those that the run does not use may go down, and without
    the others the node is lost anyway.
    """

    def __init__(self, root: Path = Path("/sys/class")) -> None:
        self._root = root
        self._up: set[str] = set()  # ports that were active in any check so far

    def __call__(self) -> Result:
        """Returns failed if a port that was active is not."""
        states = {}
        for path in self._root.glob("infiniband/*/ports/*/state"):
            *_, card, _ports, port, _state = path.parts
            states[f"{card} port {port}"] = _text(path)
        down = [
            f"{name} is {states.get(name, 'gone')}"
            for name in sorted(self._up)
            if states.get(name) != "4: ACTIVE"
        ]
        self._up |= {name for name, state in states.items() if state == "4: ACTIVE"}
        if down:
            return "failed", (
                f"{', '.join(down)}, but was active before: check the cable, the switch and the "
                "driver"
            )
        return "ok", f"{len(self._up)} ports are active"


class Disk:
    """A directory to which the run writes. A full one is unknown: the run's own checkpoints may
    fill it, and only workers remove them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._worked = False  # in any check so far

    def __call__(self) -> Result:
        """Returns failed if the disk or mount does not work, or a small file is read with other
        contents; unknown if it is almost full.
        """
        directory = self._directory.expanduser().absolute()
        try:
            # The run makes the directory; until then its first parent that exists stands for it.
            while not directory.exists() and directory != directory.parent:
                directory = directory.parent
            self._write(directory)
            status = os.statvfs(directory)
        except OSError as error:
            failed = error.errno in _DEAD and (error.errno != errno.EROFS or self._worked)
            fix = "free disk space" if error.errno in _FULL else "repair the disk or the mount"
            return (
                "failed" if failed else "unknown",
                f"{directory} cannot be written: {error.strerror}; {fix}",
            )
        except ValueError as error:
            return "failed", f"{directory}: {error}; replace the disk"
        self._worked = True
        free = status.f_bavail * status.f_frsize
        if free < FREE:
            return "unknown", (
                f"{directory} has {free / 1e6:.0f} MB left, less than {FREE / 1e6:.0f} MB: free "
                "disk space"
            )
        return "ok", f"{directory} can be written, {free / 1e9:.3g} GB are free"

    def _write(self, directory: Path) -> None:
        """Writes a file and reads it back.

        Raises OSError, and ValueError if it has other contents.
        """
        path = directory / f".mesh_lm-health-{secrets.token_hex(8)}"
        content = secrets.token_bytes(_SIZE)
        try:
            with open(path, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    # so that it is read from the disk
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if path.read_bytes() != content:
                raise ValueError("a file that was written has other contents when it is read")
        finally:
            with contextlib.suppress(OSError):
                path.unlink()


def option_value(command: Sequence[str], option: str) -> str:
    """Returns the last value of --option or --config.option in a command line; empty: it has
    none.
    """
    last = ""
    for word, next_word in zip(command, [*command[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if name in (f"--{option}", f"--config.{option}"):
            last = value if equals else next_word
    return last


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return "unreadable"
