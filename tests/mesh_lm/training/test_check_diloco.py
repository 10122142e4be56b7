"""Islands that cannot run: each config is one clear problem, with what would work."""

from __future__ import annotations

import dataclasses

import pytest

from mesh_lm.commands.command_line import parse
from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.training.check import check
from sharding_rules import preset

APART = "mesh.island=2", "mesh.data=4", "rules=diloco", "diloco.outer_steps=100"


def config(*overrides: str) -> TrainConfig:
    return parse(
        ["--config=configs/gpt_tiny.py", *(f"--config.{each}" for each in (*APART, *overrides))]
    )


def problems(given: TrainConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check(given, 8)
    return str(caught.value).split("\n  - ")[1:]


def test_what_can_run() -> None:
    assert check(config(), 8).mesh.island == 2
    assert (
        check(config("mesh.island=1", "mesh.data=8", "rules=ddp"), 8).diloco.outer_steps == 100
    ), "momentum on top of AdamW"
    assert check(
        config("rules=diloco+hsdp+megatron_sp", "mesh.data=1", "mesh.fsdp=2", "mesh.tensor=2"), 8
    )


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["diloco.outer_steps=0"],
            "mesh.island=2, but diloco.outer_steps=0 never averages the islands' weights; set "
            "diloco.outer_steps=100, or use mesh.data for replicas that sum their gradients in "
            "every step",
        ),
        (
            ["rules=ddp"],
            (
                "mesh.island=2, but rules 'ddp' shard no activation over island; set mesh.island=1 "
                "or rules such as ddp+diloco"
            ),
        ),
        (
            ["train.steps=650"],
            (
                "train.steps=650 is not a multiple of diloco.outer_steps=100: the last steps "
                "would not count; it can be 600 or 700"
            ),
        ),
        (
            ["train.steps=50"],
            (
                "train.steps=50 is not a multiple of diloco.outer_steps=100: the last steps "
                "would not count; it can be 100"
            ),
        ),
        (
            ["mesh.pipeline=2", "mesh.data=2"],
            "diloco.outer_steps=100: an island cannot have pipeline stages yet, and "
            "mesh.pipeline=2; set mesh.pipeline=1, and use mesh.fsdp",
        ),
        (
            ["rules=diloco+distributed"],
            "diloco.outer_steps=100: the state of islands cannot be flat vectors yet, and "
            "rules.optimizer['flat']=('pipeline', 'data'); use diloco with ddp, zero1, zero2, fsdp "
            "or hsdp",
        ),
        (
            ["rules=diloco+zero3"],
            "diloco.outer_steps=100: the state of islands cannot be flat vectors yet, and "
            "rules.params['flat']='data'; use diloco with ddp, zero1, zero2, fsdp or hsdp",
        ),
        (
            ["rules=diloco+reduce_int8"],
            "diloco.outer_steps=100: islands do not keep the error feedback of sums in int8 "
            "yet, and rules.reduction='int8'; use +reduce_bfloat16, or rules without +reduce_int8",
        ),
        (
            ["health.rewinds=1"],
            "diloco.outer_steps=100: islands skip steps on their own, so a run cannot roll back "
            "as one, and health.rewinds=1; set health.rewinds=0; a step that is not finite is "
            "skipped on its island only",
        ),
        (
            ["checkpoint.local=/dev/shm/x", "checkpoint.local_every=7"],
            "diloco.outer_steps=100: node-local checkpoints do not know islands yet; leave "
            "checkpoint.local empty, and save to the output",
        ),
        (
            ["diloco.outer_learning_rate=0"],
            "diloco.outer_learning_rate=0.0 must be above 0 and finite",
        ),
        (["diloco.outer_momentum=1"], "diloco.outer_momentum=1.0 must be at least 0 and below 1"),
        (["diloco.outer_steps=-1"], "diloco.outer_steps=-1 must be at least 0"),
        (
            ["train.global_batch=12"],
            (
                "train.global_batch=12 is not divisible by train.microbatches=1 x mesh.island=2 x "
                "mesh.data=4; the global batch can be 8 or 16"
            ),
        ),
    ],
)
def test_one_problem(overrides: list[str], problem: str) -> None:
    assert problems(config(*overrides)) == [problem]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (
            {"optimizer": {"embed": "island"}},
            "rules.optimizer['embed']='island': each island has its own; remove 'island'",
        ),
        (
            {"params": {"embed": "island"}},
            (
                "rules.params['embed']='island': weights are replicated over island; to shard them "
                "over replicas use the mesh axis 'fsdp'"
            ),
        ),
        (
            {"activations": {"batch": ("data", "island")}},
            (
                "rules.activations['batch']=('data', 'island'): island is the outermost axis; set "
                "it to ('island', 'data')"
            ),
        ),
        (
            {"activations": {"mlp": "island"}},
            (
                "rules.activations['mlp']='island': only the batch is sharded over the axis "
                "island; remove 'island'"
            ),
        ),
    ],
)
def test_rows_that_name_islands(rows: dict, problem: str) -> None:
    found = problems(dataclasses.replace(config(), rules=preset("diloco").replace("x", **rows)))
    assert problem in found, found
