"""F23: random damage to every kind of file that a run reads. No result may differ in silence, and
no error may be a traceback."""

from collections.abc import Callable
from pathlib import Path

import pytest
from fault.damage import OUTCOMES
from fault.targets import KINDS

COMPILE_BUDGET = 400
pytestmark = pytest.mark.fault


@pytest.mark.parametrize("kind", KINDS)
def test_f23_random_damage(
    kind: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Hundreds of times a kind: refused with one error, recovered and said, or without effect."""
    (root := tmp_path / "run").mkdir()
    count, bad = KINDS[kind].make(root).attacked(KINDS[kind].times, kind)
    record_property("files", KINDS[kind].what)
    for outcome in OUTCOMES:
        record_property(outcome, count[outcome])
    assert not bad, "\n".join(bad)
