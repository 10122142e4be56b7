"""The search for a layout with the real compiler: without knowing the layout of a shipped config, it
finds one that is as fast."""

from __future__ import annotations

import pytest

from mesh_lm.config import TrainConfig, load
from mesh_lm.planning.best import TIE, search
from mesh_lm.planning.program import compile_config, flags_of
from mesh_lm.training.check import check
from sharding_rules.lab import Report
from sharding_rules.lab.flags import options

COMPILE_BUDGET = 14
TARGET = "h100"


@pytest.mark.slow
@pytest.mark.deviceless
@pytest.mark.parametrize(("name", "n_devices"), [("llama3_8b", 64), ("gpt_1_3b", 8)])
def test_finds_the_layout_of_a_shipped_config(name: str, n_devices: int) -> None:
    """benchmarks/best_layouts.py does so for all configs."""

    def compiled(config: TrainConfig) -> Report:
        return compile_config(config, TARGET, n_devices, options(flags_of(config, TARGET)))

    config = load(name)
    found = search(config, n_devices, TARGET, compiled, compiles=6, from_scratch=True)
    own = compiled(check(config, n_devices))
    assert found.best is not None and found.best.report.fits and own.timeline is not None
    assert found.best.seconds <= (1 + TIE) * own.timeline.step / 1e6
