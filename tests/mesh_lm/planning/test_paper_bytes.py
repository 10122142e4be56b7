"""The formulas that price a step send what the closed forms say: two derivations, one vectorised."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from mesh_lm.config import load
from mesh_lm.config.layout import with_fields
from mesh_lm.errors import ConfigError
from mesh_lm.planning.best import fields_of
from mesh_lm.planning.closed_forms.config import expected_of
from mesh_lm.planning.closed_forms.terms import total
from mesh_lm.planning.paper.constants import FITTED, Constants
from mesh_lm.planning.paper.layouts import Layouts, enumerated
from mesh_lm.planning.paper.price import price
from mesh_lm.planning.paper.sizes import Hardware, ModelSizes
from mesh_lm.training.check import check
from sharding_rules import ShardingRuleError

COMPILE_BUDGET = 0
SAMPLE = 60


def nothing_hidden() -> Constants:
    """The constants of a program that waits for every collective."""
    changed = {}
    for field in dataclasses.fields(FITTED):
        value = getattr(FITTED, field.name)
        if field.name.startswith("hidden") or field.name == "window":
            changed[field.name] = tuple(0.0 for _ in value) if isinstance(value, tuple) else 0.0
    return dataclasses.replace(FITTED, **changed, exposed_tables=1.0, exposed_tables_zero3=1.0)


def one_byte_a_second(n_devices: int) -> Hardware:
    """A GPU for which only the links take time: a second for each byte."""
    return Hardware(
        matmul=math.inf,
        attention=math.inf,
        attention_backward=math.inf,
        memory_bandwidth=math.inf,
        memory=math.inf,
        nvlink=1.0,
        network=1.0,
        node=n_devices,
    )


@pytest.mark.parametrize(
    ("name", "n_devices"), [("llama3_8b", 64), ("gpt_175b", 1024), ("gpt_1_3b", 8)]
)
def test_bytes_are_those_of_the_closed_forms(name: str, n_devices: int) -> None:
    config = load(name)
    sizes = ModelSizes.of(config)
    assert sizes is not None
    layouts = enumerated(sizes, n_devices, 8)
    differences = {"stages that recompute": [], "others": []}
    for i in np.random.default_rng(0).choice(len(layouts), SAMPLE, replace=False):
        row = layouts.row(int(i))
        try:
            changed = check(with_fields(config, fields_of(row, config)), n_devices)
        except (ConfigError, ShardingRuleError):
            continue
        sent = total(expected_of(changed))
        hardware = one_byte_a_second(n_devices)
        waiting = price(sizes, Layouts.of([row]), hardware, nothing_hidden()).exposed[0]
        recomputes = row["pipeline"] > 1 and not row["keeps_residuals"]
        kind = "stages that recompute" if recomputes else "others"
        differences[kind].append(abs(waiting / sent - 1) if sent else waiting)
    assert len(differences["others"]) > SAMPLE / 4
    assert max(differences["others"]) < 0.05
    assert float(np.median(differences["others"])) < 0.01
    # A stage that recomputes has one more tick, and its collectives are not priced apart.
    assert max(differences["stages that recompute"], default=0) < 0.15
