"""SHA256SUMS: the digests of a directory's files, in the form that `sha256sum` writes and checks.

A .safetensors file has no digest: a flipped bit is another weight. An export writes this list, and
an import compares. For a directory of another origin, `sha256sum * > SHA256SUMS` makes one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from mesh_lm.errors import ConfigError

NAME = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?([^/\0]+)")


def write(directory: Path) -> None:
    """Lists all files of a directory. Raises OSError."""
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != NAME)
    (directory / NAME).write_text(
        "".join(f"{file_digest(path)}  {path.name}\n" for path in files), encoding="utf-8"
    )


def problems(directory: Path, names: Iterable[str]) -> list[str]:
    """Returns a line for each of these files that is listed, but missing or with another digest.

    Without a list, there are none. Raises OSError.
    """
    try:
        lines = (directory / NAME).read_text(errors="replace", encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    digests = {}
    for line in lines:
        match = _LINE.fullmatch(line)
        if match:
            digest, name = match.groups()
            digests[name] = digest
    damage = []
    for name in sorted({*names} & digests.keys()):
        if not (directory / name).is_file():
            damage.append(f"{name} is missing, but {NAME} lists it")
        elif file_digest(directory / name) != digests[name]:
            damage.append(
                f"{name} is not as {NAME} has it: one of them is damaged; fetch it again, or "
                f"remove {NAME} to read without it"
            )
    return damage


def require(directory: Path, *names: str) -> None:
    """Raises ConfigError if `problems` returns any."""
    try:
        damage = problems(directory, names)
    except OSError as error:
        path = error.filename or directory
        raise ConfigError(
            f"cannot read {path} to compare its digest with {NAME}: {error.strerror}"
        ) from error
    if damage:
        raise ConfigError(
            "\n  - ".join([f"{directory} is damaged or incomplete, as {NAME} shows", *damage])
        )


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file, hexadecimal. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
