"""Muon with its state divided by layers sends what AdamW sends, and an all-to-all for each exchange
with the owners: nothing is gathered to orthogonalise a matrix."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable
from pathlib import Path

import pytest

from mesh_lm.config import OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.model import DecoderConfig
from mesh_lm.optim import AdamW, Muon, Rule
from mesh_lm.planning.program import compile_config
from sharding_rules import MeshConfig, preset
from sharding_rules.lab.report import Collective, Report

COMPILE_BUDGET = 20
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
MATRICES = MODEL.n_layers * 12 * MODEL.d_model**2 * 4
"""Bytes of the layers' matrices in fp32."""


@functools.cache
def compiled(reports: str, rules: str, rule: Rule, mesh: tuple[tuple[str, int], ...]) -> Report:
    config = TrainConfig(
        model=MODEL,
        mesh=dataclasses.replace(MeshConfig(data=1), **dict(mesh)),
        rules=preset(rules),
        train=TrainLoop(global_batch=16, microbatches=1),
        optimizer=OptimizerConfig(rule),
        output="owner",
    )
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
    ],
    ids=["zero2", "fsdp", "zero2+megatron"],
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
