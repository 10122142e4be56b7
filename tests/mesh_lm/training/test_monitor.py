"""Where metrics go; whether a restarted run still has to draw its curve and write its sample."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mesh_lm.training.monitor import Monitor


@pytest.mark.parametrize(
    ("ages", "has_sample", "finished"),
    [
        ({"2": 9, "4": 5, "loss.png": 4, "sample.txt": 4}, True, True),
        ({"2": 9, "4": 5, "loss.png": 5, "sample.txt": 5}, True, True),
        # of a run of two steps, which was trained on
        ({"2": 9, "4": 5, "loss.png": 7, "sample.txt": 7}, True, False),
        ({"2": 9, "10": 5, "loss.png": 4, "sample.txt": 7}, True, False),
        ({"2": 9, "10": 5, "loss.png": 4, "sample.txt": 7}, False, True),
        ({"4": 5, "loss.png": 4}, True, False),
        ({"loss.png": 4}, False, False),
    ],
)
def test_what_an_earlier_run_wrote_is_not_that_of_a_longer_one(
    tmp_path: Path, ages: dict[str, int], has_sample: bool, finished: bool
) -> None:
    """ages: seconds since each checkpoint and file was written."""
    (tmp_path / "checkpoints").mkdir()
    for name, age in ages.items():
        path = (
            tmp_path / "checkpoints" / name / "metadata" / "metadata"
            if name.isdecimal()
            else tmp_path / name
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("", encoding="utf-8")
        os.utime(path, (1e9 - age, 1e9 - age))
    monitor: Any = SimpleNamespace(speaks=True, output=tmp_path)
    assert Monitor.has_finished(monitor, has_sample=has_sample) is finished
    monitor.speaks = False
    assert not Monitor.has_finished(monitor, has_sample=has_sample)


@pytest.mark.parametrize("is_due", [True, False])
def test_arrays_of_a_step_are_written_with_its_row(is_due: bool) -> None:
    """The terminal and the log get numbers alone."""
    shown, written = [], []

    def show(step: int, metrics: dict[str, Any]) -> dict[str, float]:
        shown.append((step, {*metrics}))
        return {"loss": 2.0} if is_due else {}

    metrics = {"loss": np.float32(2), "expert_loads": np.ones((2, 4))}
    monitor: Any = SimpleNamespace(
        _unread=(3, metrics),
        _progress=SimpleNamespace(step=show),
        _data_row=lambda step: {"epoch": 1.0},
        _write=lambda step, row, arrays: written.append((step, row, {*arrays})),
    )
    Monitor.flush(monitor)
    assert shown == [(3, {"loss"})]
    assert written == ([(3, {"loss": 2.0, "epoch": 1.0}, {"expert_loads"})] if is_due else [])
