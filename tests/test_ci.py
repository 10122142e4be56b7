"""CI's own programs: what it runs for a change, and what it says of its parts and of the tests'
seconds."""

import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import runnable
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]


def load(name: str) -> ModuleType:
    """A file of .ci as a module."""
    spec = importlib.util.spec_from_file_location(f"ci_{name}", ROOT / ".ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


change = load("change")
report = load("report")
yardstick = load("yardstick")
crashed_tests = load("crashed").crashed

PAGE = """# Title

Some prose,
in two lines.

<!-- needs: gpu, none is here -->
```sh
ls
```

| a | b |
|---|---|
| 1 | 2 |

## A list

1. An item:
    ```python
    x = 1
    ```

The end.
"""


def same_code(old: str, new: str) -> bool:
    """Whether a change of a page is one of its prose alone."""
    files = [change.FileChange("docs/a.md", "100644", "100644", old.encode(), new.encode())]
    try:
        change.check_prose(files)
    except change.Doubt:
        return False
    return True


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Some prose", "Other prose"),
        ("in two lines.\n", "in\n\nthree lines.\n"),
        ("Some prose,\nin two lines.\n", "A `call()` and [a link](b.md).\n"),
        ("| 1 | 2 |", "| 1 | 3 |"),
        ("# Title", "# Another title"),
        ("The end.", "The\n\n- very\n- end."),
        ("The end.\n", ""),
    ],
)
def test_prose(old: str, new: str) -> None:
    assert PAGE.count(old) == 1 and same_code(PAGE, PAGE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ls\n", "ls -l\n"),
        ("```sh\nls\n```", "```bash\nls\n```"),
        ("```sh\nls\n```", "~~~sh\nls\n~~~"),
        ("```sh\nls\n```", "````sh\nls\n````"),
        ("```sh\nls\n```\n", ""),
        ("    x = 1", "    x = 2"),
        ("    x = 1", "     x = 1"),
        ("    ```\n\n", "    ```\n\n    y = 2\n\n"),
        ("needs: gpu", "needs: network"),
        ("<!-- needs: gpu, none is here -->\n", ""),
        ("<!-- needs: gpu, none is here -->\n", "<!-- needs: gpu, none is here -->\n\n\n"),
        ("<!-- needs: gpu, none is here -->\n", "<!-- needs: gpu, none is here -->\nText.\n"),
        ("1. An item:", "An item:"),
        ("The end.", "The end.\n\n```sh\nrm\n```"),
        ("The end.", "The end.\n\n    indented = 1"),
        ("The end.", "The end.\n\n> ```sh\n> rm\n> ```"),
        ("The end.", "The end.\n\n-     indented = 1"),
        ("The end.", "The end: ```inline```."),
        ("The end.", "The end.\n\n<pre>\nx\n</pre>"),
        ("The end.", "The end.\n<!-- status: 1 -->"),
        ("The end.", "The end.\n\n```sh\nunclosed"),
        ("Some prose", "Some\r\nprose"),
        ("Some prose", "Some\0prose"),
    ],
)
def test_no_prose(old: str, new: str) -> None:
    assert PAGE.count(old) == 1
    assert not same_code(PAGE, PAGE.replace(old, new))
    assert not same_code(PAGE.replace(old, new), PAGE)


PROSE_LINES = (
    "",
    "text",
    "more `code` text",
    "# heading",
    "- item",
    "1. item",
    "> quote",
    "| a | b |",
    "<div>",
    "[a]: b.md",
    "---",
    "  two",
)
CODE_LINES = (
    "```",
    "```sh",
    "ls",
    "    four",
    "<!-- needs: gpu, none -->",
    "<!-- status: 1 -->",
    "```text",
    "error: no",
    "    ```",
)
ODD_LINES = (
    "<!--",
    "-->",
    "````",
    "~~~",
    "~~~sh",
    "  ```sh",
    "  ```",
    "> ```",
    "- ```sh",
    "``` inline ```",
    "\ttab",
    "$ ls",
    "</div>",
)
LINES = st.sampled_from(3 * PROSE_LINES + 2 * CODE_LINES + ODD_LINES)
PAGES = st.lists(LINES, min_size=1, max_size=9)
EDITS = st.tuples(
    st.integers(0, 9),
    st.integers(0, 2),
    st.lists(st.sampled_from(PROSE_LINES + CODE_LINES), max_size=2),
)
COMMON_MARK = MarkdownIt("commonmark")


