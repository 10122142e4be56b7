"""Experts that cannot be routed or sharded as the config says: each is one sentence, with what
would work."""

import dataclasses
import math
from typing import Any

import pytest

from mesh_lm.config import load
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig, ExpertsConfig, SegmentConfig
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, Rules, preset

GATHER = preset("experts_gather")
EXPERT: dict[str, Any] = {"data": 2, "expert": 4}
TENSOR: dict[str, Any] = {"data": 2, "expert": 2, "tensor": 2}


def problems(
    rules: Rules | str = "experts_gather",
    mesh: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **experts: Any,
) -> list[str]:
    """The sentences about gpt_tiny_moe with experts in all layers and with these changes, on eight
    devices."""
    config = load("gpt_tiny_moe")
    assert isinstance(config.model, DecoderConfig)
    changed = dataclasses.replace(config.model.experts, **experts)
    config = dataclasses.replace(
        config,
        rules=preset(rules) if isinstance(rules, str) else rules,
        mesh=MeshConfig(**(mesh or EXPERT)),
        model=dataclasses.replace(
            config.model,
            **{"segments": (), "block": "moe", "experts": changed, **(model or {})},
        ),
    )
    try:
        check(config, 8)
    except ConfigError as error:
        return str(error).split("\n  - ")[1:]
    return []


def held_over(*axes: str, base: str = "experts_gather", **changes: Any) -> Rules:
    """Rules with the experts over these mesh axes."""
    row = {"experts": axes}
    return preset(base).replace("mine", params=row, activations=row, **changes)


@pytest.mark.parametrize(
    ("experts", "problem"),
    [
        ({"number": 0}, "model.experts.number=0 must be at least 1"),
        ({"active": 0}, "model.experts.active=0 must be at least 1"),
        ({"d_ff": -1}, "model.experts.d_ff=-1 must be at least 0"),
        ({"shared": -1}, "model.experts.shared=-1 must be at least 0"),
        ({"score": "relu"}, "model.experts.score='relu' must be softmax or sigmoid"),
        ({"scale": math.nan}, "model.experts.scale=nan must be at least 0 and finite"),
        ({"balance_loss": -0.1}, "model.experts.balance_loss=-0.1 must be at least 0 and finite"),
        (
            {"active": 9},
            "model.experts.active=9 is more than model.experts.number=8, the experts that there "
            "are",
        ),
        (
            {"factor": 0.5},
            "model.experts.factor=0.5 would not hold the tokens of balanced routing; set it to 1 "
            "or more, or to 0 for the worst routing",
        ),
        ({"groups": 3}, "model.experts.number=8 is not divisible by model.experts.groups=3"),
        (
            {"groups": 4, "active_groups": 5},
            "model.experts.active_groups=5 is more than model.experts.groups=4",
        ),
        (
            {"groups": 4, "active": 3},
            "model.experts.active=3 is more than the experts of model.experts.active_groups=1 "
            "groups, which have 2 each",
        ),
    ],
)
def test_routers_that_cannot_be(experts: dict[str, Any], problem: str) -> None:
    assert problems(**experts) == [problem]


def test_experts_of_a_dense_model() -> None:
    assert problems("ddp", {"data": 8}, {"block": "dense"}, active=9) == [
        "model.experts is set, but no layer has experts; set model.block=moe, or give a segment "
        "the kind moe"
    ]


def test_a_shared_expert_that_does_not_divide() -> None:
    assert problems("experts_gather+megatron", TENSOR, shared=33) == [
        "model.experts.shared=33: the width of the shared expert does not divide into 2 shards "
        "(rules.params: mlp -> tensor)"
    ]


@pytest.mark.parametrize("experts", [{"factor": 0}, {"groups": 4, "active_groups": 2, "active": 4}])
def test_routers_that_can_be(experts: dict[str, Any]) -> None:
    assert not problems(**experts)


STAY = "experts stay on their devices, and rules.params['experts']='expert'; set both to the same mesh axes"


