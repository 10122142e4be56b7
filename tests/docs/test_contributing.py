"""CONTRIBUTING.md names things that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_the_tree_is_there() -> None:
    tree = re.search(r"^```\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert tree
    names = []
    for line in tree[1].splitlines():
        name = line.split()[0]
        names.append(f"mesh_lm/{name}" if line.startswith("  ") else name)
    assert len(names) == 26
    assert not [name for name in names if not (ROOT / name).exists()]
    rooms = {path.parent.name for path in (ROOT / "mesh_lm").glob("*/__init__.py")} - {"configs"}
    assert rooms == {
        name.split("/")[1] for name in names if name.startswith("mesh_lm/") and name != "mesh_lm/"
    }


def test_its_files_are_there() -> None:
    paths = re.findall(r"\(([\w/.]+)\)|`([\w./]+/[\w.]+)`", PAGE)
    named = {first or second for first, second in paths if "." in (first or second)}
    assert {"docs/glossary.md", "LICENSE"} & named
    assert not [name for name in named if not (ROOT / name).exists()]
