"""Planted bugs: each costs what it says, and lint names it; of programs with nothing wrong lint says nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sharding_rules.lab.plants.catalogue import ABORTING, PLANTS
from tests.sharding_rules.lab.plants.plain import Plain
from tests.sharding_rules.lab.plants.program import Plant, Program
from tests.sharding_rules.lab.plants.valid import VALID

COMPILE_BUDGET = 60
pytestmark = pytest.mark.deviceless
ROOT = Path(__file__).parents[3]

MISSED = {
    "logits gathered", "embed and mlp swapped", "stack gathered before the scan", "head in a transposed layout",
    "embedding gradient all-reduced", "batch gathered over fsdp", "moments replicated", "hop of whole sequences", "hop in f32",
    "master gathered in f32", "gradients all-reduced for ZeRO-2", "update of whole weights", "residual stream not sharded",
    "batch not sharded", "down sharded as up", "bias table replicated", "hidden activations not sharded", "moments replicated, plain JAX",
    "gradients averaged in each microbatch", "lookup by indexing", "cross-entropy without a constraint",
}  # fmt: skip
FALSE_ALARMS = {
    "ring matmul", "ulysses", "mixture of experts", "ragged exchange", "hierarchical sums", "gpipe", "ring attention", "halo exchange",
    "scalar loss",
}  # fmt: skip
"""What lint cannot do yet: 21 of 27 bugs are not named, and 9 of 18 programs with nothing wrong have errors."""


def each(programs: Any, failing: set[str]) -> list[Any]:
    def marks(one: Any) -> list[pytest.MarkDecorator]:
        quick = isinstance(one, Plain) or isinstance(getattr(one, "healthy", None), Plain)
        return [pytest.mark.slow] * (not quick) + [pytest.mark.xfail(strict=True)] * (one.name in failing)

    return [pytest.param(one, id=one.name, marks=marks(one)) for one in programs]


def test_there_are_as_many_as_promised() -> None:
    names = [one.name for one in (*PLANTS, *ABORTING)]
    assert len(names) >= 20 and len(set(names)) == len(names) and len(VALID) >= 12


@pytest.mark.parametrize("plant", each(PLANTS, set()))
def test_a_bug_costs_something(reports: str, plant: Plant) -> None:
    """One that changes nothing in the compiled program would be no bug, and not naming it no fault."""
    with pytest.MonkeyPatch.context() as patch:
        planted = plant.plant(patch).compile(reports)
    effect = plant.effect(reports, planted)
    assert all(effect[name] >= least for name, least in plant.costs.items()), f"{plant.name}: {effect}"


@pytest.mark.parametrize("plant", each(PLANTS, MISSED))
def test_a_bug_is_named(reports: str, plant: Plant) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = plant.plant(patch).compile(reports).findings()
    assert plant.named_by(found), f"{plant.mistake}\n" + "\n".join(map(str, found))


@pytest.mark.parametrize("plant", each(ABORTING, MISSED))
def test_an_abort_is_named(reports: str, plant: Plant) -> None:
    """XLA ends the process that compiles: here another one."""
    code = (
        "import jax, pytest; jax.config.update('jax_platforms', 'cpu')\n"
        "from tests.sharding_rules.lab.plants.catalogue import ABORTING\n"
        f"plant = next(one for one in ABORTING if one.name == {plant.name!r})\n"
        f"with pytest.MonkeyPatch.context() as patch: plant.plant(patch).compile({reports!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and all(word in done.stderr for word in plant.says), (done.returncode, done.stderr[-2000:])


@pytest.mark.parametrize("program", each(dict.fromkeys((*(one.healthy for one in PLANTS), *VALID)), FALSE_ALARMS))
def test_a_program_with_nothing_wrong_has_no_errors(reports: str, program: Program) -> None:
    found = [one for one in program.compile(reports).findings() if one.severity != "notice"]
    assert not found, "\n".join(map(str, found))
