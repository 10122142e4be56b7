"""Rows of query and kv heads that do not go together: refused before anything is traced, by the
segment's name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mesh_lm.config import load
from mesh_lm.errors import ConfigError
from mesh_lm.model import SegmentConfig
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, preset

SEGMENTS = SegmentConfig("early", 2), SegmentConfig("late", 2)


def problems(
    activations: dict[str, Any],
    rules: str = "ddp",
    tensor: int = 2,
    params: dict[str, Any] | None = None,
    **model: Any,
) -> list[str]:
    """What `check` says of gpt_tiny, which has 4 heads and no grouped queries, with these rows on 2
    x `tensor` devices."""
    config = load("configs/gpt_tiny.py")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        rules=preset(rules).replace("mine", activations=activations, params=params or {}),
        mesh=MeshConfig(data=2, tensor=tensor),
    )
    try:
        check(config, 2 * tensor)
    except ConfigError as error:
        return str(error).split("\n  - ")[1:]
    return []


FIX = "set both to the same mesh axes, or {!r} to None"


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_kv_heads_of_a_segment_without_its_heads(kv_heads: int) -> None:
    assert problems(
        {"early/kv_heads": "tensor", "mlp": "tensor"}, segments=SEGMENTS, n_kv_heads=kv_heads
    ) == [
        "rules.activations['early/kv_heads']='tensor': the query heads of segment 'early' must be "
        "sharded over these axes first, and rules.activations['heads']=None; "
        f"{FIX.format('early/kv_heads')}"
    ]


def test_heads_of_a_segment_that_lacks_those_of_its_kv_heads() -> None:
    assert problems({"late/heads": None}, "megatron", segments=SEGMENTS) == [
        "rules.activations['kv_heads']='tensor': the query heads of segment 'late' must be sharded "
        f"over these axes first, and rules.activations['late/heads']=None; {FIX.format('kv_heads')}"
    ]


def test_rows_of_the_whole_model() -> None:
    assert problems({"kv_heads": "tensor", "mlp": "tensor"}) == [
        "rules.activations['kv_heads']='tensor': the query heads must be sharded over these axes "
        f"first, and rules.activations['heads']=None; {FIX.format('kv_heads')}"
    ]


def test_query_heads_that_share_no_complete_kv_heads() -> None:
    """Six devices with two query heads each, where three of these read one kv head."""
    sizes = {"n_heads": 12, "n_kv_heads": 4, "head_dim": 32, "d_ff": 384, "vocab_multiple": 6}
    rows = {"kv_heads": None, "late/heads": None}
    assert problems(rows, "megatron", 6, {"kv_heads": None}, segments=SEGMENTS, **sizes) == [
        "rules.activations['heads']='tensor': 2 query heads of segment 'early' on each device do "
        "not share complete kv heads, of which each serves 3; set 'heads' to fewer ways, or to None"
    ]


@pytest.mark.parametrize(
    ("activations", "rules", "model"),
    [
        ({"early/kv_heads": None, "early/heads": None}, "megatron", {"segments": SEGMENTS}),
        ({"kv_heads": None}, "megatron", {"n_kv_heads": 1}),
        ({"early/kv_heads": "fsdp", "mlp": "tensor"}, "ddp", {"segments": SEGMENTS}),
    ],
    ids=["both rows", "replicated kv heads", "an axis of size 1"],
)
def test_rows_that_go_together(
    activations: dict[str, Any], rules: str, model: dict[str, Any]
) -> None:
    assert not [
        problem
        for problem in problems(activations, rules, params=dict.fromkeys(activations), **model)
        if "heads" in problem
    ]
