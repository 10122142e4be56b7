"""Residual streams whose columns cannot be sharded so are refused, with what would work."""

import dataclasses
from typing import Any

import pytest

from mesh_lm.config import load
from mesh_lm.errors import ConfigError
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, Rules, preset

SQUARE: dict[str, Any] = {"data": 2, "tensor": 2, "extra": ("tensor_y=2",)}
TWO = preset("megatron_2d")


def said(rules: Rules, model: dict[str, Any] | None = None, **mesh: Any) -> list[str]:
    config = load("configs/gpt_tiny.py")
    config = dataclasses.replace(
        config,
        rules=rules,
        mesh=MeshConfig(**(mesh or SQUARE)),
        model=dataclasses.replace(config.model, **(model or {})),
    )
    try:
        check(config, 8)
    except ConfigError as error:
        return str(error).split("\n  - ")[1:]
    return []


def test_the_preset_and_its_products_are_accepted() -> None:
    assert not said(TWO)
    assert not said(
        preset("zero2+hsdp+megatron_2d"), data=1, fsdp=2, tensor=2, extra=("tensor_y=2",)
    )
    assert not said(
        preset("distributed+megatron_2d"), pipeline=2, data=1, tensor=2, extra=("tensor_y=2",)
    )


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (
            preset("megatron_sp+megatron_2d"),
            "rules.activations['embed']='tensor_y': the residual stream's sequence is sharded, "
            "too, over 'tensor', and XLA would replicate it between; use megatron_2d without "
            "megatron_sp",
        ),
        (
            TWO.replace("mine", params={"tables/embed": "tensor_y", "tables/vocab": "tensor"}),
            "rules.activations['embed']='tensor_y': tables are used with full rows; set "
            "rules.params['tables/embed'] to None, as preset megatron_2d does, or set it to None",
        ),
        (
            TWO.replace("mine", activations={"blocks/embed": None}),
            (
                "rules.activations['blocks/embed']=None: all layers have one residual stream; set "
                "it to 'tensor_y', as 'embed'"
            ),
        ),
        (
            preset("megatron").replace("mine", activations={"embed": "tensor"}),
            "rules.activations['embed']='tensor': the weights that read and write it have "
            "rules.gathered['embed']=None; shard both over one axis that shards nothing else, as "
            "preset megatron_2d does, or set it to None",
        ),
        (
            TWO.replace("mine", params={"embed": None}),
            "rules.activations['embed']='tensor_y': the weights that read and write it have "
            "rules.gathered['embed']=None; shard both over one axis that shards nothing else, as "
            "preset megatron_2d does, or set it to None",
        ),
    ],
)
def test_what_neither_xla_nor_tables_can_follow(rules: Rules, problem: str) -> None:
    assert problem in said(rules)


def test_a_mesh_without_the_axis_and_sizes_that_do_not_divide() -> None:
    (lacking,) = said(TWO, data=4, tensor=2)
    assert lacking == (
        "rules 'megatron_2d' declare the mesh axis 'tensor_y', which this mesh lacks; give it a "
        "size: mesh.extra=tensor_y=2"
    )
    odd = said(TWO, {"d_model": 126, "head_dim": 32}, data=1, tensor=2, extra=("tensor_y=4",))
    assert odd[0] == (
        "model.d_model=126 is not divisible by its number of shards, mesh.extra=tensor_y=4 "
        "(rules.params: embed -> "
        "tensor_y); mesh.extra=tensor_y can be 1, 2, 3, 6, 7, 9, 14, 18, ..."
    )
    (few,) = said(TWO, {"n_kv_heads": 2})
    assert few == (
        "model.n_kv_heads=2 is not divisible by its number of shards, "
        "mesh.tensor=2 x mesh.extra=tensor_y=2 (rules.activations: kv_heads -> tensor+tensor_y); their product must divide 2; or set "
        "rules.activations['kv_heads'] to 'tensor': 1 on each device"
    )
    assert not said(TWO.replace("mine", activations={"kv_heads": "tensor"}), {"n_kv_heads": 2}), (
        "the suggested fix"
    )
