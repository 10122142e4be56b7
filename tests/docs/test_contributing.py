"""CONTRIBUTING.md names things that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_tree_is_there() -> None:
    tree = re.search(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names = [line.split()[0] for line in tree[1].splitlines()] if tree else []
    assert len(names) == 8 and not [name for name in names if not (ROOT / name).exists()]


def test_its_files_are_there() -> None:
    paths = re.findall(r"\(([\w/.]+)\)|`([\w./]+/[\w.]+)`", PAGE)
    named = {first or second for first, second in paths if "." in (first or second)}
    assert {"docs/glossary.md", "LICENSE"} & named
    assert not [name for name in named if not (ROOT / name).exists()]
