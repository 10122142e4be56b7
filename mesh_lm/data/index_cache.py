"""Arrays that take long to compute, kept on disk and memory-mapped."""

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
except ImportError:  # not on Windows; there, processes that start together all compute
    fcntl = None

Arrays = dict[str, np.ndarray]


class IndexCache:
    """`<data.cache>/indices`: one directory of .npy files for each key.

    A directory appears whole or not at all. Processes that want the same key at once wait for the first, which a lock file tells them
    where the file system has locks; where it has none they all compute, and the first to finish wins.
    """

    def __init__(self, cache: str, progress: Callable[[str], None] = lambda message: None) -> None:
        """progress: receives a line of text before each computation of `slow` items or more."""
        self._directory, self._progress = Path(cache).expanduser() / "indices", progress

    def get(self, kind: str, key: dict[str, Any], compute: Callable[[], Arrays], *, size: int = 0, slow: int = 10**7) -> Arrays:
        """The arrays that `compute` makes, read-only; `key` (JSON) is everything that determines them.

        Raises:
          ConfigError: the cache is full, not writable, or holds a damaged file.
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
            raise ConfigError(f"{directory} is damaged ({error}); remove it, and it will be computed again") from error
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
            raise  # else another process was faster, with the same contents
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time, and given back by the system when it dies; nothing where the file system has no locks."""
    if fcntl is None:
        yield
        return
    with open(path, "ab") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
        path.unlink(missing_ok=True)