@pytest.mark.parametrize(
    ("rules", "mesh", "problem"),
    [
        (
            GATHER.replace("mine", activations={"experts": None}),
            EXPERT,
            f"rules.activations['experts']=None: {STAY}",
        ),
        (
            GATHER.replace("mine", gathered={"experts": None}),
            EXPERT,
            f"rules.gathered['experts']=None: {STAY}",
        ),
        (
            GATHER.replace("mine", gradients={"experts": None}),
            EXPERT,
            f"rules.gradients['experts']=None: {STAY}",
        ),
        (
            GATHER.replace("mine", optimizer={"experts": ("data", "expert")}),
            EXPERT,
            f"rules.optimizer['experts']=('data', 'expert'): {STAY}",
        ),
        (
            GATHER.replace("mine", params={"blocks/experts": None}),
            EXPERT,
            "rules.activations['experts']='expert': experts stay on their devices, and "
            "rules.params['blocks/experts']=None; set both to the same mesh axes",
        ),
        (
            held_over("pipeline", "expert", exchange={"pipeline": "gather"}),
            {"pipeline": 2, "expert": 4},
            "rules.params['experts']=('pipeline', 'expert'): experts of one layer are in one "
            "stage; remove 'pipeline'",
        ),
        (
            held_over("expert", "tensor", base="experts_gather+megatron"),
            TENSOR,
            "rules.params['experts']=('expert', 'tensor'): 'tensor' shards no tokens, so its "
            "devices would compute the same experts; add megatron_sp, which shards the sequence "
            "over it, or leave 'tensor' out",
        ),
        (
            held_over("expert", "fsdp"),
            {"fsdp": 2, "expert": 4},
            "rules.params['experts']=('expert', 'fsdp'): 'fsdp' shards no tokens, so its devices "
            "would compute the same experts; add 'fsdp' to rules.activations['batch'], or leave "
            "'fsdp' out",
        ),
        (
            preset("experts_padded+fsdp").replace(
                "mine",
                params={"experts": ("fsdp", "expert"), "embed": None},
                activations={"experts": ("fsdp", "expert")},
                exchange={"fsdp": "padded"},
            ),
            {"fsdp": 2, "expert": 4},
            "rules.params['experts']=('fsdp', 'expert'): the mesh axes over which a step divides "
            "arrays itself come first; set it to ('expert', 'fsdp')",
        ),
        (
            preset("experts_padded+fsdp").replace(
                "mine",
                params={"experts": ("expert", "fsdp")},
                activations={"experts": ("expert", "fsdp")},
                exchange={"fsdp": "padded"},
            ),
            {"fsdp": 2, "expert": 4},
            "rules.params['experts']=('expert', 'fsdp'): 'fsdp' shards 'embed', too, and a matrix "
            "is divided over a mesh axis once; set rules.params['blocks/embed'] to None",
        ),
        (
            preset("experts_padded+reduce_int8"),
            {"data": 2, "expert": 4},
            "rules.reduction='int8': sums in int8 are not built beside experts over 'expert'; "
            "leave reduce_int8 out",
        ),
        (
            preset("experts_padded+fsdp").replace("mine", gathered={"blocks/embed": "fsdp"}),
            {"fsdp": 2, "expert": 4},
            "rules.gathered['blocks/embed']='fsdp': the router of 'blocks' reads complete tokens; "
            "use megatron_sp in place of megatron_2d, or set it to None",
        ),
        (
            held_over("data", "expert"),
            EXPERT,
            "rules.params['experts']=('data', 'expert'): no rule says how tokens reach experts "
            "over 'data'; set rules.exchange['data'] to gather or padded",
        ),
        (
            held_over(
                "expert", "tensor", base="experts_gather+megatron_sp", exchange={"tensor": "gather"}
            ),
            TENSOR,
            "rules.params['experts']=('expert', 'tensor'): 'tensor' shards the width of an expert, "
            "too; set rules.params['expert_mlp'] to None",
        ),
        (
            preset("experts_gather+megatron").replace("mine", params={"router": "tensor"}),
            TENSOR,
            "rules.params['router']='tensor': each token needs the scores of all experts; set it "
            "to None",
        ),
        (
            preset("ddp").replace("mine", exchange={"data": "padded"}),
            {"data": 8},
            "rules.exchange['data']='padded', but rules.params['experts'] is not sharded over "
            "'data'; add it there, and in rules.activations['experts']",
        ),
        (
            preset("experts_gather+megatron_2d"),
            {"expert": 2, "tensor": 2, "extra": ("tensor_y=2",)},
            "rules.activations['embed']='tensor_y': the router of 'blocks' reads complete tokens; "
            "use megatron_sp in place of megatron_2d, or set it to None",
        ),
        (
            preset("experts_gather+by_node"),
            {"data": 2, "expert": 2, "extra": ("node=2",)},
            "rules.node_axis='node': sums in two levels are not built beside experts over "
            "'expert'; leave by_node out",
        ),
    ],
)
def test_rows_and_exchanges_that_cannot_be(
    rules: Rules, mesh: dict[str, Any], problem: str
) -> None:
    assert problems(rules, mesh) == [problem]


