"""Compiled steps send exactly what the closed forms say, in bytes by mesh axes, for features that
are together for the first time. `benchmarks/forms.py` compiles all rows."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import form_rows
import pytest

from mesh_lm.config import DilocoConfig, PipelineConfig, TrainConfig
from mesh_lm.model import ExpertsConfig
from mesh_lm.planning.closed_forms.config import expected_of, expected_outer_of
from mesh_lm.planning.closed_forms.terms import by_axes, total
from mesh_lm.planning.program import Program
from sharding_rules import MeshConfig, preset
from sharding_rules.lab.diff import ledger_text
from sharding_rules.lab.report import SCALAR

COMPILE_BUDGET = 50
pytestmark = [pytest.mark.deviceless, pytest.mark.slow]

PLAIN = {factor: values[0] for factor, values in form_rows.FACTORS.items()}
STAGED = {"schedule": "1f1b", "microbatches": 4}
ROWS: dict[str, dict[str, Any]] = {
    "zero2 with shards of sequences": {"replicas": "zero2", "context": "context_gather"},
    "a ring with windows": {"context": "ring", "window": (384, 0), "remat": "full"},
    "a ring in stages": {"context": "ring", "model": "llama", **STAGED},
    "ulysses in stages": {
        "replicas": "distributed",
        "context": "ulysses",
        "stash": "residuals",
        "remat": "full",
        **STAGED,
    },
    "gpipe": {"tensor": "megatron", "remat": "full", "schedule": "gpipe", "microbatches": 4},
    "int8": {"reduction": "int8", "model": "llama"},
    "int8 of flat vectors in stages": {
        "replicas": "distributed",
        "reduction": "int8",
        "chunks": 2,
        **STAGED,
    },
    "int8 in stages": {"tensor": "megatron", "reduction": "int8", **STAGED},
    "by_node": {"replicas": "by_node", "remat": "full"},
    "by_node in bf16 in stages": {"replicas": "by_node", "reduction": "bfloat16", **STAGED},
    "save_attention": {"replicas": "hsdp", "tensor": "megatron_sp", "remat": "save_attention"},
    "save_attention in two dimensions": {"tensor": "megatron_2d", "remat": "save_attention"},
    "save_names in some layers": {
        "tensor": "megatron_sp",
        "remat": "save_names",
        "remat_layers": "half",
    },
}
ON_CI = ("a ring in stages", "int8", "by_node in bf16 in stages")


def assert_equal(config: TrainConfig, reports: str) -> None:
    report = form_rows.compiled(config, str(Path(reports).parent))
    assert not report.warnings
    assert not form_rows.differences(config, report), ledger_text(report)


@pytest.mark.parametrize(
    "name",
    [name if name in ON_CI else pytest.param(name, marks=pytest.mark.exhaustive) for name in ROWS],
)
def test_a_step_sends_what_its_form_says(reports: str, name: str) -> None:
    assert_equal(form_rows.config_of(PLAIN | ROWS[name]), reports)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layers", [(1, 3), (2, 1, 1, 2)])
def test_stages_of_unequal_layers(reports: str, layers: tuple[int, ...]) -> None:
    """A pass is counted with the rows that it reads: the most layers of any virtual stage."""
    row = PLAIN | {"tensor": "megatron", "remat": "full", **STAGED}
    config = form_rows.config_of(row)
    pipeline = PipelineConfig(chunks=len(layers) // 2, layers=layers, stash="residuals")
    model: Any = dataclasses.replace(config.model, n_layers=sum(layers))
    assert_equal(dataclasses.replace(config, model=model, pipeline=pipeline), reports)


@pytest.mark.exhaustive
def test_stages_of_unequal_layers_that_look_up_tokens_again(reports: str) -> None:
    """XLA removes the loop of the last tick, in which a row's gradient is summed."""
    row = PLAIN | {"replicas": "zero3", "tensor": "megatron_sp", "model": "llama", **STAGED}
    config = form_rows.config_of(row | {"remat": "save_names"})
    pipeline = PipelineConfig(chunks=2, layers=(2, 1, 1, 2))
    model: Any = dataclasses.replace(config.model, n_layers=6)
    assert_equal(dataclasses.replace(config, model=model, pipeline=pipeline), reports)


@pytest.mark.exhaustive
def test_layers_that_gather_their_weights_without_a_loop(reports: str) -> None:
    config = form_rows.config_of(PLAIN | {"replicas": "zero3", "remat": "save_names"})
    model: Any = dataclasses.replace(config.model, unroll=True)
    assert_equal(dataclasses.replace(config, model=model), reports)


@pytest.mark.exhaustive
def test_a_single_layer_that_keeps_its_weights(reports: str) -> None:
    config = form_rows.config_of(PLAIN | {"replicas": "zero3", "remat": "full"})
    model: Any = dataclasses.replace(config.model, kept_layers=1)
    assert_equal(dataclasses.replace(config, model=model), reports)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("rules", "remat"),
    [
        ("zero3+experts_padded", "save_names"),
        ("distributed+experts_padded", "none"),
        ("ddp+experts_gather", "full"),
    ],
)
def test_experts(reports: str, rules: str, remat: str) -> None:
    """With balanced routing: of an exchange the first round is counted."""
    row = PLAIN | {"model": "llama", "remat": remat}
    config = form_rows.config_of(row)
    experts = ExpertsConfig(number=8, active=2, balance_loss=0.01)
    model: Any = dataclasses.replace(config.model, block="moe", experts=experts)
    config = dataclasses.replace(
        config,
        model=model,
        rules=preset(rules),
        mesh=MeshConfig(data=2, expert=4),
        train=dataclasses.replace(config.train, global_batch=8),
    )
    assert_equal(config, reports)


def test_islands(reports: str) -> None:
    """A step sends nothing over island, and the outer step the weights, once."""
    config = form_rows.config_of(PLAIN | {"tensor": "megatron_sp"})
    config = dataclasses.replace(
        config,
        rules=preset("diloco+megatron_sp"),
        mesh=MeshConfig(island=2, data=2, tensor=2),
        train=dataclasses.replace(config.train, global_batch=4),
        diloco=DilocoConfig(outer_steps=10),
    )
    program = Program.of(config, "h100", math.prod(config.mesh.sizes().values()))
    outer = program.compile_outer()
    assert outer is not None
    terms = expected_outer_of(config)
    assert by_axes(terms).keys() == {("island",)}
    assert outer.wire_bytes("island") == pytest.approx(total(terms), abs=SCALAR)
    assert "island" not in {axis for term in expected_of(config) for axis in term.axes}
    assert_equal(config, reports)


def test_there_are_rows_for_every_feature() -> None:
    rows = form_rows.rows()
    assert len(rows) == form_rows.N_ROWS
    for factor, values in form_rows.FACTORS.items():
        assert {row[factor] for row in rows} == set(values), factor
