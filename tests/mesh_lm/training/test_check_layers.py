"""Settings of single layers that a model, its rules or its mesh cannot serve: each is refused with
what would work."""

import dataclasses
from typing import Any

import pytest

from mesh_lm.config import PipelineConfig, TrainLoop, load
from mesh_lm.errors import ConfigError
from mesh_lm.training.check import check
from sharding_rules import MeshConfig, preset

TINY = "configs/gpt_tiny.py"
STAGED = {
    "mesh": MeshConfig(pipeline=2, data=4),
    "train": TrainLoop(global_batch=16, microbatches=4),
}
TENSOR = {"mesh": MeshConfig(data=4, tensor=2), "rules": preset("megatron_sp")}
PAIRED = {
    "mesh": MeshConfig(pipeline=2, data=2, tensor=2),
    "train": TrainLoop(global_batch=16, microbatches=4), "rules": preset("megatron_sp"),
    "pipeline": PipelineConfig(stash="residuals", pair_layers=True),
}  # fmt: skip


@pytest.mark.parametrize(
    ("model", "changes", "problem"),
    [
        ({"remat": "full", "remat_layers": 9}, {}, "model.remat_layers=9 must be in [0, 4], the layers of the model"),
        (
            {"remat": "full", "remat_layers": 1, "window": (64, 0)}, {},
            ("model.remat_layers=1 divides a period of 2 layers (model.window); set it to a "
            "multiple of that"),
        ),
        (
            {"remat": "none", "remat_layers": 2}, {},
            "model.remat_layers=2: no policy recomputes less than remat=none of 'blocks'; set "
            "model.remat to one of full, save_attention, save_names, or leave model.remat_layers "
            "unset",
        ),
        (
            {"remat": "full", "remat_layers": 2}, STAGED,
            ("model.remat_layers=2: stages treat all layers alike, and mesh.pipeline=2; leave "
            "model.remat_layers unset"),
        ),
        (
            {"kept_layers": 2}, STAGED,
            ("model.kept_layers=2: a stage keeps what it gathers anyway, and mesh.pipeline=2; set "
            "model.kept_layers=0"),
        ),
        ({"kept_layers": 2}, {}, ("model.kept_layers=2: under rules 'ddp' no layer gathers its own weights; use zero3, "
            "or set it to 0")),
        (
            {"batch_halves": True}, {},
            ("model.batch_halves=True: on this mesh layers exchange no activations that a half "
            "could hide; set model.batch_halves=False"),
        ),
        (
            {"batch_halves": True}, TENSOR | {"train": TrainLoop(global_batch=16, microbatches=4)},
            "model.batch_halves=True: a device has 1 sequences of a microbatch, an odd number; set "
            "train.microbatches=2, or model.batch_halves=False",
        ),
        (
            {"batch_halves": True}, TENSOR | {"train": TrainLoop(global_batch=4)},
            ("model.batch_halves=True: a device has 1 sequences of a microbatch, an odd number; "
                "set "
            "model.batch_halves=False"),
        ),
        (
            {"batch_halves": True}, PAIRED,
            "model.batch_halves=True: pipeline.pair_layers=True hides the same collectives; set "
            "model.batch_halves=False, or pipeline.pair_layers=False",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_layers_that_are_treated_unlike_others(
    model: dict[str, Any], changes: dict[str, Any], problem: str
) -> None:
    config = load(TINY)
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **model),
        **{"rules": preset("ddp"), **changes},
    )
    with pytest.raises(ConfigError) as caught:
        check(config, 8)
    assert str(caught.value) == f"this config cannot run\n  - {problem}"
