"""Muon with its state divided by layers sends what AdamW sends, and an all-to-all for each exchange
with the owners: nothing is gathered to orthogonalise a matrix."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path

import form_rows
import pytest
from support import shard_on

from mesh_lm.config import OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from mesh_lm.optim import AdamW, Muon, Rule
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.planning.program import compile_config
from sharding_rules import MeshConfig, preset
from sharding_rules.lab.diff import ledger_text
from sharding_rules.lab.lint import lint
from sharding_rules.lab.report import Collective, Report

COMPILE_BUDGET = 30
pytestmark = [pytest.mark.deviceless, pytest.mark.slow]

MODEL = DecoderConfig(
    vocab_size=8000,
    vocab_multiple=1024,
    seq_len=512,
    n_layers=8,
    d_model=512,
    n_heads=8,
    attention="xla",
    remat="none",
)
LAYER = 12 * MODEL.d_model**2 * 4
"""Bytes of a layer's matrices in fp32."""
MATRICES = MODEL.n_layers * LAYER


def config_of(
    rules: str, rule: Rule, mesh: tuple[tuple[str, int], ...], n_layers: int = 8
) -> TrainConfig:
    sizes = dict(mesh)
    return TrainConfig(
        model=dataclasses.replace(MODEL, n_layers=n_layers),
        mesh=dataclasses.replace(MeshConfig(data=1), **sizes),
        rules=preset(rules),
        train=TrainLoop(global_batch=16, microbatches=4 if "pipeline" in sizes else 1),
        optimizer=OptimizerConfig(rule),
        output="owner",
    )


@functools.cache
def compiled(
    reports: str, rules: str, rule: Rule, mesh: tuple[tuple[str, int], ...], n_layers: int = 8
) -> Report:
    config = config_of(rules, rule, mesh, n_layers)
    launch = dataclasses.replace(config.launch, compile_cache=str(Path(reports).parent))
    config = dataclasses.replace(config, launch=launch)
    return compile_config(config, "h100", math.prod(size for _, size in mesh))


def wire_bytes(collectives: Iterable[Collective]) -> float:
    return sum(one.wire * one.times for one in collectives)


@pytest.mark.parametrize(
    ("rules", "mesh", "exchanged"),
    [
        # Each gradient is reduce-scattered to its owner.
        ("zero2", {"data": 8}, 0),
        # Gradients and weights go to the owner, and new weights come back.
        ("fsdp", {"fsdp": 8}, 3 * 7 / 8 * MATRICES / 8),
        # Owners are found along data first, then along tensor.
        ("zero2+megatron", {"data": 4, "tensor": 2}, 3 * 1 / 2 * MATRICES / 8),
        # A stage has the owners of its own layers.
        ("hsdp", {"pipeline": 2, "data": 2, "fsdp": 2}, 3 * 1 / 2 * MATRICES / 4),
    ],
    ids=["zero2", "fsdp", "zero2+megatron", "pipeline"],
)
def test_sends_what_adamw_does_and_all_to_alls(
    reports: str, rules: str, mesh: dict[str, int], exchanged: float
) -> None:
    sizes = tuple(mesh.items())
    adamw = compiled(reports, rules, AdamW(), sizes)
    owner = compiled(reports, f"{rules}+owner", Muon(), sizes)

    exchanges = [one for one in owner.collectives if one.kind == "all-to-all"]
    others = [one for one in owner.collectives if one.kind != "all-to-all"]
    assert not [one for one in adamw.collectives if one.kind == "all-to-all"]
    # Biases, whose layers are divided as well, are a thousandth of the bytes.
    assert wire_bytes(others) == pytest.approx(wire_bytes(adamw.collectives), rel=2e-3)
    assert wire_bytes(exchanges) == pytest.approx(exchanged, rel=1e-2)


