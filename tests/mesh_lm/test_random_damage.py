"""A thin slice of F23 (`tests/fault/test_random_damage.py`): twenty damaged files of each kind that
needs no compilation."""

from pathlib import Path

import pytest
from fault.targets import KINDS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["config", "goodput", "metrics", "text"])
def test_random_damage(kind: str, tmp_path: Path) -> None:
    (root := tmp_path / "run").mkdir()
    count, bad = KINDS[kind].make(root).attacked(20, kind)
    assert not bad, "\n".join(bad)
    assert count["refused"] + count["recovered"] >= 12, count