def read_by_the_tests(page: str) -> list[tuple[str, ...]]:
    """The blocks that tests run, by a copy of what tests/runnable.py reads."""
    found = []
    for match in runnable._BLOCK.finditer(page):
        shown = re.match(r"```text\n(error: .*?)^```$", page[match.end() :].lstrip(), re.M | re.S)
        found.append(
            (
                match["kind"],
                match["text"],
                *map(str, runnable._MARK.findall(match["marks"])),
                shown[1] if shown else "",
            )
        )
    return found


def read_by_a_browser(page: str) -> list[tuple[str, str]]:
    """The fenced blocks as CommonMark has them."""
    return [
        (token.info, token.content) for token in COMMON_MARK.parse(page) if token.type == "fence"
    ]


@settings(max_examples=200)
@given(PAGES, EDITS)
def test_no_change_of_code_is_prose(lines: list[str], edit: tuple[int, int, list[str]]) -> None:
    """Where a change is called prose, two other readers find the same code in both versions."""
    start, removed, added = edit
    old = "\n".join(lines)
    new = "\n".join([*lines[:start], *added, *lines[start + removed :]])
    if same_code(old, new):
        assert read_by_the_tests(old) == read_by_the_tests(new)
        assert read_by_a_browser(old) == read_by_a_browser(new)


def test_the_pages_can_be_read_in_one_way() -> None:
    """Else each change of such a page would run everything."""
    doubtful = [page for page in runnable.pages() if change.code_of(page.read_bytes()) is None]
    assert not doubtful


@pytest.mark.parametrize(
    "path",
    [
        "mesh_lm/a.py",
        "tests/a.md",
        "benchmarks/results/a.md",
        "mkdocs.yml",
        "docs/style_words.toml",
        "docs/a.py",
        "a.png",
        ".ci/run",
    ],
)
def test_other_files_are_no_prose(path: str) -> None:
    with pytest.raises(change.Doubt, match="neither a page nor an image"):
        change.check_prose([change.FileChange(path, "100644", "100644", b"a", b"b")])


@pytest.mark.parametrize(
    "modes",
    [
        ("100644", "000000"),
        ("100644", "100755"),
        ("100755", "100644"),
        ("100644", "120000"),
        ("120000", "100644"),
    ],
)
def test_other_modes_are_no_prose(modes: tuple[str, str]) -> None:
    with pytest.raises(change.Doubt, match="another mode"):
        change.check_prose([change.FileChange("README.md", *modes, b"a", b"b")])


@pytest.mark.parametrize(
    "path", ["docs/images/a.png", "docs/a.svg", "README.md", "docs/tours/a.md"]
)
def test_pages_and_images(path: str) -> None:
    change.check_prose([change.FileChange(path, "000000", "100644", b"", b"a")])
    with pytest.raises(change.Doubt, match="nothing differs"):
        change.check_prose([])


