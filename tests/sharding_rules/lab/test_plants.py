"""Planted bugs: each costs what it says, and lint names it; of programs with nothing wrong lint
says nothing."""

from __future__ import annotations

from typing import Any

import pytest

from sharding_rules.lab import LabError
from tests.sharding_rules.lab.plants.catalogue import ABORTING, PLANTS
from tests.sharding_rules.lab.plants.held_out import HELD_OUT
from tests.sharding_rules.lab.plants.program import Plant, Program
from tests.sharding_rules.lab.plants.trainer import ONE_ROW
from tests.sharding_rules.lab.plants.valid import VALID

COMPILE_BUDGET = 75
pytestmark = pytest.mark.deviceless
QUICK = {
    "tensor axis outermost", "batch not sharded", "hidden activations not sharded",
    "bias table replicated", "tensor parallel",
    "ring matmul", "hierarchical sums", "ragged exchange", "gpipe", "scalar loss",
}  # fmt: skip
"""Those that the fast suite has, in plain JAX: they compile in a second each, those of the trainer
in six."""


LONG = {
    "hop of whole sequences", "logits gathered", "head in a transposed layout",
    "keys of the whole batch", "master gathered in f32",
    "hop in f32", "activations['mlp'] forgotten", "kv heads gathered",
    "gradients all-reduced for ZeRO-2", "update of whole weights",
    "heads not sharded", "norm in f32", "cross-entropy without a constraint", "llama, fsdp",
    "gpt, zero2+megatron_sp",
    "gpt, distributed+megatron_sp", "llama, hsdp+megatron_sp", "gpt, one sequence on a device",
    "gpt, zero1+megatron_sp, two stages",
    "moments replicated", "batch gathered over fsdp",
}  # fmt: skip
"""Those of the trainer that CI leaves out: it has one for each check of lint, in the trainer or in
plain JAX, and a program with nothing wrong; test_collectives.py has one with stages."""


def each(programs: Any) -> list[Any]:
    """Plants or programs as parameters of a test."""
    marks = dict.fromkeys(LONG, pytest.mark.exhaustive) | dict.fromkeys(QUICK, ())
    return [
        pytest.param(one, id=one.name, marks=marks.get(one.name, pytest.mark.slow))
        for one in programs
    ]


def test_there_are_as_many_as_promised() -> None:
    names = [one.name for one in (*PLANTS, *ABORTING)]
    assert len(names) >= 20 and len(set(names)) == len(names) and len(VALID) >= 12


@pytest.mark.parametrize("plant", each(PLANTS))
def test_a_bug_costs_something(reports: str, plant: Plant) -> None:
    """One that changes nothing in the compiled program would be no bug, and not naming it no
    fault."""
    with pytest.MonkeyPatch.context() as patch:
        planted = plant.plant(patch).compile(reports)
    effect = plant.effect(reports, planted)
    assert all(effect[name] >= least for name, least in plant.costs.items()), (
        f"{plant.name}: {effect}"
    )


@pytest.mark.parametrize("plant", each(PLANTS))
def test_a_bug_is_named(reports: str, plant: Plant) -> None:
    with pytest.MonkeyPatch.context() as patch:
        found = plant.plant(patch).compile(reports).findings()
    said = f"{plant.mistake}\n" + "\n".join(map(str, found))
    assert plant.named_by(found), said
    assert len([one for one in found if one.severity == "error"]) <= 2, (
        f"one mistake, and many findings: {said}"
    )


@pytest.mark.parametrize("plant", each(HELD_OUT))
def test_a_bug_that_lint_was_not_written_for(reports: str, plant: Plant) -> None:
    with pytest.MonkeyPatch.context() as patch:
        planted = plant.plant(patch).compile(reports)
    effect, found = plant.effect(reports, planted), planted.findings()
    assert all(effect[name] >= least for name, least in plant.costs.items()), (
        f"{plant.name}: {effect}"
    )
    assert plant.named_by(found), f"{plant.mistake}\n" + "\n".join(map(str, found))


@pytest.mark.parametrize("plant", each(ABORTING))
def test_an_abort_is_named(reports: str, plant: Plant) -> None:
    """XLA ends the process that compiles, which is a child of this one."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(LabError) as error:
        plant.plant(patch).compile(reports)
    assert all(word in str(error.value) for word in plant.says), error.value


@pytest.mark.parametrize(
    "program",
    each(dict.fromkeys((*(one.healthy for one in (*PLANTS, *HELD_OUT)), ONE_ROW, *VALID))),
)
def test_a_program_with_nothing_wrong_has_no_errors(reports: str, program: Program) -> None:
    found = [one for one in program.compile(reports).findings() if one.severity != "notice"]
    assert not found, "\n".join(map(str, found))
