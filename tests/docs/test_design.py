"""docs/design.md names files that exist, and its picture shows the rooms of today."""

import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/design.md").read_text(encoding="utf-8")
BASES = (ROOT, ROOT / "mesh_lm", ROOT / "sharding_rules", ROOT / "pallas_kernels")


def test_the_picture_shows_the_rooms() -> None:
    script = ROOT / "docs/images/rooms.py"
    spec = importlib.util.spec_from_file_location("rooms", script)
    assert spec and spec.loader
    rooms = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rooms)
    assert rooms.PICTURE.read_text(encoding="utf-8") == rooms.picture(), (
        "python docs/images/rooms.py draws it again"
    )
    drawn = {name for layer in rooms.layers() for name in layer}
    packages = {path.parent.name for path in (ROOT / "mesh_lm").glob("*/__init__.py")}
    assert packages - drawn <= {"configs"}


def test_every_file_is_there() -> None:
    paths = set(re.findall(r"`([\w/]+(?:/|\.py))`", PAGE))
    paths = {path for path in paths if "NAME" not in path and "FILE" not in path}
    assert len(paths) >= 35
    missing = [path for path in paths if not any((base / path).exists() for base in BASES)]
    assert not missing


def test_one_step_has_forty_lines() -> None:
    block = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert block
    assert len(block[1].splitlines()) <= 40
