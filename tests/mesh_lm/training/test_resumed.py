"""What a run says when it resumes with another config."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mesh_lm.config import OptimizerConfig
from mesh_lm.optim import Optimizer
from mesh_lm.training import session

COMPILE_BUDGET = 20


@pytest.mark.parametrize(
    ("also", "clause"),
    [
        ((), " (the learning rate at step 401 is 5.49e-03, was 1.00e-03)"),
        (("optimizer.warmup_steps: 9 -> 0",), ""),
    ],
)
def test_another_length_names_the_learning_rates(also: tuple[str, ...], clause: str) -> None:
    """If the optimizer's own fields have changed, too, only the changes are told."""
    config = OptimizerConfig(
        learning_rate=1e-2, warmup_steps=0, final_fraction=0.1, schedule="linear"
    )
    run: Any = SimpleNamespace(
        unfinished=True, step=400, optimizer=Optimizer(config, 801), config=None
    )
    saved: Any = SimpleNamespace(
        config={"train": {"steps": 400}},
        changed=lambda config: ["train.steps: 400 -> 801", *also],
        certificate="-",
    )
    said = session._resumed(saved, run, cast("Any", SimpleNamespace(changed=[])))
    assert said.splitlines()[1] == f"  changed since: train.steps: 400 -> 801{clause}"
