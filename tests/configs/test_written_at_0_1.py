"""Every config.json that release 0.1 has written is read as the config that it was."""

import dataclasses
import importlib
from pathlib import Path
from typing import Any, cast

import pytest

from mesh_lm.config import load
from mesh_lm.config.layout import with_fields
from mesh_lm.config.resolved import to_json
from mesh_lm.optim import rule_name

WRITTEN = Path(__file__).parents[1] / "fixtures" / "configs_0_1"
"""By `config.resolved.to_json` at 3f09f97: the shipped configs, and gpt2_124m with each
optimizer."""
CHANGED = {"gpt_tiny"}
"""Configs that were tuned since; see the changelog."""
FASTER = {"megatron_7_1b", "megatron_16b"}
"""Configs that have the same model and batch, and recompute nothing since a search found that to be
faster."""
NAMES = sorted(path.stem for path in WRITTEN.glob("*.json"))
SHIPPED = [name for name in NAMES if not name.startswith("optimizer_")]
RULES_THEN = {
    "adamw": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-7},
    "lion": {"beta1": 0.9, "beta2": 0.95},
    "muon": {"momentum": 0.9, "beta1": 0.9, "beta2": 0.95, "eps": 1e-7},
    "adafactor": {},
}
COMPILE_BUDGET = 0


def test_the_fixtures_are_there() -> None:
    assert len(SHIPPED) >= 17 and len(NAMES) == len(SHIPPED) + 4


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_is_read_as_it_is_today(name: str) -> None:
    written = load(str(WRITTEN / f"{name}.json"))
    shipped = importlib.import_module(f"configs.{name}").get_config()
    if name in CHANGED:
        assert written.model.vocab_size == 4096 and written.train.global_batch == 16
        return
    if name in FASTER:
        written = with_fields(written, {"model.remat": "none", "model.unroll": True})
    assert to_json(written) == to_json(shipped)


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "adafactor"])
def test_an_optimizer_keeps_its_hyperparameters(name: str) -> None:
    """Those that it read; the file has every field, with a momentum of 0.9 and an eps of 1e-7."""
    written = load(str(WRITTEN / f"optimizer_{name}.json"))
    rule = written.optimizer.rule
    assert rule_name(rule) == name
    assert dataclasses.asdict(cast(Any, rule)) == RULES_THEN[name]
    base = importlib.import_module("configs.gpt2_124m").get_config()
    assert to_json(dataclasses.replace(written, optimizer=base.optimizer)) == to_json(base)
