"""Atomic writes: a file appears complete or not at all, even if the writing process is killed."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO


def sibling(path: Path) -> Path:
    """Returns a hidden, unused name in the directory of `path`, so that renaming it to `path` stays
    within one file system.

    `tempfile` is not used because its files are private to the user, and a cache may be shared.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Writes files of these names and contents by `atomic_write`. Raises OSError."""
    with atomic_write(*(directory / name for name in files)) as opened:
        for file, content in zip(opened, files.values(), strict=True):
            file.write(content)


@contextlib.contextmanager
def atomic_write(*paths: Path) -> Iterator[tuple[BinaryIO, ...]]:
    """Opens one temporary file beside each path; on a clean exit syncs all of them and renames them
    in this order.

    On an exception nothing is renamed and the temporary files are removed. SIGKILL may leave
    temporary files, but never a partial `path`.

    Raises:
      OSError: the disk is full or not writable; `filename` is always set.
    """
    temporaries = [sibling(path) for path in paths]
    try:
        with contextlib.ExitStack() as stack:
            files = tuple(stack.enter_context(open(temporary, "xb")) for temporary in temporaries)
            yield files
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in zip(temporaries, paths, strict=True):
            os.replace(temporary, path)
    except OSError as error:
        if error.filename is None:  # write() only knows a descriptor
            raise OSError(error.errno, error.strerror or str(error), str(paths[0])) from error
        raise
    finally:
        for temporary in temporaries:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
