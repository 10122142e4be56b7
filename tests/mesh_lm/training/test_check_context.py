"""Context parallelism that cannot run: each config is one clear problem, with what would work."""

from __future__ import annotations

import dataclasses

import pytest

from mesh_lm.commands.command_line import parse
from mesh_lm.config import load
from mesh_lm.errors import ConfigError
from mesh_lm.model import SegmentConfig
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, Rules, preset

TINY = "configs/gpt_tiny.py"


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["mesh.data=4", "mesh.sequence=2"],
            "mesh.sequence=2, but rules 'ddp' shard no activation over sequence; set "
            "mesh.sequence=1 or rules such as ddp+context_gather or ddp+ulysses",
        ),
        (
            ["mesh.sequence=8", "rules=ring", "model.seq_len=120"],
            (
                "model.seq_len=120 is not divisible by 16: shards over mesh.sequence=8 have two "
                "chunks each; it can be 112 or 128"
            ),
        ),
        (
            ["mesh.sequence=8", "rules=ring", "model.seq_len=100"],
            "model.seq_len=100 is not divisible by its number of shards, mesh.sequence=8 "
            "(rules.activations: seq -> "
            "sequence); mesh.sequence can be 1, 2, 4, 5, 10, 20, 25, 50, ...",
        ),
        (
            ["mesh.sequence=8", "rules=ulysses"],
            "model.n_heads=4: Ulysses cannot divide them over mesh.sequence=8; mesh.sequence can "
            "be 1, 2, 4, or exchange by gather or ring, which divide no heads",
        ),
        (
            [
                "mesh.sequence=4",
                "mesh.tensor=2",
                "rules=ulysses+megatron",
                "model.n_heads=8",
                "model.n_kv_heads=6",
            ],
            "model.n_heads=8 is not divisible by model.n_kv_heads=6",
        ),
        (
            [
                "mesh.sequence=4",
                "mesh.tensor=2",
                "rules=ulysses+megatron",
                "model.n_heads=12",
                "model.head_dim=8",
                "model.n_kv_heads=6",
            ],
            "model.n_heads=12 with 6 kv heads, 6 on each device: Ulysses cannot divide them over "
            "mesh.sequence=4; mesh.sequence can be 1, 2, 3, 6, or exchange by gather or ring, "
            "which divide no heads",
        ),
    ],
)
def test_one_problem(overrides: list[str], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check(
            parse(
                [
                    f"--config={TINY}",
                    "--config.mesh.data=1",
                    *(f"--config.{each}" for each in overrides),
                ]
            ),
            8,
        )
    assert str(caught.value).split("\n  - ")[1:] == [problem]


def test_heads_of_a_segment_that_ulysses_cannot_divide() -> None:
    config = load(TINY)
    model = dataclasses.replace(
        config.model, segments=(SegmentConfig("early", 2), SegmentConfig("late", 2))
    )
    rules = preset("ulysses").replace(
        "x", activations={"early/heads": "tensor", "early/kv_heads": "tensor", "mlp": "tensor"}
    )
    with pytest.raises(ConfigError) as caught:
        check(
            dataclasses.replace(
                config, model=model, rules=rules, mesh=MeshConfig(sequence=4, tensor=2)
            ),
            8,
        )
    assert str(caught.value).split("\n  - ")[1:] == [
        "model.n_heads=4, 2 of segment 'early' on each device: Ulysses cannot divide them over "
        "mesh.sequence=4; mesh.sequence can be 1, 2, or exchange by gather or ring, which divide "
        "no heads"
    ]


@pytest.mark.parametrize(
    ("rules", "problem"),
    [
        (
            preset("megatron").replace("x", activations={"seq": "tensor"}),
            "rules.activations['seq']='tensor': attention needs all keys, and no rule says how "
            "over tensor; shard it over 'sequence', or leave 'tensor' out",
        ),
        (
            preset("ring").replace("x", context={"tensor": "ring"}),
            (
                "rules.context['tensor']='ring': the mesh axis 'tensor' cannot shard sequences; "
                "use 'sequence'"
            ),
        ),
        (
            preset("ring").replace("x", context={"mine": "ring"}),
            "rules.context['mine']='ring': the mesh axis 'mine' cannot shard sequences; use "
            "'sequence', or declare it: rules.axes['mine']='manual'",
        ),
        (
            preset("ring+megatron_sp").replace(
                "x", activations={"seq_resid": ("tensor", "sequence")}
            ),
            "rules.activations['seq_resid']=('tensor', 'sequence'): begin with 'sequence', over "
            "which attention's input is sharded, not with ('tensor',)",
        ),
        (
            preset("ring").replace("x", activations={"seq_resid": None}),
            "rules.activations['seq_resid']=None: the residual stream is sharded like attention's "
            "input, over 'sequence'; add 'sequence' in front",
        ),
        (
            preset("ddp").replace("x", context={"sequence": "ring"}),
            (
                "rules.context['sequence']='ring', but rules.activations['seq']=None is not "
                "sharded over 'sequence'; add it there"
            ),
        ),
        (
            preset("usp").replace("x", context={"ulysses": "gather"}),
            "rules.activations['seq']=('sequence', 'ulysses'): sequence by ring, ulysses by "
            "gather; it can be one axis by gather or ring, then others by ulysses",
        ),
    ],
)
def test_sequences_that_rules_cannot_shard(rules: Rules, problem: str) -> None:
    extra = ("ulysses=2",) if rules.axes else ()
    config = dataclasses.replace(
        load(TINY),
        rules=rules,
        mesh=MeshConfig(data=2, sequence=2, tensor=1 if extra else 2, extra=extra),
    )
    with pytest.raises(ConfigError) as caught:
        check(config, 8)
    assert f"  - {problem}" in str(caught.value).splitlines()
