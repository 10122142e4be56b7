"""Sums of gradients that cannot be as the rules say: each config is one clear problem, with what
would work."""

from __future__ import annotations

import dataclasses

import pytest

from mesh_lm.config import TrainConfig, load
from mesh_lm.config.resolved import rules_from
from mesh_lm.errors import ConfigError
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, Rules, preset

NODE = {"data": 2, "extra": ("node=4",)}


def config(rules: Rules | str, **mesh: object) -> TrainConfig:
    chosen = preset(rules) if isinstance(rules, str) else rules
    return dataclasses.replace(
        load("configs/gpt_tiny.py"), rules=chosen, mesh=MeshConfig(**{"data": 1, **mesh})
    )  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("ddp+reduce_int8", {"data": 8}), ("zero1+reduce_int8", {"data": 8}),
        ("distributed+reduce_int8+megatron_sp", {"data": 2, "tensor": 4}),
        ("hsdp+reduce_int8", {"data": 2, "fsdp": 4}),
        ("ring+reduce_int8", {"data": 2, "sequence": 4}), ("by_node", NODE),
        ("distributed+by_node", NODE), ("zero3+by_node", NODE), ("zero1+by_node", NODE),
        ("by_node+reduce_bfloat16", NODE),
        ("by_node+reduce_int8", {"data": 8, "extra": ("node=1",)}),
    ],
)  # fmt: skip
def test_what_can_run(rules: str, mesh: dict) -> None:
    check(config(rules, **mesh), 8)


@pytest.mark.parametrize(
    ("rules", "mesh", "problem"),
    [
        (
            "zero2+reduce_int8", {"data": 8},
            "rules.reduction='int8': rules.gradients['embed']='data' leaves the reduce-scatter to "
            "XLA, which cannot round it; use ddp, zero1 or distributed",
        ),
        (
            "zero3+reduce_int8", {"data": 8},
            "rules.reduction='int8': rules.params['flat']='data' sums each layer's gradient by "
            "itself, without a place for what is left out; use distributed",
        ),
        (
            "fsdp+reduce_int8", {"fsdp": 8},
            "rules.reduction='int8': XLA sums gradients over fsdp itself, in the type of the "
            "matmul; set mesh.data=2 or more, along which gradients are summed once a step, or "
            "leave reduce_int8 out",
        ),
        (
            "by_node+reduce_int8", NODE,
            ("rules.reduction='int8' with rules.node_axis='node': sums in two levels are not "
            "rounded; leave by_node or reduce_int8 out"),
        ),
        (
            "zero2+by_node", NODE,
            ("rules.node_axis='node': rules.gradients['embed']='data' shards the sum; use ddp, "
            "zero1, distributed or zero3 with by_node"),
        ),
        (
            preset("ddp").replace("mine", node_axis="sequence"), {"data": 8},
            ("rules.node_axis='sequence', but rules.activations['batch'] is not sharded over "
            "'sequence'; add it there"),
        ),
        (
            "by_node", {"data": 8},
            ("rules 'by_node' declare the mesh axis 'node', which this mesh lacks; give it a size: "
            "mesh.extra=node=2"),
        ),
    ],
)  # fmt: skip
def test_one_problem(rules: Rules | str, mesh: dict, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(config(rules, **mesh), 8)
    assert str(caught.value).split("\n  - ")[1:] == [problem]


def test_a_checkpoint_knows_its_rules() -> None:
    for name in ("by_node+distributed", "ddp+reduce_int8"):
        assert rules_from(preset(name).as_dict()).as_dict() == preset(name).as_dict()
    assert "node_axis" not in preset("ddp").as_dict(), (
        "older checkpoints and cached reports stay as they are"
    )
