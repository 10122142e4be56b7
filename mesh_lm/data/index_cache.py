"""An on-disk cache of arrays that take long to compute; they are verified when they are opened, and
memory-mapped when read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mesh_lm import strict_json
from mesh_lm.data.atomic import atomic_write, sibling
from mesh_lm.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows has no fcntl: processes that start together each compute
    fcntl = None

_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a directory that is read-only, or of another user."""
Arrays = dict[str, np.ndarray]
_DIGESTS = "digests.json"
"""The CRC-32 of each file of a directory, from the names of both on, so that one under another's
name fails, too."""


class IndexCache:
    """The cache `<data.cache>/indices`: one directory of .npy files and their digests per key.

    Directories are renamed into place once complete. One that is not as it was written is named in
    the log and computed again. So is one without digests, as older versions wrote them, unless the
    cache cannot be written: then it is read unverified. Processes that want the same key wait on a
    lock file for the first one; on a file system without locks all of them compute, and the first
    to finish wins.
    """

    def __init__(self, cache: str, progress: Callable[[str], None] = lambda message: None) -> None:
        """progress: called with a line of text before a computation of at least `slow` items."""
        self._directory = Path(cache).expanduser() / "indices"
        self._progress = progress
        self._n_damaged = 0

    def get(
        self,
        kind: str,
        key: dict[str, Any],
        compute: Callable[[], Arrays],
        *,
        size: int = 0,
        slow: int = 10**7,
    ) -> Arrays:
        """Returns the arrays of `compute`, read-only; `key` (JSON) must hold everything that
        determines them.

        Raises:
          ConfigError: the cache is full or not writable, or its disk does not keep what is
            written.
        """
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        directory = self._directory / f"{kind}-{name}"
        try:
            with contextlib.suppress(_DamagedError):
                return _verified(directory)
            self._directory.mkdir(parents=True, exist_ok=True)
            with _lock(self._directory / f".{kind}-{name}.lock"):
                try:
                    return _verified(directory)  # of a process that was faster
                except _DamagedError as error:
                    self._remove(directory, error)
                if size >= slow:
                    self._progress(
                        f"computing the {kind} index of {size / 1e6:,.0f} M items; it is kept in "
                        f"{self._directory}"
                    )
                _store(directory, compute())
                return _verified(directory)
        except _DamagedError as error:
            raise ConfigError(
                f"data.cache: {directory} was written just now, but {error}; its disk is failing: "
                "use another one"
            ) from error
        except OSError as error:
            if error.errno in _NOT_OURS:
                arrays = _unverified(directory)
                if arrays:
                    self._progress(
                        f"{directory} has no digests (older version), and cannot be written "
                        f"({error.strerror}): it is read unverified"
                    )
                    return arrays
            raise ConfigError(
                f"data.cache: cannot keep an index in {directory}: {error.strerror} "
                f"({error.filename})"
            ) from error

    def _remove(self, directory: Path, error: _DamagedError) -> None:
        """Removes a damaged index, if there is one, and says so.

        Processes that have mapped it keep its contents.
        """
        removed = sibling(directory)
        try:
            os.rename(directory, removed)
        except FileNotFoundError:
            return
        shutil.rmtree(removed, ignore_errors=True)
        self._n_damaged += 1
        from mesh_lm.distributed.prefix import log_prefix  # imports JAX

        damage = f"is not as it was written ({error})"
        if isinstance(error, _NoDigestsError):
            damage = "has no digests (older version)"
        print(
            f"{log_prefix()}warning: index cache: {directory.name} in {directory.parent} {damage}; "
            f"it is computed again ({self._n_damaged} so far)",
            flush=True,
        )


class _DamagedError(ValueError):
    """An index is not as it was written, or not there."""


class _NoDigestsError(_DamagedError):
    """An index is of an older version, or not there."""


def _verified(directory: Path) -> Arrays:
    """Returns the arrays of an index, mapped, after comparing them with their digests.

    Raises _DamagedError and OSError.
    """
    try:
        sums = strict_json.read(directory / _DIGESTS)
        for path in directory.glob("*.npy"):
            if sums.pop(path.name, None) != _sum(path, directory.name):
                raise _DamagedError(f"CRC-32 of {path.name}")
        if sums:
            raise _DamagedError(f"{min(sums)} is missing")
        return _mapped(directory)
    except (FileNotFoundError, NotADirectoryError):
        raise _NoDigestsError(f"{_DIGESTS} is missing") from None
    except _DamagedError:
        raise
    except ValueError as error:
        raise _DamagedError(f"{_DIGESTS}: {error}") from None


def _unverified(directory: Path) -> Arrays:
    """Returns the arrays of an index that has no digests, mapped; none if it has them, is not there
    or cannot be read.
    """
    if (directory / _DIGESTS).exists():
        return {}
    try:
        return _mapped(directory)
    except (OSError, ValueError, EOFError):
        return {}


def _mapped(directory: Path) -> Arrays:
    paths = directory.glob("*.npy")
    return {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in paths}


def _sum(path: Path, index: str) -> int:
    """Returns the CRC-32 of an index's name, a file's name and its contents."""
    names_sum = zlib.crc32(f"{index}/{path.name}".encode())
    if path.stat().st_size == 0:  # mmap refuses empty files
        return names_sum
    return zlib.crc32(np.memmap(path, np.uint8, "r").data, names_sum)


def _store(directory: Path, arrays: Arrays) -> None:
    unfinished = sibling(directory)
    unfinished.mkdir()
    try:
        for name, array in arrays.items():
            with atomic_write(unfinished / f"{name}.npy") as (file,):
                np.save(file, array)
        # The digests are of what the file system returns, before the directory has its name.
        sums = {path.name: _sum(path, directory.name) for path in sorted(unfinished.glob("*.npy"))}
        with atomic_write(unfinished / _DIGESTS) as (file,):
            file.write(json.dumps(sums).encode())
        os.rename(unfinished, directory)
    except OSError:
        if not directory.exists():
            raise  # otherwise another process was faster, with the same contents
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock, which the system releases if the process dies.

    Does nothing on file systems without locks.
    """
    if fcntl is None:
        yield
        return
    with open(path, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)
