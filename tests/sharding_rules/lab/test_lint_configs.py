"""Lint of every config that ships, compiled for the GPUs of its row in docs/configs.md: no errors,
and notices only of what is so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import plan_page
from mesh_lm.config import load
from mesh_lm.planning.program import Program, flags_of
from sharding_rules.lab.flags import options
from sharding_rules.lab.lint import lint

COMPILE_BUDGET = 20
pytestmark = pytest.mark.deviceless
DEVICES = {
    row["name"]: row["devices"]
    for row in json.loads(plan_page.newest().read_text(encoding="utf-8"))["tables"][
        plan_page.CONFIGS
    ]["rows"]
}
SLOW = ("gpt_175b",)
"""The one that CI lints, with stages and tensor parallelism. The others are exhaustive."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, "slow" if name in SLOW else "exhaustive"))
        for name in DEVICES
    ],
)
def test_a_shipped_config_has_no_errors(reports: str, name: str) -> None:
    config = load(name)
    config = dataclasses.replace(
        config, launch=dataclasses.replace(config.launch, compile_cache=str(Path(reports).parent))
    )
    made = Program.of(config, "h100", DEVICES[name])
    found = lint(made.compile(options(flags_of(config, "h100"))), config.rules, made.layout.axes)
    assert not [one for one in found if one.severity == "error"], "\n".join(map(str, found))
    # no backward slot hides hops while a pipeline fills
    assert {one.check for one in found} <= {"exposed-hop"}