def test_experts_of_two_islands() -> None:
    rules = held_over(
        "island", "expert", base="diloco+experts_gather", exchange={"island": "gather"}
    )
    assert problems(rules, {"island": 2, "expert": 4})[1:] == [
        "rules.params['experts']=('island', 'expert'): experts of one layer are in one stage; "
        "remove 'island'"
    ]


def test_a_size_that_does_not_divide() -> None:
    assert problems(number=6) == [
        "model.experts.number=6 is not divisible by its number of shards, mesh.expert=4 "
        "(rules.params: experts -> expert); mesh.expert can be 1, 2, 3, 6"
    ]
    assert problems("experts_gather+megatron", TENSOR, d_ff=175) == [
        "model.experts.d_ff=175 is not divisible by its number of shards, mesh.tensor=2 "
        "(rules.params: expert_mlp -> tensor); mesh.tensor can be 1, 5, 7, 25, 35, 175"
    ]


def test_a_model_without_experts() -> None:
    unused = "mesh.expert=4: this model has no experts; set mesh.expert=1, or model.block=moe"
    assert problems(model={"block": "dense", "experts": ExpertsConfig()}) == [unused]
    dense = (SegmentConfig("first", 2), SegmentConfig("others", 2))
    assert problems(model={"segments": dense, "experts": ExpertsConfig()}) == [unused]
    mixed = (SegmentConfig("first", 1), SegmentConfig("others", 3, kind="moe"))
    assert not problems(model={"segments": mixed})


COMPLETE = {"experts": ("expert", "tensor"), "expert_mlp": None}


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("experts_gather", EXPERT),
        ("experts_padded", EXPERT),
        ("experts_padded+zero3", EXPERT),
        ("experts_gather+distributed", EXPERT),
        ("experts_gather+hsdp", {"data": 2, "fsdp": 2, "expert": 2}),
        ("experts_gather+megatron", TENSOR),
        ("experts_padded+megatron_sp", TENSOR),
        ("experts_gather+ring", {"sequence": 2, "expert": 4}),
        ("experts_gather+zero3", {"pipeline": 2, "expert": 4}),
        (held_over("data", "expert", exchange={"data": "padded"}), EXPERT),
        (held_over("data", base="ddp", exchange={"data": "gather"}), {"data": 8}),
        (held_over("sequence", base="ring", exchange={"sequence": "gather"}), {"sequence": 8}),
        (
            preset("experts_gather+megatron_sp").replace(
                "mine",
                params=COMPLETE,
                activations=COMPLETE,
                exchange={"tensor": "gather"},
            ),
            TENSOR,
        ),
    ],
)
def test_products_and_axes_that_hold_experts(rules: Rules | str, mesh: dict[str, Any]) -> None:
    assert not problems(rules, mesh)
