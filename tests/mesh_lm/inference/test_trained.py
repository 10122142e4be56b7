"""Loading a trained model from a run's directory: its config from JSON, its weights on another
mesh, its tokenizer."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from fixtures import make_checkpoint as fixture

from mesh_lm.config import DataConfig, PipelineConfig, TrainConfig, as_dict
from mesh_lm.data.tokenizer import load_tokenizer, train_tokenizer
from mesh_lm.errors import ConfigError
from mesh_lm.inference.trained import TrainedModel, config_from, keep_tokenizer, weights
from mesh_lm.model import DecoderConfig, SegmentConfig
from mesh_lm.model.experts_config import ExpertsConfig
from sharding_rules import MeshConfig, preset

COMPILE_BUDGET = 22


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The fixture's checkpoint with a tokenizer, as train.py writes them."""
    shutil.copytree(fixture.OUTPUT, tmp_path / "run")
    keep_tokenizer(str(tmp_path / "run"), load_tokenizer("bytes"))
    return tmp_path / "run"


def describe(run: Path, **changes: object) -> None:
    """Changes the JSON of the checkpoint's data position."""
    path = run / "checkpoints" / str(fixture.STEP) / "data" / "metadata"
    path.write_text(
        json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8"
    )


@pytest.mark.parametrize(
    "config",
    [
        fixture.CONFIG,
        TrainConfig(
            model=DecoderConfig(window=(4, 0), n_layers=2), output="x",
            rules=preset("hsdp+megatron_sp+zero1"), mesh=MeshConfig(tensor=2),
            data=DataConfig(blend=("1", "a", "2", "b")), seed=3,
        ),
        TrainConfig(
            model=DecoderConfig(), output="x", mesh=MeshConfig(extra=("y=2",)),
            rules=preset("zero2").replace("mine", axes={"y": "auto"}, params={"moe/mlp": ("tensor", "y"), "mlp": "y"}),
        ),
        TrainConfig(
            model=DecoderConfig(
                n_layers=2, segments=(SegmentConfig("first", 1), SegmentConfig("rest", 1, "moe")),
                experts=ExpertsConfig(number=4, normalised=False),
            ),
            output="x", rules=preset("experts_gather"), mesh=MeshConfig(expert=2),
        ),
        TrainConfig(
            model=DecoderConfig(block="moe", experts=ExpertsConfig(number=16, score="sigmoid")), output="x",
            rules=preset("experts_padded+zero3"), mesh=MeshConfig(expert=2),
        ),
    ],
)  # fmt: skip
def test_a_config_comes_back_from_json(config: TrainConfig) -> None:
    plain = json.loads(json.dumps(as_dict(config)))
    assert as_dict(config_from(plain, None, "here")) == as_dict(config)
    assert config_from(plain, None, "here").model == config.model
    assert config_from(plain, None, "here").rules.axes == config.rules.axes
    plain["train"]["a field of long ago"] = 1
    del plain["data"]
    assert as_dict(config_from(plain, None, "here")) == as_dict(
        dataclasses.replace(config, data=DataConfig())
    )


def test_a_run_is_loaded_on_any_mesh(run: Path) -> None:
    trained = TrainedModel.load(
        run, mesh=MeshConfig(fsdp=2, tensor=2, data=-1), rules=preset("hsdp+megatron")
    )
    assert trained.step == fixture.STEP and trained.config.model == fixture.CONFIG.model
    assert (
        trained.layout.shard.mesh.shape["data"] == 2
        and trained.tokenizer.fingerprint == load_tokenizer("bytes").fingerprint
    )
    for name, leaf in trained.params.items():
        np.testing.assert_array_equal(
            leaf, fixture.pattern(f"['params']['{name}']", leaf.shape, leaf.dtype)
        )
        assert leaf.sharding == trained.layout.shardings("params")[name]
    again = weights(run / "checkpoints" / str(fixture.STEP), trained.layout)()
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, trained.params))