class Repository:
    """A git repository with a main branch, and a branch on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "-q", "-b", "main")
        self.commit({"README.md": PAGE, "a.py": "x = 1\n", "docs/a.md": PAGE})
        self.git("checkout", "-q", "-b", "branch")

    def git(self, *words: str) -> str:
        names = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("GIT_")
        }
        done = subprocess.run(
            ["git", *names, *words],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).write_text(text, encoding="utf-8")

    def commit(self, files: dict[str, str]) -> None:
        self.write(files)
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "m")

    def answer(self, **environment: str) -> str:
        """`prose`, or the reason why it is not."""
        try:
            changes, _ = change.changes_of_checkout(self.root, environment)
            change.check_prose(changes)
        except change.Doubt as doubt:
            return str(doubt)
        return "prose"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    return Repository(tmp_path / "repository")


OTHER_PROSE = PAGE.replace("The end.", "Another end.")


def test_the_change_of_a_branch(repository: Repository, tmp_path: Path) -> None:
    """Commits, uncommitted changes and untracked files, from a base that is named, or is the main
    branch."""
    assert "is the main branch" in repository.answer()
    repository.commit({"README.md": OTHER_PROSE})
    assert repository.answer() == "prose"
    repository.write({"docs/new.md": "Text.\n", "docs/a.md": OTHER_PROSE})
    assert repository.answer() == "prose"
    repository.write({"new.py": ""})
    assert "new.py is neither" in repository.answer()
    repository.git("add", "new.py")
    assert "new.py is neither" in repository.answer()
    repository.commit({"new.py": "x = 2\n"})
    assert "new.py is neither" in repository.answer()
    repository.write({"README.md": PAGE})
    assert repository.answer(MESH_LM_CI_BASE="HEAD") == "prose"
    assert "rev-parse failed" in repository.answer(MESH_LM_CI_BASE="absent")
    assert "rev-parse failed" in repository.answer(GITHUB_BASE_REF="main"), "there is no origin"
    assert "no revision" in repository.answer(MESH_LM_CI_BASE="--all")


def test_files_that_are_no_prose(repository: Repository) -> None:
    (repository.root / "README.md").unlink()
    assert "README.md was removed" in repository.answer(MESH_LM_CI_BASE="main")
    (repository.root / "README.md").symlink_to("a.py")
    assert "README.md was removed, replaced" in repository.answer(MESH_LM_CI_BASE="main")
    repository.git("checkout", "-q", "README.md")
    (repository.root / "README.md").chmod(0o755)
    assert "README.md was removed, is no regular file, or has another mode" in repository.answer(
        MESH_LM_CI_BASE="main"
    )
    repository.git("checkout", "-q", "README.md")
    (repository.root / "docs" / "new.md").symlink_to("a.md")
    assert "docs/new.md is no regular file" in repository.answer(MESH_LM_CI_BASE="main")
    (repository.root / "docs" / "new.md").unlink()
    repository.git("mv", "docs/a.md", "docs/b.md")
    assert "docs/a.md was removed" in repository.answer(MESH_LM_CI_BASE="main")


def test_clones(repository: Repository, tmp_path: Path) -> None:
    """Of the main branch, and without history."""
    clone = object.__new__(Repository)
    clone.root = tmp_path / "clone"
    repository.git("clone", "-q", "-b", "main", str(repository.root), str(clone.root))
    assert "is the main branch" in clone.answer()
    clone.commit({"README.md": OTHER_PROSE})
    assert clone.answer() == "prose" and clone.answer(GITHUB_BASE_REF="main") == "prose"

    repository.git("checkout", "-q", "main")
    repository.commit({"a.py": "x = 3\n"})
    shallow = object.__new__(Repository)
    shallow.root = tmp_path / "shallow"
    repository.git(
        "clone",
        "-q",
        "--depth=1",
        "--no-single-branch",
        f"file://{repository.root}",
        str(shallow.root),
    )
    assert "is the main branch" in shallow.answer()
    shallow.git("checkout", "-q", "branch")
    shallow.commit({"README.md": OTHER_PROSE})
    assert "merge-base failed" in shallow.answer()
    assert shallow.answer(MESH_LM_CI_BASE="HEAD~1") == "prose"
    (shallow.root / "inside").mkdir()
    with pytest.raises(change.Doubt, match="no checkout of its own"):
        change.changes_of_checkout(shallow.root / "inside", {})
    with pytest.raises(change.Doubt, match="rev-parse failed"):
        change.changes_of_checkout(tmp_path, {})


# What tests say of pages is in tests/docs, and in these files.
READERS = {
    "tests/test_readme.py",
    "tests/test_project.py",
    "tests/test_ci.py",
    "tests/mesh_lm/commands/test_convert.py",
    "tests/sharding_rules/lab/test_segments.py",
}


def test_every_reader_of_pages_runs_for_prose() -> None:
    """A test outside of tests/docs that reads a page is named by .ci/run."""
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert not [name for name in READERS if name not in run]
    reads = re.compile(r"(?:ROOT|DOCS|parents\[\d\]|\))\s*/ [^\n]*\.md\"|docs\"\)?\.(?:r?glob)")
    files = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if path.parent != ROOT / "tests" / "docs"
    ]
    found = {
        str(path.relative_to(ROOT))
        for path in files
        if reads.search(path.read_text(encoding="utf-8"))
    }
    # reads benchmarks/gpu_hour.md, which is no page of docs/
    others = {"tests/benchmarks/test_gpu_minutes.py"}
    assert found - others <= READERS


PARTS = "\n".join(
    [
        f"30\tforeground\t{report.INSTALLATION}",
        '0\tyardstick\t{"matmul": 2.0, "compile": 2.2}',
        f"230\tforeground\t{report.TESTS}",
        '0\tyardstick\t{"matmul": 2.2, "compile": 2.0}',
        "70\tbackground\tlint",
        *(f"{seconds}\tforeground\tpart {seconds}" for seconds in (1, 2, 3, 400)),
    ]
)


def measured(tests: float, cores: int = 2) -> object:
    return report.Measurement(
        installation=30,
        tests=tests,
        matmul=2.1,
        compile=2.1,
        cores=cores,
        cpu="a processor",
        date="2026-11-27",
    )


def test_the_report() -> None:
    parts = report.read_parts(PARTS)
    found = report.measurement(parts, report.read_yardsticks(PARTS), 2, "a processor")
    assert found == report.Measurement(30, 230, 2.1, 2.1, 2, "a processor")
    lines = report.report(parts, 1234, found, measured(230))
    assert lines[0].startswith("CI took 1234 s (20.6 min)")
    dearest = lines[lines.index("The 5 dearest parts:") + 1 :][:5]
    assert [line.split(" s  ")[0].strip() for line in dearest] == ["400", "230", "70", "30", "3"]
    assert dearest[2].endswith("lint (in the background)")
    assert (
        "yardstick: 4.20 s (2.10 s of numpy's products of matrices, 2.10 s of a compilation by XLA)"
        in lines
    )
    assert (
        "the README's test command: 260 s (installation 30 s, tests 230 s), 61.9 times the "
        "yardstick"
    ) in lines
    assert not [line for line in lines if line.startswith("warning")]


def test_the_warning() -> None:
    """Above 1.1 times the committed ratio, whatever the seconds are."""
    for tests, warned in ((230, False), (255, False), (257, True), (100, False)):
        assert report.compare(measured(tests), measured(230))[-1].startswith("warning: ") == warned
    slow_machine = report.Measurement(installation=60, tests=460, matmul=4.2, compile=4.2, cores=2)
    assert not report.compare(slow_machine, measured(230))[-1].startswith("warning")
    assert "this machine has 8 cores" in report.compare(measured(230, cores=8), measured(230))[-1]
    assert "no ratio is committed" in report.compare(measured(230), None)[-1]


def test_a_run_that_ended_early() -> None:
    parts = report.read_parts("30\tforeground\tthe installation")
    assert report.measurement(parts, [], 2, "") is None
    assert report.report(parts, 30, None, None)[-1].endswith("30 s  the installation")
    assert report.report([], 0, None, None)


def test_crashed_workers() -> None:
    """Their tests run again, unless something else has failed, too."""
    crash = "worker 'gw2' crashed while running 'tests/a.py::test_b[c d-1]'\n"
    end = "{} in 1119.30s (0:18:39)\n"
    name = "tests/a.py::test_b[c d-1]"
    assert crashed_tests(crash + end.format("1 failed, 644 passed, 5 skipped")) == [name]
    assert crashed_tests(2 * crash + end.format("2 failed, 1 passed")) == [name, name]
    assert not crashed_tests(crash + end.format("2 failed, 644 passed"))
    assert not crashed_tests(crash + end.format("1 failed, 644 passed, 1 error"))
    assert not crashed_tests(end.format("1 failed, 644 passed"))
    assert not crashed_tests(end.format("644 passed"))


def test_the_yardstick_is_the_mean_of_all_cores() -> None:
    measured = [{"matmul": 2.0, "compile": 1.0}, {"matmul": 3.0, "compile": 1.5}]
    assert yardstick.mean(measured) == {"matmul": 2.5, "compile": 1.25}
    assert "jax" not in vars(yardstick) and "numpy" not in vars(yardstick), (
        "they are imported after the environment is set"
    )


def test_the_committed_ratio() -> None:
    written = report.written(measured(230), datetime.date(2026, 11, 28))
    assert json.loads(written)["ratio"] == 61.9
    assert report.read_measurement(written).date == "2026-11-28"
    if report.COMMITTED.exists():
        committed = report.read_measurement(report.COMMITTED.read_text(encoding="utf-8"))
        assert (
            json.loads(report.COMMITTED.read_text(encoding="utf-8"))["ratio"]
            == round(committed.ratio, 2)
            and committed.cores > 0
        )


def test_the_parts_of_the_readmes_command_are_those_of_the_report() -> None:
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert f'step "{report.INSTALLATION}"' in run and f'step "{report.TESTS}"' in run
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def test_every_test_that_ci_names_exists() -> None:
    """pytest runs no test at all where one path of several is missing, and it says so only in CI."""
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    words = re.findall(r"(?<=\s)tests/\S+", run)
    assert len(words) > 5
    expanded = subprocess.run(
        ["bash", "-c", "printf '%s\\n' " + " ".join(words)],
        capture_output=True,
        text=True,
        check=True,
    )
    missing = [path for path in expanded.stdout.split() if not (ROOT / path.strip("\"')")).exists()]
    assert not missing
