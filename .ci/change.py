"""Says what CI must run for a change: `prose`, if it touches only Markdown outside of code and
images, or else `everything`.

It prints that word, and a line with the reason. It needs the standard library only, because it runs
before anything is installed. Wherever it is in doubt it says `everything`.
"""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PROSE = "prose"
EVERYTHING = "everything"
IMAGES = (".png", ".jpg", ".jpeg", ".svg")

_MAIN_BRANCHES = ("refs/remotes/origin/main", "refs/remotes/origin/HEAD", "refs/heads/main")
_REGULAR_FILE = "100644"
_ABSENT = "000000"
_FENCE = re.compile(r"```|~~~")
_OPENING_FENCE = re.compile(r"( *)(`{3,}|~{3,})\w*")
# Markers of quotes and list items, and then as much space as makes an indented code block.
_INDENTED_CODE = re.compile(r"(?:\s*(?:>|[-*+]|\d+[.)]))*(?:\s{4}|\s*\t)")
_OTHER_CODE = re.compile(r"</?(?:pre|code|script|style|textarea)\b|<[?]|<!(?!--)", re.IGNORECASE)
# Everything but \n at which some reader of a page might see the end of a line, and bytes that no
# text has.
_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f\x85\u2028\u2029]")


class Doubt(Exception):
    """The reason why everything must run."""


@dataclass(frozen=True)
class FileChange:
    """A file that differs from the base. Modes are those of git, 000000 where there is no file."""

    path: str
    old_mode: str
    new_mode: str
    old: bytes
    new: bytes


def main() -> int:
    """Prints the answer for this checkout."""
    try:
        changes, base = changes_of_checkout(ROOT, os.environ)
        check_prose(changes)
    except Doubt as doubt:
        print(f"{EVERYTHING}\n{doubt}")
        return 0
    paths = ", ".join(change.path for change in changes)
    print(f"{PROSE}\nonly prose and images differ from {base[:12]}: {paths}")
    return 0


def check_prose(changes: Sequence[FileChange]) -> None:
    """Raises Doubt unless there are changes and all of them are prose or images."""
    if not changes:
        raise Doubt("nothing differs from the base")
    for change in changes:
        _check_file(change)


def _check_file(change: FileChange) -> None:
    path = PurePosixPath(change.path)
    in_docs = path.parts[0] == "docs"
    is_page = path.suffix == ".md" and (in_docs or len(path.parts) == 1)
    is_image = path.suffix in IMAGES and in_docs
    if not is_page and not is_image:
        raise Doubt(f"{change.path} is neither a page nor an image of a page")
    if change.new_mode != _REGULAR_FILE or change.old_mode not in (_REGULAR_FILE, _ABSENT):
        raise Doubt(f"{change.path} was removed, is no regular file, or has another mode")
    if is_image:
        return

    old_code = code_of(change.old)
    new_code = code_of(change.new)
    if old_code is None or new_code is None:
        raise Doubt(f"{change.path} can be read in more than one way")
    if old_code != new_code:
        raise Doubt(f"the code or the comments of {change.path} differ")


def code_of(page: bytes) -> list[str] | None:
    """Returns the lines of code blocks and HTML comments of a page, and before each of them what
    the prose there decides about it.

    None: the page's readers (MkDocs, GitHub, and the regular expressions of tests) may not agree
    about what is code.
    """
    try:
        text = page.decode("utf-8")
    except UnicodeDecodeError:
        return None
    if _CONTROL_CHARACTERS.search(text):
        return None

    code: list[str] = []
    prose: list[str] = []
    closing_fence = ""
    indentation = ""
    in_comment = False
    for line in text.split("\n"):
        # 1. A fenced block ends at the same fence with the same indentation.
        if closing_fence:
            code.append(line)
            if line == closing_fence:
                closing_fence = ""
            elif _FENCE.search(line) or (line.strip() and not line.startswith(indentation)):
                return None  # a line that is less indented ends a list item, and with it the block
            continue

        # 2. Prose.
        opening = _OPENING_FENCE.fullmatch(line)
        starts_comment = "<!--" in line
        if _is_prose(line) and not in_comment:
            prose.append(line)
            continue

        # 3. A line of a comment, of an indented block, or the first of a fenced block.
        if (
            _OTHER_CODE.search(line)
            or (_FENCE.search(line) and not opening)
            or (opening and in_comment)
        ):
            return None
        context = _context(prose, line)
        if context is None:
            return None
        code += [*context, line]
        prose = []
        if opening:
            indentation = opening[1]
            closing_fence = indentation + opening[2]
        elif in_comment or starts_comment:
            in_comment = (
                line.rfind("-->") < line.rfind("<!--") if starts_comment else "-->" not in line
            )
    return None if closing_fence or in_comment else code


def _is_prose(line: str) -> bool:
    """Whether the line has nothing of code or of a comment, if it is outside of both."""
    if not line.strip():
        return True
    return not (
        _FENCE.search(line)
        or "<!--" in line
        or "-->" in line
        or _OTHER_CODE.search(line)
        or _INDENTED_CODE.match(line)
    )


def _context(prose: list[str], line: str) -> list[str] | None:
    """Returns what the prose between two lines of code says about the second; None where it may be
    no code at all.

    A text between a comment and a block separates them, and blank lines may. Whether an indented
    line is code depends on the list items above it, up to a heading.
    """
    if line.startswith((" ", "\t", ">")) or _INDENTED_CODE.match(line):
        return prose[_last_heading(prose) :]
    texts = [number for number, text in enumerate(prose) if text.strip()]
    if not texts:
        return prose

    # HTML continues to the next blank line, and a block within it is none.
    blanks = [number for number, text in enumerate(prose) if not text.strip()]
    last_paragraph = prose[max(blanks, default=-1) + 1 :]
    if any(text.lstrip().startswith("<") for text in last_paragraph):
        return None
    return [*prose[: texts[0]], "(prose)", *prose[texts[-1] + 1 :]]