def test_the_mesh_of_training_gives_way_to_the_devices_here(run: Path) -> None:
    path = run / "checkpoints" / str(fixture.STEP) / "metadata" / "metadata"
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved["config"]["mesh"] |= {"data": 512, "tensor": 8}
    path.write_text(json.dumps(saved), encoding="utf-8")
    assert TrainedModel.load(run).config.mesh == MeshConfig(data=8)
    with pytest.raises(ConfigError, match="mesh has 3 devices"):
        TrainedModel.load(run, mesh=MeshConfig(tensor=3))


def test_stages_of_training_are_merged_into_fsdp(run: Path) -> None:
    path = run / "checkpoints" / str(fixture.STEP) / "metadata" / "metadata"
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved["config"]["mesh"] |= {"pipeline": 2, "data": 2, "tensor": 2}
    saved["config"]["rules"] = preset("megatron+reduce_bfloat16").as_dict()
    saved["config"]["pipeline"] = {"schedule": "1f1b", "layers": [1, 1]}
    path.write_text(json.dumps(saved), encoding="utf-8")
    trained = TrainedModel.load(run)
    assert (trained.config.mesh, trained.config.pipeline) == (
        MeshConfig(data=2, fsdp=2, tensor=2),
        PipelineConfig(),
    )
    assert (
        trained.config.rules == trained.layout.shard.rules
        and trained.config.rules.params["embed"] == "fsdp"
    )
    assert trained.config.rules.reduction == "bfloat16"
    for name, leaf in trained.params.items():
        np.testing.assert_array_equal(
            leaf, fixture.pattern(f"['params']['{name}']", leaf.shape, leaf.dtype)
        )


def test_the_wrong_tokenizer_is_refused(run: Path, tmp_path: Path) -> None:
    describe(run, tokenizer=load_tokenizer("bytes").fingerprint)
    TrainedModel.load(run)
    (tmp_path / "other").mkdir()
    other = train_tokenizer(["some text"], 257).save(tmp_path / "other")
    with pytest.raises(
        ConfigError,
        match=(
            r"other.* is not the tokenizer that .*run was trained with: its ids have other "
            r"meanings"
        ),
    ):
        TrainedModel.load(run, tokenizer=str(other))
    shutil.rmtree(run / "tokenizer")
    with pytest.raises(
        ConfigError,
        match=r"no tokenizer is stored in .*; name the one that .* was trained with: --tokenizer=",
    ):
        TrainedModel.load(run)
    assert (
        TrainedModel.load(run, tokenizer="bytes").tokenizer.vocab_size
        == load_tokenizer("bytes").vocab_size
    )


def test_what_is_not_a_model(run: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(
            ConfigError, match="holds neither checkpoints of a run nor a Hugging Face model"
        ):
            TrainedModel.load(path)
    path = run / "checkpoints" / str(fixture.STEP) / "metadata" / "metadata"
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved["config"]["model"]["n_moons"] = 2
    path.write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(
        ConfigError, match="its model has fields that this version does not know: n_moons"
    ):
        TrainedModel.load(run)
    saved["config"]["model"]["class"] = "MyModel"
    path.write_text(json.dumps(saved), encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"is a MyModel, which is not a class of mesh_lm; name the config file"
    ):
        TrainedModel.load(run)
    assert TrainedModel.load(run, model=fixture.CONFIG.model).step == fixture.STEP


def test_declared_mesh_axes_need_no_size_to_be_loaded(run: Path) -> None:
    """A run with a custom mesh axis is loaded on a mesh without that axis."""
    rules = preset("megatron").replace(
        axes={"y": "auto"}, params={"mlp": ("tensor", "y")}, activations={"mlp": ("tensor", "y")}
    )
    trained = TrainedModel.load(run, mesh=MeshConfig(data=4, tensor=2), rules=rules)
    assert trained.config.mesh == MeshConfig(data=4, tensor=2, extra=("y=1",))
