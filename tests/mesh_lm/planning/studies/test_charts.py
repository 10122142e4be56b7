"""What pictures are made of."""

from __future__ import annotations

import itertools

import pytest

from mesh_lm.planning.studies.charts import spread


def test_labels_are_apart_and_in_order() -> None:
    placed = spread([1.0, 1.1, 1.1, 5.0], [1, 1, 2, 1])
    assert placed == sorted(placed) and placed[3] == pytest.approx(5.0, abs=0.5)
    gaps = [b - a for a, b in itertools.pairwise(placed)]
    assert gaps[0] >= 1 - 1e-6 and gaps[1] >= 1.5 - 1e-6
    assert spread([0.0, 3.0], [1, 1]) == [0.0, 3.0]