def _last_heading(prose: list[str]) -> int:
    """Returns the index of the last heading below a blank line, or 0."""
    for number in range(len(prose) - 1, 0, -1):
        if re.match(r"#{1,6} ", prose[number]) and not prose[number - 1].strip():
            return number
    return 0


def changes_of_checkout(root: Path, environment: Mapping[str, str]) -> tuple[list[FileChange], str]:
    """Returns what differs in the working tree, untracked files included, from the base, and the
    base's commit. Raises Doubt.
    """
    git = _Git(root)
    top, shallow, head = git.lines(
        "rev-parse", "--show-toplevel", "--is-shallow-repository", "HEAD^{commit}"
    )
    if Path(top).resolve() != root.resolve():
        raise Doubt("this is no checkout of its own")
    base = _base(git, environment, head, shallow != "false")
    return [*_tracked(git, root, base), *_untracked(git, root)], base


def _base(git: _Git, environment: Mapping[str, str], head: str, shallow: bool) -> str:
    """Returns the merge base of HEAD with the main branch."""
    revision = environment.get("MESH_LM_CI_BASE", "")
    pull_request = environment.get("GITHUB_BASE_REF", "")
    if revision:
        commit = git.commit(revision)
    elif pull_request:
        commit = git.commit(f"refs/remotes/origin/{pull_request}")
    else:
        commit = _main_branch(git)

    bases = git.lines("merge-base", "--all", commit, head)
    if len(bases) != 1:
        raise Doubt(f"the merge base with {commit[:12]} is not known")
    # A shallow clone lacks commits, among which a later merge base may be; a base from which HEAD
    # descends is one in any case.
    if shallow and bases[0] != commit:
        raise Doubt("a shallow clone does not show the merge base")
    if bases[0] == head and not revision:
        raise Doubt(
            "this is the main branch, or a commit of it; MESH_LM_CI_BASE=REVISION names another "
            "base"
        )
    return bases[0]


def _main_branch(git: _Git) -> str:
    """Returns the commit of the first main branch that exists."""
    listed = git.lines("for-each-ref", "--format=%(refname) %(objectname)", *_MAIN_BRANCHES)
    commits = dict(line.split(" ") for line in listed)
    for name in _MAIN_BRANCHES:
        if name in commits:
            return commits[name]
    raise Doubt("no main branch is known here; MESH_LM_CI_BASE=REVISION names a base")


def _tracked(git: _Git, root: Path, base: str) -> list[FileChange]:
    # Without renames: a file that was renamed is one that was removed and one that was added.
    options = (
        "--raw",
        "-z",
        "--no-abbrev",
        "--no-renames",
        "--no-ext-diff",
        "--no-textconv",
        "--ignore-submodules=none",
    )
    fields = git.output("diff", *options, base, "--").split(b"\0")[:-1]
    changes = []
    for description, name in zip(fields[::2], fields[1::2], strict=True):
        old_mode, new_mode, old_object, _, status = (
            description.decode().removeprefix(":").split(" ")
        )
        path = os.fsdecode(name)
        if status not in ("A", "M"):
            raise Doubt(f"{path} was removed, replaced, or is in conflict")
        change = FileChange(path, old_mode, new_mode, b"", b"")
        if (old_mode, new_mode) == (_REGULAR_FILE, _REGULAR_FILE):
            change = replace(change, old=git.output("cat-file", "blob", old_object))
        if new_mode == _REGULAR_FILE:
            change = replace(change, new=(root / path).read_bytes())
        changes.append(change)
    return changes


def _untracked(git: _Git, root: Path) -> list[FileChange]:
    names = git.output("ls-files", "--others", "--exclude-standard", "-z").split(b"\0")[:-1]
    changes = []
    for path in map(os.fsdecode, names):
        mode = (root / path).lstat().st_mode
        if not stat.S_ISREG(mode) or mode & stat.S_IXUSR:
            raise Doubt(f"{path} is no regular file, or is executable")
        changes.append(FileChange(path, _ABSENT, _REGULAR_FILE, b"", (root / path).read_bytes()))
    return changes


class _Git:
    """git in one directory. Its failures are Doubt."""

    def __init__(self, root: Path) -> None:
        # A hook of git's sets variables such as GIT_INDEX_FILE for its own repository.
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("GIT_")
        }
        self._environment = {**environment, "LC_ALL": "C"}
        self._words = [
            "git",
            "-C",
            str(root),
            "-c",
            "core.fileMode=true",
            "-c",
            "core.fsmonitor=false",
        ]

    def output(self, *words: str) -> bytes:
        try:
            done = subprocess.run(
                [*self._words, *words], env=self._environment, capture_output=True
            )
        except OSError:
            raise Doubt("there is no git on this machine") from None
        if done.returncode != 0:
            raise Doubt(
                f"git {words[0]} failed: "
                f"{os.fsdecode(done.stderr).strip() or f'status {done.returncode}'}"
            )
        return done.stdout

    def lines(self, *words: str) -> list[str]:
        return os.fsdecode(self.output(*words)).splitlines()

    def commit(self, revision: str) -> str:
        """Returns the commit of a revision. Raises Doubt if there is none."""
        if revision.startswith("-"):
            raise Doubt(f"{revision} is no revision")
        return self.lines("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")[0]


if __name__ == "__main__":
    sys.exit(main())
