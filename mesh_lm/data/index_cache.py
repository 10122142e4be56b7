"""An on-disk cache of arrays that take long to compute; they are memory-mapped when read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mesh_lm.data.atomic import atomic_write, sibling
from mesh_lm.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows has no fcntl: processes that start together each compute
    fcntl = None

Arrays = dict[str, np.ndarray]


class IndexCache:
    """The cache `<data.cache>/indices`: one directory of .npy files per key.

    Directories are renamed into place once complete. Processes that want the same key wait on a lock file for the first one; on a file
    system without locks all of them compute, and the first to finish wins.
    """

    def __init__(self, cache: str, progress: Callable[[str], None] = lambda message: None) -> None:
        """progress: called with a line of text before a computation of at least `slow` items."""
        self._directory, self._progress = Path(cache).expanduser() / "indices", progress

    def get(self, kind: str, key: dict[str, Any], compute: Callable[[], Arrays], *, size: int = 0, slow: int = 10**7) -> Arrays:
        """Returns the arrays of `compute`, read-only; `key` (JSON) must hold everything that determines them.

        Raises:
          ConfigError: the cache is full or not writable, or holds a damaged file.
        """
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        directory = self._directory / f"{kind}-{name}"
        try:
            if not directory.exists():
                self._directory.mkdir(parents=True, exist_ok=True)
                with _lock(self._directory / f".{kind}-{name}.lock"):
                    if not directory.exists():
                        if size >= slow:
                            self._progress(f"computing the {kind} index of {size / 1e6:,.0f} M items; it is kept in {self._directory}")
                        _store(directory, compute())
            return {path.stem: np.asarray(np.load(path, mmap_mode="r")) for path in directory.glob("*.npy")}
        except ValueError as error:
            raise ConfigError(f"{directory} is damaged ({error}); remove it to compute it again") from error
        except OSError as error:
            raise ConfigError(f"data.cache: cannot keep an index in {directory}: {error.strerror} ({error.filename})") from error


def _store(directory: Path, arrays: Arrays) -> None:
    unfinished = sibling(directory)
    unfinished.mkdir()
    try:
        for name, array in arrays.items():
            with atomic_write(unfinished / f"{name}.npy") as (file,):
                np.save(file, array)
        os.rename(unfinished, directory)
    except OSError:
        if not directory.exists():
            raise  # otherwise another process was faster, with the same contents
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Holds an exclusive lock, which the system releases if the process dies; does nothing on file systems without locks."""
    if fcntl is None:
        yield
        return
    with open(path, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)
