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
        self._root, self._up = root, set[str]()

    def __call__(self) -> Result:
        """Returns failed if a port that was active is not."""
        states = {
            f"{path.parts[-4]} port {path.parts[-2]}": _text(path)
            for path in self._root.glob("infiniband/*/ports/*/state")
        }
        down = [
            f"{name} is {states.get(name, 'gone')}"
            for name in sorted(self._up)
            if states.get(name) != "4: ACTIVE"
        ]
        self._up |= {name for name, state in states.items() if state == "4: ACTIVE"}
        if down:
            return (
                "failed",
                (
                    f"{', '.join(down)}, but was active before: check the cable, the switch and "
                    "the driver"
                ),
            )
        return "ok", f"{len(self._up)} ports are active"


class Disk:
    """A directory to which the run writes. A full one is unknown: the run's own checkpoints may
    fill it, and only workers remove them.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._worked = directory, False

    def __call__(self) -> Result:
        """Returns failed if the disk or mount does not work, or a small file is read with other
        contents; unknown if it is almost full.
        """
        place = self._directory.expanduser().absolute()
        try:
            while not place.exists() and place != place.parent:
                place = place.parent
            self._write(place)
            about = os.statvfs(place)
        except OSError as error:
            failed = error.errno in _DEAD and (error.errno != errno.EROFS or self._worked)
            fix = "free disk space" if error.errno in _FULL else "repair the disk or the mount"
            return (
                "failed" if failed else "unknown",
                f"{place} cannot be written: {error.strerror}; {fix}",
            )
        except ValueError as error:
            return "failed", f"{place}: {error}; replace the disk"
        self._worked = True
        free = about.f_bavail * about.f_frsize
        if free < FREE:
            return (
                "unknown",
                (
                    f"{place} has {free / 1e6:.0f} MB left, less than {FREE / 1e6:.0f} MB: free "
                    "disk space"
                ),
            )
        return "ok", f"{place} can be written, {free / 1e9:.3g} GB are free"

    def _write(self, place: Path) -> None:
        """Writes a file and reads it back. Raises OSError, and ValueError if it has other
        contents.
        """
        own, data = place / f".mesh_lm-health-{secrets.token_hex(8)}", secrets.token_bytes(_SIZE)
        try:
            with open(own, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                if hasattr(os, "posix_fadvise"):
                    # so that it is read from the disk
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if own.read_bytes() != data:
                raise ValueError("a file that was written has other contents when it is read")
        finally:
            with contextlib.suppress(OSError):
                own.unlink()


def named_in(command: Sequence[str], option: str) -> str:
    """Returns the last value of --option or --config.option in a command line; empty: it has
    none.
    """
    found = ""
    for word, following in zip(command, [*command[1:], ""], strict=True):
        name, given, value = word.partition("=")
        if name in (f"--{option}", f"--config.{option}"):
            found = value if given else following
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return "unreadable"
