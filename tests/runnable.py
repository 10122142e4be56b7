"""The Python blocks and commands of the pages, as a reader runs them: in processes of their own, in
another directory, with nothing in the environment that tests/conftest.py or the machine of the
tests has set.

A comment right before a block says why it cannot run here, `<!-- needs: gpu, and why -->`, or how
it ends, `<!-- status: 1 -->`.
"""

from __future__ import annotations

import atexit
import functools
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from command_forks import Forks
from processes import PATIENCE, bare

ROOT = Path(__file__).parents[1]
PACKAGES = ("mesh_lm", "sharding_rules", "pallas_kernels")
"""What an installation has."""
NEEDS = ("gpu", "slurm", "hosts", "network", "checkout", "files", "time")
LANGUAGES = {
    "python": "python",
    "pycon": "python",
    "sh": "command",
    "bash": "command",
    "console": "command",
}
_FAST = "--xla_backend_optimization_level=0"
"""Compiles in less time; nothing else of what these processes do depends on it."""
READER = os.environ.get("MESH_LM_READER", "")
"""A Python in whose environment the wheel is installed, which tests/newcomer makes; empty: this
one, and this checkout's packages."""
_BLOCK = re.compile(
    (
        r"(?P<marks>(?:^ *<!--(?:(?!-->).)*-->\s*?\n\n?)*)^(?P<indent> "
        r"*)```(?P<kind>\w*)\n(?P<text>.*?)^(?P=indent)```$"
    ),
    re.M | re.S,
)
_MARK = re.compile(r"<!-- (needs|status): (\w+)(?:, ([^>]*))? -->", re.S)


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    kind: str
    """The language of the block: python, pycon, sh, bash, console."""
    text: str
    needs: str = ""
    why: str = ""
    status: int = 0
    refusal: str = ""
    """The error that the page shows right below a block of commands, as what the last of them
    answers."""


@dataclass(frozen=True)
class Command:
    block: Block
    text: str
    answer: str = ""
    """What the page shows below it."""

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text.replace(r"$'\n'", "'\n'"), comments=True)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The blocks that can be run, in order. Raises AssertionError for a mark without a known need
    or without a reason."""
    text, name, found = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)), []
    for match in _BLOCK.finditer(text):
        marks = {key: (value, why) for key, value, why in _MARK.findall(match["marks"])}
        needs, why = marks.get("needs", ("", ""))
        assert not needs or (needs in NEEDS and why), (
            f"{name}: <!-- needs: {needs}, {why} -->: expected one of {NEEDS}, and a reason"
        )
        line = text[: match.start("kind")].count("\n") + 1
        if match["kind"] in LANGUAGES:
            indented = re.sub(f"^{match['indent']}", "", match["text"], flags=re.M)
            shown = re.match(
                r"```text\n(error: .*?)^```$", text[match.end() :].lstrip(), re.M | re.S
            )
            status, refusal = int(marks.get("status", ("0", ""))[0]), shown[1] if shown else ""
            found.append(Block(name, line, match["kind"], indented, needs, why, status, refusal))
    return found


def commands(block: Block) -> list[Command]:
    """A block's commands; those of a console with their answers."""
    text = block.text.replace("\\\n", " ")
    if block.kind == "console":
        return [
            Command(block, *found)
            for found in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.M)
        ]
    lines = [line for line in text.splitlines() if line.split("#")[0].strip()]
    return [Command(block, line, block.refusal if line == lines[-1] else "") for line in lines]


def scene(directory: Path) -> Path:
    """A directory as a reader's: this checkout's runnable files, a place for what is installed, and
    no environment of the tests."""
    directory.mkdir(parents=True)
    _install(directory / "installed")
    shutil.copy(ROOT / "train.py", directory)
    shutil.copytree(
        ROOT / "configs", directory / "configs", ignore=shutil.ignore_patterns("__pycache__")
    )
    (directory / "docs" / "images").mkdir(parents=True)
    for file in (ROOT / "docs").glob("*.py"):
        shutil.copy(file, directory / "docs")
    return directory


