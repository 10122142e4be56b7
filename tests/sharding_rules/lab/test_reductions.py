"""Sums of gradients in int8 and in two levels, in the compiled step: types, bytes by mesh axis, and
what lint says of them."""

from __future__ import annotations

import pytest
from jax.sharding import AbstractMesh

from mesh_lm.optim import is_matrix
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.planning.closed_forms.reductions import (
    all_reduce,
    by_node,
    by_node_halves,
    int8_half,
)
from mesh_lm.planning.closed_forms.sizes import padded
from sharding_rules import AXES, PRESETS, Shard
from sharding_rules.lab.diff import ledger_text
from sharding_rules.lab.hlo import arrays
from sharding_rules.lab.lint import lint
from sharding_rules.lab.lint_reductions import reduced
from sharding_rules.lab.report import Report
from tests.sharding_rules.lab.test_collectives import GPT, NOTICES, Program, compiled

COMPILE_BUDGET = 8
pytestmark = pytest.mark.deviceless

LAYOUT = ModelLayout.of(GPT, Shard(PRESETS["ddp"], AbstractMesh((1,) * len(AXES), AXES)))
SIZES = {name: leaf.nbytes // 4 for name, leaf in LAYOUT.leaves.items()}
MATRICES = {name: n for name, n in SIZES.items() if is_matrix(name, LAYOUT.axes[name])}
VECTORS = sum(SIZES.values()) - sum(MATRICES.values())
"""Elements of each matrix, and of all vectors."""


def flat_vectors(replicas: int) -> list[int]:
    """Elements of each flat vector: one for each layer, and one for each table."""
    of_layer = sum(n for name, n in MATRICES.items() if name in LAYOUT.stacked) // GPT.n_layers
    tables = [n for name, n in MATRICES.items() if name not in LAYOUT.stacked]
    return [padded(n, replicas) for n in [of_layer] * GPT.n_layers + tables]


def sent(report: Report, *axes: str) -> dict[str, float]:
    """Type -> bytes that a device sends along exactly these axes."""
    found: dict[str, float] = {}
    for one in report.select(axis=axes):
        pieces = arrays(" ".join(one.shapes))
        for piece in pieces:
            share = piece.bytes / sum(each.bytes for each in pieces)
            found[piece.dtype] = found.get(piece.dtype, 0) + one.times * one.wire * share
    return found


def report_of(program: Program, reports: str) -> Report:
    """Checks that nothing in it is an error, too."""
    report = compiled(program.config, reports)
    assert not report.warnings
    assert {one.check for one in lint(report, program.config.rules)} <= NOTICES, ledger_text(report)
    return report


def near(*bytes: float) -> object:
    """Besides a few scalars."""
    return pytest.approx(sum(bytes), rel=1e-4, abs=1000)


@pytest.mark.slow
def test_int8_sends_a_quarter(reports: str) -> None:
    program = Program("ddp+reduce_int8", "full", "gpt", {"data": 8}, 2)
    report, half = report_of(program, reports), int8_half(MATRICES.values(), 8)
    found = sent(report, "data")
    assert found == {
        "s8": near(2 * half["s8"]),
        "f32": near(2 * half["f32"], all_reduce(VECTORS, 8)),
    }, ledger_text(report)
    assert 0.25 < sum(found.values()) / all_reduce(sum(SIZES.values()), 8) < 0.26
    kinds = {
        one.kind
        for one in report.select(axis="data")
        if any("s8[" in shape for shape in one.shapes)
    }
    assert kinds == {"all-to-all", "all-gather"}
    assert reduced(report, program.config.rules).startswith("s8 (")
    (told,) = [one for one in lint(report, PRESETS["ddp"]) if one.check == "reduction-dtype"][:1]
    assert (
        told.severity == "error"
        and "summed in s8 over data; rules.reduction='auto' asks for float32" in told.text
    )


@pytest.mark.slow
def test_int8_of_flat_vectors(reports: str) -> None:
    """Gradients in int8, the new weights in bf16 as ever."""
    report, vectors = (
        report_of(Program("distributed+reduce_int8", "full", "gpt", {"data": 8}, 2), reports),
        flat_vectors(8),
    )
    half = int8_half(vectors, 8)
    found = sent(report, "data")
    assert found["s8"] == near(half["s8"]) and found["f32"] == near(
        half["f32"], all_reduce(VECTORS, 8)
    ), ledger_text(report)
    assert found["bf16"] == near(7 / 8 * 2 * sum(vectors))


NODE = {"data": 2, "extra": ("node=8",)}


@pytest.mark.slow
def test_two_levels_send_an_eighth_across_nodes(reports: str) -> None:
    report = report_of(Program("by_node", "full", "gpt", NODE, 1, rows=8), reports)
    inside, across = by_node(MATRICES.values(), 8, 2)
    assert sent(report, "node") == {"f32": near(inside)} and sent(report, "data") == {
        "f32": near(across)
    }, ledger_text(report)
    assert sent(report, "data", "node")["f32"] == near(all_reduce(VECTORS, 16))
    assert across == pytest.approx(all_reduce(sum(MATRICES.values()), 2) / 8, rel=1e-5)


@pytest.mark.exhaustive
def test_two_levels_of_flat_vectors(reports: str) -> None:
    report, vectors = (
        report_of(Program("distributed+by_node", "full", "gpt", NODE, 1, rows=8), reports),
        flat_vectors(16),
    )
    gradients, weights = by_node_halves(vectors, 8, 2, 4), by_node_halves(vectors, 8, 2, 2)
    for axis, of_gradients, of_weights in zip(("node", "data"), gradients, weights, strict=True):
        assert sent(report, axis) == {"f32": near(of_gradients), "bf16": near(of_weights)}, (
            ledger_text(report)
        )


def test_the_bytes_by_hand() -> None:
    """16 replicas of a million elements, two nodes of eight."""
    assert all_reduce(10**6, 16) == 7.5e6
    assert int8_half([16 * 256 * 10], 16) == {"s8": 15 * 2560, "f32": 15 * 40}
    assert by_node([1 << 20], 8, 2) == (2 * 7 / 8 * 4 * 2**20, 4 * 2**17)
