"""Two-dimensional tensor parallelism, compiled: each axis carries what its closed form says, and no
other axis carries more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mesh_lm.planning.closed_forms.config import expected_of
from sharding_rules.lab.lint import lint
from sharding_rules.lab.report import Report
from tests.sharding_rules.lab.test_collectives import (
    INPUT,
    NOTICES,
    RESIDUALS,
    Program,
    assert_sends,
    compiled,
)

COMPILE_BUDGET = 60
pytestmark = [pytest.mark.deviceless, pytest.mark.slow]

WIDE: dict[str, Any] = {"tensor": 4, "extra": ("tensor_y=2",)}
SQUARE: dict[str, Any] = {"tensor": 2, "extra": ("tensor_y=2",)}
WITH_FSDP = Program("zero2+hsdp+megatron_2d", "full", "gpt", {"data": 2, "fsdp": 2, **WIDE}, 2)
PROGRAMS = [
    WITH_FSDP,
    Program("megatron_2d", "none", "llama", SQUARE, 1, rows=2),
    Program("megatron_2d", "save_names", "gpt", {"data": 2, **SQUARE}, 1, rows=2),
    Program("hsdp+megatron_2d", "full", "llama", {"data": 2, "fsdp": 2, **SQUARE}, 2),
    Program("zero3+megatron_2d", "save_names", "llama", {"data": 2, **SQUARE}, 2),
    Program(
        "distributed+megatron_2d",
        "save_names",
        "gpt",
        {"pipeline": 2, "data": 2, **SQUARE},
        4,
        pipeline=RESIDUALS[1],
    ),
    Program("megatron_2d", "full", "gpt", {"pipeline": 2, "data": 2, **WIDE}, 4, pipeline=INPUT[1]),
    Program("megatron_2d", "full", "llama", WIDE, 2),
]


def each(programs: list[Program]) -> list[Any]:
    return [
        pytest.param(p, id=str(p), marks=() if p is WITH_FSDP else pytest.mark.exhaustive)
        for p in programs
    ]


def run(program: Program, reports: str) -> tuple[Any, Report]:
    """With few kv heads, over `tensor` alone."""
    config = program.config
    if program.model == "llama" and program.mesh["tensor"] == 4:
        config = dataclasses.replace(
            config,
            rules=config.rules.replace(config.rules.name, activations={"kv_heads": "tensor"}),
        )
    return config, compiled(config, reports)


@pytest.mark.parametrize("program", each(PROGRAMS))
def test_sends_what_the_closed_form_says(reports: str, program: Program) -> None:
    config, report = run(program, reports)
    assert not report.warnings
    assert_sends(report, expected_of(config))
    assert not report.count("all-to-all") and not report.count(
        "collective-permute", axis="tensor_y"
    )
    assert {one.check for one in lint(report, config.rules)} <= NOTICES
    assert report.axis_nodes["tensor_y"] == 1, "next to tensor, in one node"


@pytest.mark.exhaustive
def test_other_axes_carry_no_more_than_in_one_dimension(reports: str) -> None:
    """On as many devices, each matrix in as many shards; and both axes together carry less."""
    one = dataclasses.replace(
        WITH_FSDP, preset="zero2+hsdp+megatron", mesh={"data": 2, "fsdp": 2, "tensor": 8}
    )
    (_, square), (_, plain) = run(WITH_FSDP, reports), run(one, reports)
    for axis in ("data", "fsdp"):
        assert square.wire_bytes([axis]) <= 1.001 * plain.wire_bytes([axis])
    tensor = plain.wire_bytes(["tensor"])
    assert square.wire_bytes(["tensor"]) + square.wire_bytes(["tensor_y"]) < tensor
