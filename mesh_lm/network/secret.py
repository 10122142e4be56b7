"""The secret of a job: who knows it belongs to the job. It is handed over in an environment
variable or a private file, never in argv.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from mesh_lm.errors import ConfigError
from mesh_lm.network.environment import SECRET, SECRET_FILE

OWN_FILE = "~/.config/mesh_lm/secret"
"""Where hosts look that were not given a secret. The first start makes it, and hosts that share the
home directory share it."""
_SHORTEST = 16
_LONGEST = 4096
_FIX = (
    f"set {SECRET} to the same random text on every host (openssl rand -hex 32), or {SECRET_FILE} "
    "to a file with it"
)


class Secret:
    """A key. It is never printed: `repr` hides it."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def __repr__(self) -> str:
        return "Secret(...)"

    @classmethod
    def new(cls) -> Secret:
        """Returns a random secret, for a job on one host."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def shared(cls, environment: Mapping[str, str] = os.environ) -> Secret:
        """Returns the secret that other hosts have, too.

        It comes from MESH_LM_SECRET, else the file MESH_LM_SECRET_FILE, else `OWN_FILE`, which is
        made if it is absent.

        Raises ConfigError if the file cannot be read or made, is not private, or the secret is
        shorter than 16 characters.
        """
        text = environment.get(SECRET, "")
        if text:
            return cls(_key_bytes(text.strip(), SECRET))
        file_name = environment.get(SECRET_FILE, "")
        if file_name:
            return cls(_read(Path(file_name).expanduser()))

        path = Path(environment.get("HOME") or "~", OWN_FILE.removeprefix("~/")).expanduser()
        try:
            if not path.exists():
                _make(path)
        except OSError as error:
            raise ConfigError(
                f"several hosts need a shared secret, and {path} cannot be made: {error.strerror}; "
                f"{_FIX}"
            ) from error
        return cls(_read(path))

    def derived(self, *purpose: str) -> Secret:
        """Returns a secret for one purpose, from which this one cannot be computed."""
        return Secret(self.tag(b"derived", *(part.encode() for part in purpose)))

    def tag(self, *parts: bytes) -> bytes:
        """Returns the HMAC-SHA256 of the parts (32 bytes).

        Each part is preceded by its length, so that none can pass for another.
        """
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.digest(self._key, message, hashlib.sha256)

    def text(self) -> str:
        """Returns it as `shared` reads it from MESH_LM_SECRET, for a child process."""
        return self._key.hex()


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            # fstat, because the path may name another file by now.
            status = os.fstat(file.fileno())
            content = file.read(_LONGEST + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the secret in {path}: {error.strerror}; {_FIX}") from error
    is_open_to_others = status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    if is_open_to_others or status.st_uid not in (0, os.getuid()):
        raise ConfigError(
            f"others can read or change the secret in {path}; make it yours alone (chmod 600), and "
            "replace its contents; where that cannot be done, as with a volume of a Kubernetes "
            "secret, set MESH_LM_SECRET instead"
        )
    return _key_bytes(content.decode("utf-8", "replace").strip(), str(path))


def _key_bytes(text: str, source: str) -> bytes:
    """Returns the key that a text spells, in hexadecimal or not. source: its place, for errors."""
    if not _SHORTEST <= len(text) <= _LONGEST:
        raise ConfigError(
            f"the secret in {source} must have {_SHORTEST} to {_LONGEST} characters; make one with "
            "openssl rand -hex 32"
        )
    try:
        return bytes.fromhex(text)
    except ValueError:
        return text.encode()


def _make(path: Path) -> None:
    """Writes a new secret.

    If several hosts do it at once, one of them wins, also on NFS, because a link is made only if
    there is none.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(secrets.token_hex(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
