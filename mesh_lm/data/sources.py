"""Text sources: their files, digests and documents, and which documents are held out."""

from __future__ import annotations

import codecs
import dataclasses
import hashlib
import os
import re
import sysconfig
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from mesh_lm.data import formats, written
from mesh_lm.errors import ConfigError, hub_hint

HELDOUT = 20
"""1 / this fraction of the text is held out."""
_STDLIB_SKIPPED = frozenset(
    {"test", "tests", "idle_test", "encodings", "lib2to3", "site-packages", "dist-packages"}
)
_DIRECTORY = "directory"
"""The kind of a source of many files."""
_DIGEST_CONTENTS = 256 * 2**20
"""Bytes up to which the contents of a text are part of its digest."""
_TEXT_START = 4096
"""Bytes of a file in which most binary ones are found out, without reading the rest."""


@dataclasses.dataclass(frozen=True)
class Document:
    """One text and the split it belongs to."""

    text: str
    heldout: bool


@dataclasses.dataclass(frozen=True)
class Source:
    """The files of one corpus."""

    name: str
    """A name that is safe in a file name."""
    kind: str
    """`_DIRECTORY`, or the name of the file's format."""
    root: Path
    files: tuple[str, ...]
    """Posix paths relative to root, sorted."""
    size: int
    """Bytes in all files."""
    field: str
    """The field of a .jsonl line, or the column of a .parquet file, that holds the text."""

    def digest(self) -> str:
        """Returns a SHA-256 (hex) of the kind, the file names and their contents.

        Contents are hashed up to 256 MiB in total (less than a second), because modification times
        differ between copies of a text; for larger sources, sizes and modification times are hashed
        instead.
        """
        digest = hashlib.sha256(self.kind.encode())
        # Only where it matters: corpora of earlier versions keep their names.
        if any(map(formats.has_records, self.files)):
            digest.update(f"\0{self.field}".encode())
        if self.kind == _DIRECTORY and any(map(formats.newly_read, self.files)):
            digest.update(b"\0as what they are")
        if any(formats.has_mark(self.root / name) for name in self.files):
            digest.update(b"\0without byte order marks")
        for name in self.files:
            path = self.root / name
            try:
                if self.size <= _DIGEST_CONTENTS:
                    mark = hashlib.sha256(path.read_bytes()).hexdigest()
                else:
                    mark = f"{path.stat().st_size} {path.stat().st_mtime_ns}"
            except OSError as error:
                mark = f"unreadable: {error.errno}"
            digest.update(os.fsencode(f"\0{name}\0{mark}"))
        return digest.hexdigest()

    def documents(self) -> Iterator[Document]:
        """Yields all non-empty documents in order; each call reads the files again.

        Raises:
          ConfigError: a file cannot be read, or a line has no text; the message names the file and
            line.
        """
        if self.kind == formats.PlainText.name:
            yield from _split_text(self.root / self.files[0])
            return
        for name in self.files:
            path = self.root / name
            format = formats.detect(name)
            if isinstance(format, formats.Records):
                key = f"{name}:" if self.kind == _DIRECTORY else ""
                for number, text in format.documents(path, self.field):
                    if text:
                        yield Document(text, is_heldout(f"{key}{number}"))
            else:
                text = _text(path)
                if text:
                    yield Document(text, is_heldout(name))


def find(path: str, field: str = "text", outputs: Collection[str] = ()) -> Source:
    """Returns the source that `data.path` names.

    `stdlib` is every .py file of the running Python's standard library, without its tests,
    encodings, lib2to3 and installed packages. A .jsonl, .ndjson or .json file has one object with a
    string under `field` per line, a .json file perhaps a list of such objects, a .parquet file a
    column of that name. A .txt file is one document and must fit into memory. All but .parquet may
    be compressed (.gz, .zst, .bz2, .xz). A directory yields the documents of all such files below
    it; every other file that is valid UTF-8, perhaps once it is decompressed, is one document.
    Hidden files and directories (leading dot) and files that are not UTF-8 are skipped, and so is
    what mesh_lm has written (`below`). Links are followed; a directory is read once.

    Args:
      outputs: directories that this run writes to.

    Raises:
      ConfigError: the path is missing, unreadable, empty or of an unsupported type, or a file of a
      directory is (`require_readable`).
    """
    if path == "stdlib":
        stdlib = Path(sysconfig.get_paths()["stdlib"])
        return _directory(path, stdlib, field, suffix=".py", skip=_STDLIB_SKIPPED)
    location = Path(path or os.devnull).expanduser()  # an empty path would be the working directory
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", location.resolve().name.split(".")[0]) or "corpus"
    if location.is_dir():
        return _directory(name, location, field, outputs=outputs)
    kinds = f"one of {formats.suffixes()}, a directory of text files, or `stdlib`"
    if not path:
        raise ConfigError(f"data.path is empty; give {kinds}")
    if not location.is_file():
        raise ConfigError(
            f"data.path={path}: no such data file or directory; give {kinds}"
            f"{hub_hint(path, 'dataset')}"
        )
    size = location.stat().st_size
    if size == 0:
        raise ConfigError(f"data.path={path} is a file of 0 bytes; give {kinds}")
    formats.require_readable(location)
    format = formats.detect(location)
    if format is None:
        raise ConfigError(
            f"data.path={path}: files of type {location.suffix or '(none)'} "
            f"are not read as data; give {kinds}"
        )
    return Source(name, format.name, location.parent, (location.name,), size, field)


