"""Files that appear whole or not at all, whatever kills the process that writes them."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def sibling(path: Path) -> Path:
    """A hidden, unused name in the directory of `path`: a rename from it to `path` stays within one file system.

    `tempfile` is not used because its files and directories are private to the user, and a cache may be shared.
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


@contextlib.contextmanager
def atomic_write(*paths: Path) -> Iterator[tuple[BinaryIO, ...]]:
    """Opens one temporary file beside each path; on a clean exit syncs all of them and renames them in the order given.

    On an exception nothing is renamed and the temporaries are removed; SIGKILL may leave them (hidden names), never a partial `path`.

    Raises:
      OSError: full disk, no permission and the like; `filename` is always set.
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
        if error.filename is None:  # write() knows a descriptor only
            raise OSError(error.errno, error.strerror or str(error), str(paths[0])) from error
        raise
    finally:
        for temporary in temporaries:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
