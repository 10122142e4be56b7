"""JAX's persistent compilation cache in a directory whose every entry carries a SHA-256, which is
compared before JAX sees the entry.

JAX alone has no digest: many flipped bits decompress, and then the run trains to other weights or
dies. JAX reads and writes its cache through `etils.epath`, for which anybody may register a kind of
path; the one of this file adds the digest when an entry is written, which is atomic, and compares
it when the entry is read. So no other process's writes need care, and a start reads no entry that
it does not use.

An entry that fails is deleted, named in the log and compiled again; so is one without a digest. The
digest covers the entry's name, so that entries under each other's names fail, too. It is not a
signature: whoever may write to the directory may run code here, as with JAX alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import jax
from etils import epath

from mesh_lm.distributed.prefix import log_prefix
from mesh_lm.errors import ConfigError

_SCHEME = "mesh-lm-verified://"
_ENTRY = "-cache"
"""Ending of the names of JAX's entries. Its other files are locks and times of use, which decide
nothing but what is evicted."""
_DIGEST = hashlib.sha256().digest_size
"""Bytes at the end of an entry's file."""


def use(directory: str) -> None:
    """Makes JAX keep its compiled programs in `directory`.

    Must run before the first compilation. Raises ConfigError for an address.
    """
    if "://" in directory:
        raise ConfigError(
            f"launch.compile_cache={directory} must be a directory; mount a bucket as one "
            "(gcsfuse), or leave it empty: off"
        )
    # A directory of its own: entries that JAX alone has written, or will read, have no digest.
    path = Path(directory).expanduser().absolute() / "verified"
    jax.config.update("jax_compilation_cache_dir", f"{_SCHEME}{path}")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    # XLA would keep autotuning results beside it in files of its own, which nothing verifies; the
    # program that is kept has them in it.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


@dataclasses.dataclass
class _Damage:
    """A count that all paths of a cache share."""

    n_entries: int = 0


@epath.register_path_cls(_SCHEME)
class VerifiedPath(os.PathLike[str]):
    """A path with what JAX calls: that of the cache, or of a file in it."""

    def __init__(self, path: str, damage: _Damage | None = None) -> None:
        self._path = Path(path.removeprefix(_SCHEME))
        self._damage = damage or _Damage()
        self._content: bytes | None = None

    def __fspath__(self) -> str:
        return str(self._path)

    def __str__(self) -> str:
        return str(self._path)

    def __truediv__(self, name: str) -> VerifiedPath:
        return self.joinpath(name)

    def joinpath(self, *names: str) -> VerifiedPath:
        """See `pathlib.Path.joinpath`."""
        return VerifiedPath(str(self._path.joinpath(*names)), self._damage)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self._path.name

    def exists(self) -> bool:
        """Whether the file is there and, if it is an entry, intact.

        One that is not is deleted, and counted and named in the log.
        """
        try:
            self._content = self._path.read_bytes() if self._path.is_file() else None
        except FileNotFoundError:
            self._content = None
        if self._content is None or not self.name.endswith(_ENTRY):
            return self._path.exists()

        content = self._content[:-_DIGEST]
        digest = self._content[-_DIGEST:]
        if digest == self._digest(content):
            self._content = content
            return True
        self._content = None
        self._discard()
        return False

    def _discard(self) -> None:
        """Deletes a damaged entry, and logs it."""
        self._damage.n_entries += 1
        # A process that has compiled it again may have replaced it just now: that one is lost.
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            print(
                f"{log_prefix()}warning: compile cache: {self.name} in {self._path.parent} is not "
                "as it was written (SHA-256); it is deleted and compiled again "
                f"({self._damage.n_entries} so far)",
                flush=True,
            )

    def read_bytes(self) -> bytes:
        """Returns the verified content. Raises FileNotFoundError if there is none."""
        if self._content is None and not self.exists():
            raise FileNotFoundError(str(self))
        return self._content or b""

    def write_bytes(self, content: bytes) -> int:
        """Writes the file atomically, an entry with its digest.

        A crash of the host may damage it, which the next reader sees.
        """
        temporary = self._path.with_name(f".{self.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                if self.name.endswith(_ENTRY):
                    file.write(self._digest(content))
            os.replace(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)
        return len(content)

    def _digest(self, content: bytes) -> bytes:
        digest = hashlib.sha256(self.name.encode() + b"\0")
        digest.update(content)
        return digest.digest()

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """See `pathlib.Path.mkdir`."""
        self._path.mkdir(mode, parents, exist_ok)

    def glob(self, pattern: str) -> Iterator[VerifiedPath]:
        """See `pathlib.Path.glob`."""
        return (VerifiedPath(str(path), self._damage) for path in self._path.glob(pattern))

    def stat(self) -> _Stat:
        """Returns the file's size."""
        return _Stat(self._path.stat().st_size)

    def unlink(self, missing_ok: bool = False) -> None:
        """See `pathlib.Path.unlink`."""
        self._path.unlink(missing_ok)


@dataclasses.dataclass(frozen=True)
class _Stat:
    """A part of `etils.epath.StatResult`."""

    length: int
