"""The documentation uses the field's words (docs/style.md), and the list of private words finds
what it is for."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import style

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "style.md"
PAGES = [
    path
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md"))
    if path != GUIDE
]
PROGRAMS = ["mesh_lm", "sharding_rules", "pallas_kernels", "configs", "benchmarks"]
"""Directories whose docstrings, comments and messages are held to the list as well."""


def rows(heading: str) -> list[tuple[str, str]]:
    """The pairs of a table of the guide."""
    section = GUIDE.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| (?!before|-)(.+) \| (.+) \|$", section, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages(page: Path) -> None:
    assert not style.problems(page)


@pytest.mark.slow
@pytest.mark.parametrize("package", PROGRAMS)
def test_programs(package: str) -> None:
    assert not [
        problem
        for file in sorted((ROOT / package).glob("**/*.py"))
        for problem in style.problems(file)
    ]


def test_the_guides_pairs() -> None:
    words, sentences = rows("Private words"), rows("Sentences")
    assert len(words) + len(sentences) >= 20
    for before, after in words:
        assert style.found(before), f"not found in: {before}"
        assert not style.found(after), after
    assert not [after for _, after in sentences if style.found(after)]


def test_fine_english_is_allowed() -> None:
    for text in (
        "the network is cut for a minute",
        "hidden behind a matmul",
        "the whole config",
        "a cutoff",
        "it is gone",
    ):
        assert not style.found(text), text


def test_what_is_read_of_a_page() -> None:
    """Prose, tables, headings; neither code nor comments nor targets of links."""
    text = (
        "# cut\n\nIt is\ncut `cut` [here](cut.md) <!-- cut -->\n\n```sh\ncut\n```\n| cut | x |\n"
        + "x " * 61
        + "\n"
    )
    assert [number for number, part in style.paragraphs(text) for _ in style.found(part)] == [
        1,
        3,
        9,
    ]
    assert style.long_lines(text) == [10]


def test_what_is_read_of_a_program(tmp_path: Path) -> None:
    """Docstrings, comments, and messages with values in them; no short strings."""
    source = '''"""cut"""\n@dataclass\nclass A:\n    x: int = 0  # cut\n    """is cut"""\n
def f(x):\n    "cut all of it"\n    raise E(f"the axis {x} is cut over it" + "cut")\n'''
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/style.py"), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 1 and [
        line.split(": ")[0].rpartition(":")[2] for line in lines[:-1]
    ] == ["1", "4", "5", "8", "9"]
    assert lines[-1] == "5 in all"