def is_heldout(key: str) -> bool:
    """Whether a key is held out: one in 20 by SHA-256, so that a document keeps its split when
    others are added or removed.
    """
    digest = hashlib.sha256(os.fsencode(key)).digest()
    return int.from_bytes(digest, "big") % HELDOUT == 0


def require_apart(path: str, outputs: Mapping[str, str]) -> None:
    """Raises ConfigError if a directory of text is one that the run writes to, or has one with text
    below it.

    outputs: field -> directory.
    """
    root = Path(path).expanduser()
    if not root.is_dir():
        return
    for field, output in outputs.items():
        folder = Path(output).expanduser()
        if written.identity(root) in written.identities([folder]):
            raise ConfigError(
                f"{field}={output} is the directory of data.path={path}, and what the run writes "
                f"there would become text to train on; set {field} to another directory, which may "
                "be one below it"
            )
        if root.resolve() not in folder.resolve().parents:
            continue
        text = _first_text(folder)
        if text:
            raise ConfigError(
                f"{field}={output} has text ({text}), which data.path={path} would leave out, "
                "because a directory that the run writes to is not text to train on; set "
                f"{field} to another directory"
            )


def _first_text(folder: Path) -> str | None:
    """Returns the first file of a directory, which may be missing, that has the suffix of text, and
    which no run has written.
    """
    if not folder.is_dir():
        return None
    _, folders, names = next(os.walk(folder))
    if written.is_output(folder, folders, names):
        return None
    for name in below(folder):
        if formats.detect(name) and name.split("/")[0] not in written.OF_A_RUN:
            return name
    return None


def below(
    root: Path, suffix: str = "", skip: frozenset[str] = frozenset(), outputs: Collection[str] = ()
) -> list[str]:
    """Returns the files below a directory as sorted posix paths, without hidden files and anything
    but files and links to files.

    What mesh_lm has written there is left out: `outputs`, the output of any run, exports, caches,
    prepared tokens, this process's own log, and those of Slurm.

    Raises ConfigError if a directory cannot be read, or if `root` itself is the output of a run.
    """
    files: list[str] = []
    visited: set[written.Identity] = set()
    excluded = written.identities([Path(output).expanduser() for output in outputs if output])
    logs = written.logs()
    for folder, folders, names in os.walk(root, onerror=_unreadable, followlinks=True):
        identity = written.identity(folder)
        is_root = not visited
        is_output = written.is_output(Path(folder), folders, names)
        if is_output and is_root:
            raise ConfigError(
                f"{root} is what a run of mesh_lm has written, not text; name the directory or the "
                "file that has the text"
            )
        # A link, perhaps to a parent directory, leads to visited ones.
        if is_output or identity in visited or (identity in excluded and not is_root):
            folders.clear()
            continue
        visited.add(identity)

        prepared = written.prepared(Path(folder), names)
        left_out = skip | prepared
        # In place: os.walk continues with these, in this order.
        folders[:] = sorted(f for f in folders if f not in left_out and not f.startswith("."))
        for name in names:
            if name.startswith(".") or not name.endswith(suffix):
                continue
            if name in prepared or written.SLURM_LOG.fullmatch(name):
                continue
            path = Path(folder, name)
            # Neither a pipe nor a dangling link is a file.
            if path.is_file() and written.identity(path) not in logs:
                files.append(path.relative_to(root).as_posix())
    return sorted(files)


def _unreadable(error: OSError) -> None:
    raise formats.unreadable(Path(error.filename), error) from error


def _directory(
    name: str,
    root: Path,
    field: str,
    suffix: str = "",
    skip: frozenset[str] = frozenset(),
    outputs: Collection[str] = (),
) -> Source:
    files = below(root, suffix, skip, outputs)
    formats.require_all_readable((root / file for file in files), field)
    size = sum((root / file).stat().st_size for file in files)
    if not size:
        raise ConfigError(
            f"data.path={name if suffix else root}: {root} "
            "has no files, or all are hidden or empty; give a directory with text"
        )
    return Source(name, _DIRECTORY, root, tuple(files), size, field)


def _text(path: Path) -> str | None:
    """Returns the file as text with its line ends; None if it is not UTF-8.

    Raises ConfigError instead if its name is that of text.
    """
    try:
        with formats.opened(path) as (file, _):
            start = file.read(_TEXT_START)
            # It may end within a character.
            codecs.getincrementaldecoder("utf-8")().decode(start)
            return formats.text(start + file.read())
    except UnicodeDecodeError as error:
        if formats.detect(path):
            raise ConfigError(f"{path} is not UTF-8; convert it, or leave it out") from error
        return None


def _split_text(path: Path) -> Iterator[Document]:
    """Yields the first 19/20 of the file, up to a line end, and the held-out rest."""
    try:
        with formats.opened(path) as (file, _):
            text = formats.text(file.read())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not text in UTF-8 (byte {error.start}); convert it first"
        ) from error
    split = text.find("\n", len(text) - len(text) // HELDOUT - 1) + 1
    # No line ends in the last twentieth but at its end: the last line is held out.
    if split in (0, len(text)):
        split = text.rfind("\n", 0, len(text) - 1) + 1
    if split == 0:
        raise ConfigError(
            f"{path} has a single line, so that no part can be held out; give text of at least two "
            "lines"
        )
    yield Document(text[:split], heldout=False)
    yield Document(text[split:], heldout=True)
