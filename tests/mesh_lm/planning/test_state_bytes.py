"""A plan's bytes per device equal the compiled step's arguments, class by class; the lab gets the
classes from the declaration."""

import dataclasses
import functools
from typing import NamedTuple

import pytest
from support import GPT, LLAMA, shard_on

from mesh_lm.config import OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.data.abstract import abstract_batch
from mesh_lm.optim import Optimizer, make_rule
from mesh_lm.parallel.engine import batch_sharding
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.planning import state_bytes
from mesh_lm.state import COUNTERS, MASTER, StatePart, abstract_state, parts
from mesh_lm.training.step import train_step
from sharding_rules.lab import Report, compile_report

COMPILE_BUDGET = 5
MODEL = dataclasses.replace(
    LLAMA,
    d_model=64,
    dtype="bfloat16",
    z_loss=0.0,
    softcap=0.0,
    head_softcap=0.0,
    window=(),
    sinks=False,
)


class Declared(NamedTuple):
    layout: ModelLayout
    optimizer: Optimizer
    parts: dict[str, StatePart]


def declared(optimizer: str, rules: str, **mesh: int) -> Declared:
    layout = ModelLayout.of(MODEL, shard_on(rules, **mesh))
    made = Optimizer(OptimizerConfig(make_rule(optimizer)), 9)
    return Declared(layout, made, parts(layout, made))


@functools.cache
def compiled(optimizer: str, rules: str, **mesh: int) -> Report:
    state = declared(optimizer, rules, **mesh)
    layout = state.layout
    config = TrainConfig(
        model=MODEL,
        output="runs/held",
        rules=layout.shard.rules,
        train=TrainLoop(global_batch=16, microbatches=1),
    )
    return compile_report(
        train_step(layout, state.optimizer, 0),
        abstract_state(layout, state.optimizer),
        abstract_batch(config, batch_sharding(layout)),
        mesh=layout.shard.mesh,
        kind_of=state_bytes.kind_of(state.parts),
    )


@pytest.mark.parametrize(
    ("optimizer", "rules", "mesh", "slots"),
    [
        ("adamw", "ddp", {"data": 2}, ["params", "mu", "nu"]),
        (
            "adamw",
            "distributed+megatron",
            {"data": 4, "tensor": 2},
            ["params", "master", "mu", "nu"],
        ),
        ("adafactor", "fsdp", {"fsdp": 2}, ["params", "v_row", "v_col", "v"]),
        (
            "adamw8",
            "fsdp",
            {"fsdp": 2},
            ["params", "mu", "nu", "mu8", "mu_scale", "root8", "root_scale"],
        ),
    ],
    ids=["adamw ddp", "adamw distributed", "adafactor fsdp", "adamw8 fsdp"],
)
def test_bytes_are_those_of_the_program(
    optimizer: str, rules: str, mesh: dict, slots: list[str]
) -> None:
    """They are XLA's sizes of the program's parameters on one device."""
    state = declared(optimizer, rules, **mesh).parts
    assert list(state) == slots
    report = compiled(optimizer, rules, **mesh)
    nbytes = report.memory.by_kind
    assert nbytes["params"] == state["params"].nbytes
    assert nbytes["moments"] == sum(state[name].nbytes for name in state if name != "params")
    others = {argument.name for argument in report.arguments if argument.kind == "other"}
    assert others == {f"state['{name}']" for name in COUNTERS}


def test_bytes_of_each_slot_in_the_line() -> None:
    leaves = ModelLayout.of(MODEL, shard_on("ddp")).leaves.values()
    fp32_bytes = sum(leaf.nbytes for leaf in leaves)
    if fp32_bytes > 0.0995 * 2**20:
        size = f"{fp32_bytes / 2**20:.1f} MiB"
    else:
        size = f"{fp32_bytes / 2**10:,.0f} KiB"
    (line,) = state_bytes.report_facts(declared("adamw", "ddp", data=2).parts)
    assert line == ("state", f"params {size} fp32, mu {size} fp32, nu {size} fp32")

    ((_, text),) = state_bytes.report_facts(declared("lion", "distributed", data=4).parts)
    names_and_types = [(part.split()[0], part.split()[-1]) for part in text.split(", ")]
    assert names_and_types == [("params", "bf16+fp32"), ("master", "fp32"), ("mu", "fp32")]


def test_a_flat_master_is_a_part_of_the_replicas() -> None:
    """Matrices take 2 bytes on every replica; master and moments are sharded, with at most a row of
    padding."""
    layout, _, state = declared("adamw", "distributed", data=8)
    n_matrix_elements = 0
    vector_bytes = 0
    for name, leaf in layout.leaves.items():
        if name in layout.flat.names:
            n_matrix_elements += leaf.nbytes // 4
        else:
            vector_bytes += leaf.nbytes
    padding = sum(128 * max(1, vector.rows) for vector in layout.flat.vectors)
    n_master_elements = state[MASTER].nbytes / 4
    assert n_matrix_elements / 8 <= n_master_elements <= n_matrix_elements / 8 + padding
    assert state["params"].nbytes == 2 * n_matrix_elements + vector_bytes
    assert state["mu"].nbytes == state["nu"].nbytes == state[MASTER].nbytes + vector_bytes


def test_the_lab_is_told_the_class_of_a_part() -> None:
    """The class does not depend on names: a slot named like a batch, and a parameter named like a
    moment."""
    state = declared("adamw", "distributed", data=2).parts
    kind = state_bytes.kind_of({**state, "batch": state["mu"], "buffers": state["params"]})
    kinds = {
        "state['params']['blocks.mu']": "params",
        "state['buffers']['bias']": "params",
        "state['master']['blocks/whole']": "moments",
        "state['batch']['embedding']": "moments",
        "state['step']": "other",
        "state['recent']": "other",
        "batch['tokens']": "batch",
    }
    assert {name: kind(name) for name in kinds} == kinds


def test_models_that_compute_in_fp32_keep_fp32() -> None:
    layout = ModelLayout.of(GPT, shard_on("distributed", data=2))
    ((_, text),) = state_bytes.report_facts(parts(layout, Optimizer(OptimizerConfig(), 9)))
    assert text.startswith("params ")
    assert "bf16" not in text
