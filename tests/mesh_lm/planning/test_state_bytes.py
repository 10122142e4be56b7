"""A plan's bytes per device equal the compiled step's arguments, class by class; the lab gets the
classes from the declaration."""

import dataclasses
import functools

import pytest
from support import GPT, LLAMA, shard_on

from mesh_lm.config import OptimizerConfig, TrainConfig, TrainLoop
from mesh_lm.data.abstract import abstract_batch
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.engine import batch_sharding
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.planning import state_bytes
from mesh_lm.state import COUNTERS, MASTER, StatePart, abstract_state, parts
from mesh_lm.training.step import train_step
from sharding_rules.lab import Report, compile_report

COMPILE_BUDGET = 4
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


def declared(
    optimizer: str, rules: str, **mesh: int
) -> tuple[ModelLayout, Optimizer, dict[str, StatePart]]:
    layout, made = (
        ModelLayout.of(MODEL, shard_on(rules, **mesh)),
        Optimizer(OptimizerConfig(name=optimizer), 9),
    )
    return layout, made, parts(layout, made)


@functools.cache
def compiled(optimizer: str, rules: str, **mesh: int) -> Report:
    layout, made, kept = declared(optimizer, rules, **mesh)
    config = TrainConfig(
        model=MODEL,
        output="runs/held",
        rules=layout.shard.rules,
        train=TrainLoop(global_batch=16, microbatches=1),
    )
    arguments = abstract_state(layout, made), abstract_batch(config, batch_sharding(layout))
    return compile_report(
        train_step(layout, made, 0),
        *arguments,
        mesh=layout.shard.mesh,
        kind_of=state_bytes.kind_of(kept),
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
    ],
    ids=["adamw ddp", "adamw distributed", "adafactor fsdp"],
)
def test_bytes_are_those_of_the_program(
    optimizer: str, rules: str, mesh: dict, slots: list[str]
) -> None:
    """Returns XLA's sizes of the program's parameters on one device."""
    *_, kept = declared(optimizer, rules, **mesh)
    assert list(kept) == slots
    report = compiled(optimizer, rules, **mesh)
    found = report.memory.by_kind
    assert found["params"] == kept["params"].nbytes
    assert found["moments"] == sum(part.nbytes for name, part in kept.items() if name != "params")
    assert {a.name for a in report.arguments if a.kind == "other"} == {
        f"state['{name}']" for name in COUNTERS
    }


def test_bytes_of_each_slot_in_the_line() -> None:
    n = sum(leaf.nbytes // 4 for leaf in ModelLayout.of(MODEL, shard_on("ddp")).leaves.values())
    (line,) = state_bytes.report_facts(declared("adamw", "ddp", data=2)[2])
    kib = f"{4 * n / 2**20:.1f} MiB" if 4 * n > 0.0995 * 2**20 else f"{4 * n / 2**10:,.0f} KiB"
    assert line == ("state", f"params {kib} fp32, mu {kib} fp32, nu {kib} fp32")
    (line,) = state_bytes.report_facts(declared("lion", "distributed", data=4)[2])
    assert [word.split()[0] + " " + word.split()[-1] for word in line[1].split(", ")] == [
        "params bf16+fp32",
        "master fp32",
        "mu fp32",
    ]


def test_a_flat_master_is_a_part_of_the_replicas() -> None:
    """Matrices take 2 bytes on every replica; master and moments are sharded, with at most a row of
    padding."""
    *_, kept = declared("adamw", "distributed", data=8)
    layout = declared("adamw", "distributed", data=8)[0]
    matrices = sum(
        leaf.nbytes // 4 for name, leaf in layout.leaves.items() if name in layout.flat.names
    )
    padding = sum(128 * max(1, vector.rows) for vector in layout.flat.vectors)
    assert matrices / 8 <= kept[MASTER].nbytes / 4 <= matrices / 8 + padding
    vectors = sum(
        leaf.nbytes for name, leaf in layout.leaves.items() if name not in layout.flat.names
    )
    assert kept["params"].nbytes == 2 * matrices + vectors
    assert kept["mu"].nbytes == kept["nu"].nbytes == kept[MASTER].nbytes + vectors


def test_the_lab_is_told_the_class_of_a_part() -> None:
    """The class does not depend on names: a slot named like a batch, and a parameter named like a
    moment."""
    *_, kept = declared("adamw", "distributed", data=2)
    kind = state_bytes.kind_of({**kept, "batch": kept["mu"], "buffers": kept["params"]})
    names = {
        "state['params']['blocks.mu']": "params", "state['buffers']['bias']": "params",
        "state['master']['blocks/whole']": "moments",
        "state['batch']['embedding']": "moments", "state['step']": "other",
        "state['recent']": "other", "batch['tokens']": "batch",
    }  # fmt: skip
    assert {name: kind(name) for name in names} == names


def test_models_that_compute_in_fp32_keep_fp32() -> None:
    layout = ModelLayout.of(GPT, shard_on("distributed", data=2))
    kept = parts(layout, Optimizer(OptimizerConfig(), 9))
    assert (
        state_bytes.report_facts(kept)[0][1].startswith("params ")
        and "bf16" not in state_bytes.report_facts(kept)[0][1]
    )
