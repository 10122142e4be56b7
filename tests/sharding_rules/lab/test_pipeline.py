"""What XLA makes of a small pipelined step for 16 H100s: counts per stage, and hops that lie beside
the slots."""

from __future__ import annotations

import jax
import pytest

from mesh_lm.planning.vocabulary import VOCABULARY
from sharding_rules.lab import compile_report, h100
from sharding_rules.lab.flags import options
from sharding_rules.lab.lint import lint
from sharding_rules.lab.report import Report
from tests.sharding_rules.lab.toy_pipeline import LAYERS, B, D, F, S, V, arguments, slots, step

COMPILE_BUDGET = 3
pytestmark = pytest.mark.deviceless

P, M, TENSOR, DATA = 4, 8, 2, 2
TICKS = M + 2 * (P - 1)
TOKENS = B // DATA * S
X = 2 * TOKENS * D
"""Bytes of what a stage sends to the next."""
PRODUCT = 2 * TOKENS * D * F // TENSOR
"""FLOPs of one of the two matmuls of a layer."""
TABLE = 2 * TOKENS * D * V // TENSOR


def compiled(reports: str, flags: str, **mistake: bool) -> Report:
    mesh = h100(pipeline=P, data=DATA, tensor=TENSOR)
    known = {
        "options": options(flags),
        "slots": slots(P, M),
        "vocabulary": VOCABULARY,
        "cache": reports,
    }
    return compile_report(step(mesh, M, **mistake), *arguments(mesh, M), mesh=mesh, **known)


@pytest.fixture(scope="module")
def report(reports: str) -> Report:
    return compiled(reports, "pipeline")


def test_collectives_count_as_often_as_their_slot_runs(report: Report) -> None:
    sums = {
        (one.where.part, one.where.phase): (one.times, one.conditional, one.shapes)
        for one in report.select("all-reduce", ("tensor",))
        if one.payload == X
    }
    x = (f"bf16[{B // DATA},{S},{D}]",)
    assert sums == {
        ("layers/mlp", "forward"): (M * LAYERS, True, x),
        ("layers/mlp", "recompute"): (M * LAYERS, True, x),
        ("layers/mlp", "backward"): (M * LAYERS, True, x),
        ("embed", "forward"): (M, True, x),
        ("embed", "recompute"): (M, True, x),
        ("head", "backward"): (M, True, x),
    }
    assert {one.axes for one in report.collectives if one.conditional} == {("tensor",)}, (
        "no group in a branch spans two stages"
    )
    assert report.count("all-reduce", "data") == 3, "gradients once in a step"
    assert report.wire_bytes("pipeline", "collective-permute") == 2 * TICKS * X


def test_flops_of_each_stage(report: Report) -> None:
    """A layer: forward, again for its stage, again for itself (the first matmul), and backward
    twice that; table: once or thrice."""
    stage = M * LAYERS * (2 + 2 + 1 + 4) * PRODUCT
    assert report.stage_flops == (stage + 3 * M * TABLE, stage, stage, stage + 3 * M * TABLE)
    assert sum(report.flops.values()) == sum(report.stage_flops) // P
    assert report.flops["forward"] == M * (LAYERS * 2 * PRODUCT * P + 2 * TABLE) // P


def test_hops_lie_beside_the_slots(report: Report, reports: str) -> None:
    """With one collective at a time, which is XLA's default, neither hop has anything beside it."""
    hops = list(report.select("collective-permute", "pipeline"))
    assert sorted(one.where.phase for one in hops) == ["backward", "forward"] and not any(
        one.conditional for one in hops
    )
    assert (
        all(one.flops_hidden_behind >= LAYERS * 2 * PRODUCT for one in hops) and lint(report) == ()
    )
    default = compiled(reports, "default")
    assert not any(
        one.flops_hidden_behind for one in default.select("collective-permute", "pipeline")
    )
    assert [one.check for one in lint(default)] == ["exposed-hop"] * 2
    assert report.timeline and default.timeline and report.timeline.step < default.timeline.step


def test_stash_and_accumulators_in_a_conditional_are_copied_whole(reports: str) -> None:
    """By the XLA of jax 0.10; that of 0.11 changes them in place, but hides no hop of such a
    program."""
    found = {one.check: one for one in lint(compiled(reports, "pipeline", carry=True))}
    copied = {one.shape for one in compiled(reports, "pipeline", carry=True).copies}
    held = {
        f"bf16[{2 * P - 1},{B // DATA},{S},{D}]",
        f"f32[{LAYERS},{D},{F // TENSOR}]",
        f"f32[{V // TENSOR},{D}]",
    }
    assert found.keys() == (
        {"whole-copy", "exposed-hop"} if jax.__version_info__ < (0, 11) else {"exposed-hop"}
    )
    assert held <= copied if "whole-copy" in found else not held & copied
