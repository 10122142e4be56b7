"""Where the text comes from: its files, their digest, their documents, and which of them are held out."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from mesh_lm.config import ConfigError

_HELDOUT = 20
_STDLIB_SKIPPED = frozenset({"test", "tests", "idle_test", "encodings", "lib2to3", "site-packages", "dist-packages"})
_DIGEST_CONTENTS = 256 * 2**20


@dataclasses.dataclass(frozen=True)
class Document:
    """One text and the split it belongs to."""

    text: str
    heldout: bool


@dataclasses.dataclass(frozen=True)
class Source:
    """The files of one corpus."""

    name: str
    """Safe as part of a file name."""
    kind: Literal["directory", "jsonl", "txt"]
    root: Path
    files: tuple[str, ...]
    """Posix paths relative to root, sorted."""
    size: int
    """Bytes in all files."""

    def digest(self) -> str:
        """SHA-256 (hex) of the kind, the file names and what is in them.

        Contents are read up to 256 MiB in all (below a second), because modification times differ between machines and installations that
        hold the same text; above that, size and modification time stand for them.
        """
        digest = hashlib.sha256(self.kind.encode())
        for name in self.files:
            try:
                if self.size <= _DIGEST_CONTENTS:
                    mark = hashlib.sha256((self.root / name).read_bytes()).hexdigest()
                else:
                    stat = (self.root / name).stat()
                    mark = f"{stat.st_size} {stat.st_mtime_ns}"
            except OSError as error:
                mark = f"unreadable: {error.errno}"
            digest.update(f"\0{name}\0{mark}".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """All documents that are not empty, in order, read anew at each call.

        Raises:
          ConfigError: a .txt or .jsonl that cannot be read, a line of a .jsonl without a "text"; the text names the file and line.
        """
        match self.kind:
            case "directory":
                for name in self.files:
                    if text := _text(self.root / name):
                        yield Document(text, is_heldout(name))
            case "jsonl":
                yield from _jsonl(self.root / self.files[0])
            case "txt":
                yield from _txt(self.root / self.files[0])


def find(path: str) -> Source:
    """The source that `data.path` names.

    `stdlib` is every .py file of the running Python's standard library, without its tests, encodings, lib2to3 and installed packages. A
    directory gives every file below it that is valid UTF-8, whatever its name, save hidden files and directories (names with a leading
    dot); others are skipped in silence. A .jsonl has one object with a string "text" per line. A .txt is one document, read whole: text
    that does not fit into memory should be a .jsonl or a directory.

    Raises:
      ConfigError: no such path, another kind of file, no files.
    """
    if path == "stdlib":
        return _directory("stdlib", Path(sysconfig.get_paths()["stdlib"]), suffix=".py", skip=_STDLIB_SKIPPED)
    found = Path(path).expanduser()
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", found.resolve().stem) or "corpus"
    if found.is_dir():
        return _directory(name, found)
    kinds = "a .txt, a .jsonl, a directory of text files, or `stdlib`"
    if not found.is_file():
        raise ConfigError(f"data.path={path}: no such file or directory; give {kinds}")
    size = found.stat().st_size
    if size == 0:
        raise ConfigError(f"data.path={path} is empty; give {kinds}")
    match found.suffix:
        case ".jsonl":
            return Source(name, "jsonl", found.parent, (found.name,), size)
        case ".txt":
            return Source(name, "txt", found.parent, (found.name,), size)
        case suffix:
            raise ConfigError(f"data.path={path}: files of type {suffix or '(none)'} are not read; give {kinds}")


def is_heldout(key: str) -> bool:
    """One key in 20, by its SHA-256: a document keeps its split when others are added or removed."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest(), "big") % _HELDOUT == 0


def _directory(name: str, root: Path, suffix: str = "", skip: frozenset[str] = frozenset()) -> Source:
    files, size = [], 0
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skip and not f.startswith(".")]
        for path in (Path(folder, n) for n in names if n.endswith(suffix) and not n.startswith(".")):
            if path.is_file():  # neither a pipe nor a dangling link
                files.append(path.relative_to(root).as_posix())
                size += path.stat().st_size
    if not size:
        raise ConfigError(f"data.path={name if suffix else root}: {root} has no files, or only hidden or empty ones; give one with text")
    return Source(name, "directory", root, tuple(sorted(files)), size)


def _text(path: Path) -> str | None:
    """The file as text, line ends untouched; None where it cannot be read or is not UTF-8."""
    try:
        with open(path, "rb") as file:
            start = file.read(4096)
            codecs.getincrementaldecoder("utf-8")().decode(start)  # spares reading a large binary file whole
            return (start + file.read()).decode()
    except (OSError, UnicodeDecodeError):
        return None


def _jsonl(path: Path) -> Iterator[Document]:
    """The documents of a .jsonl; blank lines are skipped, and lines are numbered from 1, for the held-out split as for messages."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line.decode())["text"]
                text.encode()  # JSON can spell lone surrogates, which are not text
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigError(
                    f'{path}, line {number}: expected a JSON object with a string "text", got {line[:60]!r} ({type(error).__name__}); '
                    "correct or remove the line"
                ) from error
            if text:
                yield Document(text, is_heldout(str(number)))


def _txt(path: Path) -> Iterator[Document]:
    """The first 19/20 of the file and, from the next line on, the rest, which is held out."""
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); convert it first") from error
    cut = text.find("\n", len(text) - len(text) // _HELDOUT - 1) + 1
    if cut in (0, len(text)):  # no line ends in the last twentieth but at its end
        cut = text.rfind("\n", 0, len(text) - 1) + 1
    if cut == 0:
        raise ConfigError(f"{path} has a single line, so that no part can be held out; give text of at least two lines")
    yield Document(text[:cut], heldout=False)
    yield Document(text[cut:], heldout=True)
