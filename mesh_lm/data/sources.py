"""Where the text comes from: its files, their digest, their documents, and which of them are held out."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from mesh_lm.data import formats
from mesh_lm.errors import ConfigError, hub_hint

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
    kind: Literal["directory", "jsonl", "parquet", "txt"]
    root: Path
    files: tuple[str, ...]
    """Posix paths relative to root, sorted."""
    size: int
    """Bytes in all files."""
    field: str
    """Where the text is in a line of a .jsonl or a row of a .parquet."""

    def digest(self) -> str:
        """SHA-256 (hex) of the kind, the file names and what is in them.

        Contents are read up to 256 MiB in all (below a second), because modification times differ between machines and installations that
        hold the same text; above that, size and modification time stand for them.
        """
        digest = hashlib.sha256(self.kind.encode())
        if {formats.kind_of(name) for name in self.files} & {"jsonl", "parquet"}:
            digest.update(f"\0{self.field}".encode())
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
          ConfigError: a file that holds documents and cannot be read, a line without text; the message names the file and line.
        """
        if self.kind == "txt":
            yield from _txt(self.root / self.files[0])
            return
        for name in self.files:
            path, key = self.root / name, f"{name}:" if self.kind == "directory" else ""
            match formats.kind_of(name):
                case "jsonl":
                    yield from _jsonl(path, self.field, key)
                case "parquet":
                    for number, text in enumerate(formats.rows(path, self.field), 1):
                        if text:
                            yield Document(text, is_heldout(f"{key}{number}"))
                case _:
                    if text := _text(path):
                        yield Document(text, is_heldout(name))


def find(path: str, field: str = "text") -> Source:
    """The source that `data.path` names.

    `stdlib` is every .py file of the running Python's standard library, without its tests, encodings, lib2to3 and installed packages. A
    .jsonl has one object with a string under `field` per line, a .parquet a column of that name. A .txt is one document, read whole: text
    that does not fit into memory should be one of the others. .txt and .jsonl may be compressed: .gz, .zst. A directory gives the documents
    of every such file below it, and every other file that is valid UTF-8 as a document, whatever its name, save hidden files and
    directories (names with a leading dot); others are skipped in silence. Links are followed; a directory is read once.

    Raises:
      ConfigError: no such path, another kind of file, no files, a directory that cannot be read.
    """
    if path == "stdlib":
        return _directory("stdlib", Path(sysconfig.get_paths()["stdlib"]), field, suffix=".py", skip=_STDLIB_SKIPPED)
    found = Path(path).expanduser()
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", found.resolve().name.split(".")[0]) or "corpus"
    if found.is_dir():
        return _directory(name, found, field)
    kinds = f"one of {formats.SUFFIXES}, a directory of text files, or `stdlib`"
    if not found.is_file():
        raise ConfigError(f"data.path={path}: no such file or directory; give {kinds}{hub_hint(path, 'dataset')}")
    size = found.stat().st_size
    if size == 0:
        raise ConfigError(f"data.path={path} is empty; give {kinds}")
    if kind := formats.kind_of(found):
        return Source(name, kind, found.parent, (found.name,), size, field)
    raise ConfigError(f"data.path={path}: files of type {found.suffix or '(none)'} are not read; give {kinds}")


def is_heldout(key: str) -> bool:
    """One key in 20, by its SHA-256: a document keeps its split when others are added or removed."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest(), "big") % _HELDOUT == 0


def below(root: Path, suffix: str = "", skip: frozenset[str] = frozenset()) -> list[str]:
    """The files below a directory, as sorted posix paths, without hidden ones and what is neither file nor link to one.

    Raises ConfigError for a directory that cannot be read.
    """
    files, seen = [], set()
    for folder, folders, names in os.walk(root, onerror=_unreadable, followlinks=True):
        if (here := _identity(folder)) in seen:  # by a link, perhaps to a directory that it is in
            folders.clear()
            continue
        seen.add(here)
        folders[:] = sorted(f for f in folders if f not in skip and not f.startswith("."))
        for path in (Path(folder, n) for n in names if n.endswith(suffix) and not n.startswith(".")):
            if path.is_file():  # neither a pipe nor a dangling link
                files.append(path.relative_to(root).as_posix())
    return sorted(files)


def _identity(folder: str) -> tuple[int, int]:
    found = os.stat(folder)
    return found.st_dev, found.st_ino


def _unreadable(error: OSError) -> None:
    raise formats.unreadable(Path(error.filename), error) from error


def _directory(name: str, root: Path, field: str, suffix: str = "", skip: frozenset[str] = frozenset()) -> Source:
    files = below(root, suffix, skip)
    size = sum((root / file).stat().st_size for file in files)
    if not size:
        raise ConfigError(f"data.path={name if suffix else root}: {root} has no files, or only hidden or empty ones; give one with text")
    return Source(name, "directory", root, tuple(files), size, field)


def _text(path: Path) -> str | None:
    """The file as text, line ends untouched; None where it is not UTF-8, unless its name says that it is text. Raises ConfigError."""
    try:
        with formats.opened(path) as (file, _):
            start = file.read(4096)
            codecs.getincrementaldecoder("utf-8")().decode(start)  # spares reading a large binary file whole
            return (start + file.read()).decode()
    except UnicodeDecodeError as error:
        if formats.kind_of(path):
            raise ConfigError(f"{path} is not UTF-8; convert it, or leave it out") from error
        return None


def _jsonl(path: Path, field: str, key: str) -> Iterator[Document]:
    """The documents of a .jsonl; blank lines are skipped, and lines are numbered from 1, for the held-out split as for messages."""
    with formats.opened(path) as (file, _):
        for number, line in enumerate(file, 1):
            if line.strip() and (text := formats.text_of(line, field, f"{path}, line {number}")):
                yield Document(text, is_heldout(f"{key}{number}"))


def _txt(path: Path) -> Iterator[Document]:
    """The first 19/20 of the file and, from the next line on, the rest, which is held out."""
    try:
        with formats.opened(path) as (file, _):
            text = file.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 (byte {error.start}); convert it first") from error
    cut = text.find("\n", len(text) - len(text) // _HELDOUT - 1) + 1
    if cut in (0, len(text)):  # no line ends in the last twentieth but at its end
        cut = text.rfind("\n", 0, len(text) - 1) + 1
    if cut == 0:
        raise ConfigError(f"{path} has a single line, so that no part can be held out; give text of at least two lines")
    yield Document(text[:cut], heldout=False)
    yield Document(text[cut:], heldout=True)