def _install(directory: Path) -> None:
    """Makes a directory in which Python finds this checkout's packages, and nothing else of it."""
    directory.mkdir()
    for package in PACKAGES:
        (directory / package).symlink_to(ROOT / package)


@functools.cache
def forks() -> Forks:
    """The process whose forks are the commands of all pages."""
    directory = Path(tempfile.mkdtemp(prefix="mesh_lm-pages-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    _install(directory / "installed")
    path = "" if READER else str(directory / "installed")
    return Forks(
        READER or sys.executable, bare(HF_HUB_OFFLINE="1", XLA_FLAGS=_FAST, PYTHONPATH=path)
    )


def run(
    words: list[str], here: Path, *, stdin: str = "", patience: float = 3 * PATIENCE
) -> subprocess.CompletedProcess[str]:
    """One process in `here`. `python` is this Python, `mesh-lm` its module; KEY=VALUE before them
    goes into the environment."""
    given = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, value = words.pop(0).partition("=")
        given[name] = value
    environment = bare(HOME=str(here), HF_HUB_OFFLINE="1", XLA_FLAGS=_FAST) | given
    environment = environment | {"PYTHONPATH": "" if READER else str(here / "installed")}
    if words[0] == "mesh-lm" and words[1] != "launch" and not given:
        return forks().run(
            words[1:], cwd=here, environment=environment, stdin=stdin, timeout=patience
        )
    programs = {
        "python": [READER or sys.executable],
        "mesh-lm": [READER or sys.executable, "-m", "mesh_lm"],
    }
    words = [*programs.get(words[0], words[:1]), *words[1:]]
    return subprocess.run(
        words,
        cwd=here,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=patience,
    )


_RUNNER = """
import doctest, json, sys
names, failures = {"__name__": "page"}, []
for kind, line, text in json.load(sys.stdin):
    if kind == "python":
        exec(compile("\\n" * line + text, PAGE, "exec"), names)
        continue
    test = doctest.DocTestParser().get_doctest(text, names, PAGE, PAGE, line)
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=failures.append, clear_globs=False)
    names |= test.globs
sys.exit("".join(failures) or 0)
"""


def run_python(page: str, found: list[Block], here: Path) -> subprocess.CompletedProcess[str]:
    """The Python of a page, block after block in one namespace of one process."""
    code = _RUNNER.replace("PAGE", repr(page))
    return run(
        ["python", "-c", code],
        here,
        patience=3 * PATIENCE,
        stdin=json.dumps([(block.kind, block.line, block.text) for block in found]),
    )


_EACH = """
import contextlib, io, json, runpy, sys
answers = []
for sys.argv in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as printed, contextlib.redirect_stdout(sys.stderr):
        try:
            status = runpy.run_module("mesh_lm", run_name="__main__", alter_sys=True) and 0
        except SystemExit as exit:
            status = exit.code
    answers.append((status, printed.getvalue()))
print(json.dumps(answers))
"""


def run_each(commands: list[list[str]], here: Path) -> list[tuple[int, str]]:
    """(status, what it wrote to stderr) of each command of mesh-lm, one after the other in one
    process."""
    done = run(["python", "-c", _EACH], here, stdin=json.dumps(commands))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [(status, text) for status, text in json.loads(done.stdout)]


def must_succeed(words: list[str], here: Path, status: int = 0) -> subprocess.CompletedProcess[str]:
    """As `run`. Raises AssertionError with what it printed, where its status is another."""
    # as a shell does
    words = [
        each
        for word in words
        for each in (sorted(glob.glob(word, root_dir=here)) if "*" in word else [word])
    ]
    done = run(words, here)
    assert done.returncode == status, (
        f"{shlex.join(words)}\nended with "
        f"{done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
    )
    return done