def test_without_owners_each_iteration_gathers(reports: str) -> None:
    """What the bytes of the test above would show if a matrix was not complete where it is
    orthogonalised: five iterations, of three matrix products each."""
    adamw = compiled(reports, "zero2", AdamW(), (("data", 8),))
    plain = compiled(reports, "zero2", Muon(), (("data", 8),))
    assert wire_bytes(plain.collectives) > 5 * wire_bytes(adamw.collectives)


@pytest.mark.parametrize(
    ("rules", "mesh", "exchanges", "padded"),
    [
        # The sums of gradients, and the new weights.
        pytest.param("zero2", {"data": 8}, 0, 2 * 7 / 8, marks=pytest.mark.exhaustive),
        # Gradients, weights and new weights.
        pytest.param("fsdp", {"fsdp": 8}, 3 * 7 / 8 / 8, 0, marks=pytest.mark.exhaustive),
        ("zero2+megatron", {"data": 4, "tensor": 2}, 3 * 1 / 2 / 8, 2 * 3 / 4 / 2),
    ],
    ids=["zero2", "fsdp", "zero2+megatron"],
)
def test_padding_is_all_that_is_sent_beside_it(
    reports: str, rules: str, mesh: dict[str, int], exchanges: float, padded: float
) -> None:
    """6 layers of 8 owners have the bytes of 8 where they are on their way to an owner and back."""
    sizes = tuple(mesh.items())
    adamw = compiled(reports, rules, AdamW(), sizes, n_layers=6)
    owner = compiled(reports, f"{rules}+owner", Muon(), sizes, n_layers=6)
    exchanged = [one for one in owner.collectives if one.kind == "all-to-all"]
    others = [one for one in owner.collectives if one.kind != "all-to-all"]
    wanted = wire_bytes(adamw.collectives) + padded * 2 * LAYER
    assert wire_bytes(others) == pytest.approx(wanted, rel=4e-3)
    assert wire_bytes(exchanged) == pytest.approx(exchanges * 8 * LAYER, rel=1e-2)


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("zero2", {"data": 8}),
        pytest.param("fsdp", {"fsdp": 8}, marks=pytest.mark.exhaustive),
        pytest.param("zero2+megatron", {"data": 4, "tensor": 2}, marks=pytest.mark.exhaustive),
    ],
)
def test_lint_finds_what_owners_remove(reports: str, rules: str, mesh: dict[str, int]) -> None:
    sizes = tuple(mesh.items())
    axes = ModelLayout.of(MODEL, shard_on(rules)).axes
    plain = compiled(reports, rules, Muon(), sizes)
    (found,) = lint(plain, preset(rules), axes)
    assert (found.check, found.severity) == ("divided-matrices", "error")
    assert "blocks.attention.qkv.weight" in found.text and "embedding" not in found.text
    assert f"--rules={rules}+owner" in found.fix
    owner = compiled(reports, f"{rules}+owner", Muon(), sizes)
    removed = wire_bytes(plain.collectives) - wire_bytes(owner.collectives)
    # Owners also spare collectives that are no gathers of divided matrices.
    assert 0.8 * found.bytes < removed < 1.15 * found.bytes
    assert lint(owner, preset(f"{rules}+owner"), axes) == ()
    assert lint(compiled(reports, rules, AdamW(), sizes), preset(rules), axes) == ()


@pytest.mark.parametrize("n_layers", [8, 6])
@pytest.mark.parametrize(
    ("rules", "mesh"),
    [("zero2+owner", {"data": 8}), ("zero2+megatron+owner", {"data": 4, "tensor": 2})],
    ids=["zero2", "zero2+megatron"],
)
def test_a_step_sends_what_its_form_says(
    reports: str, rules: str, mesh: dict[str, int], n_layers: int
) -> None:
    sizes = tuple(mesh.items())
    config = config_of(rules, Muon(), sizes, n_layers)
    report = compiled(reports, rules, Muon(), sizes, n_layers)
    assert not form_rows.differences(config, report), ledger_text(report)
