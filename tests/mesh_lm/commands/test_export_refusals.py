"""`mesh-lm export` and `import` say what stands in the way, by its field, before a weight is read,
and name only options that they have."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from fixtures import make_checkpoint as fixture

from mesh_lm.checkpoint import config_in
from mesh_lm.commands import huggingface
from mesh_lm.errors import ConfigError
from mesh_lm.inference.trained import TrainedModel

CLASSES = {"export": huggingface.Export, "import": huggingface.Import}
OPTIONS = {
    command: {field.name for field in dataclasses.fields(cls)} for command, cls in CLASSES.items()
}
MINE = """
from mesh_lm.config import TrainConfig
from mesh_lm.model import DecoderConfig

class Mine(DecoderConfig):
    BODY

def get_config():
    return TrainConfig(model=Mine(positions="rotary", norm="rmsnorm", activation="swiglu", biases=False), output="run")
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fixture's run, and a TrainedModel that cannot be loaded."""
    monkeypatch.setattr(
        TrainedModel, "load", lambda *about, **options: pytest.fail("weights are read")
    )
    monkeypatch.chdir(tmp_path)
    shutil.copytree(fixture.OUTPUT, "run")
    return Path("run")


def describe(run: Path, **changes: Any) -> None:
    path = run / "checkpoints" / str(fixture.STEP) / "metadata" / "metadata"
    saved = json.loads(path.read_text(encoding="utf-8"))
    saved["config"]["model"] |= changes
    path.write_text(json.dumps(saved), encoding="utf-8")


def refused(command: str, *options: str) -> str:
    """Returns the error, after looking whether each option in it is one of the command's."""
    with pytest.raises(ConfigError) as caught:
        huggingface.main([command, *options])
    named = {name.replace("-", "_") for name in re.findall(r"--([\w-]+)", str(caught.value))}
    assert named <= OPTIONS[command] | {"init_from", "repo_type", "local_dir"}, (
        f"{command} has no such option: {caught.value}"
    )
    return str(caught.value)


def test_a_field_in_the_way_is_named(run: Path) -> None:
    describe(run, softcap=30.0, window=[1024, 0], n_layers=2)
    error = refused("export", "run", "--output=out")
    assert error.startswith("no supported class of transformers can express this model; ")
    assert (
        "\n  - model.softcap=0.0, not 30.0" in error
        and "\n  - model.window=(), not (1024, 0)" in error
    )


def test_a_model_of_the_users_own(run: Path) -> None:
    """Without its config file, and with it, whose model is not a DecoderConfig or makes other
    layers."""
    describe(run, **{"class": "Mine"})
    error = refused("export", "run", "--output=out")
    assert error.startswith(
        "run is a Mine, a model of your own: no supported class of transformers can express it, "
        "unless Mine is a Decoder"
    )
    Path("mine.py").write_text(
        MINE.replace("BODY", "def make(self, shard, rngs): ..."), encoding="utf-8"
    )
    error = refused("export", "run", "--output=out", "--config=mine.py")
    assert error.startswith(
        "model is a Mine, which makes a model of its own: no supported class of transformers can "
        "express it, only"
    )
    Path("mine.py").write_text(MINE.replace("BODY", "pass"), encoding="utf-8")
    with pytest.raises(pytest.fail.Exception, match="weights are read"):
        huggingface.main(["export", "run", "--output=out", "--config=mine.py"])


def test_an_output_with_something_in_it(run: Path) -> None:
    assert (
        refused("export", "run", "--output=run")
        == "--output=run exists and is not empty; name another directory"
    )


def test_an_import_of_something_else(run: Path) -> None:
    assert refused("import", "run", "--output=new") == (
        "--input=run is not a Hugging Face model directory (config.json and .safetensors); it is a "
        "run's own, which needs no import: --init_from takes it"
    )
    assert "hf download Qwen/Qwen3-0.6B --local-dir=Qwen/Qwen3-0.6B" in refused(
        "import", "Qwen/Qwen3-0.6B", "--output=new"
    )


def test_the_config_of_a_run_is_found_as_its_checkpoint_is(run: Path) -> None:
    saved = config_in(run)
    assert saved and saved == config_in(run / "checkpoints") == config_in(
        run / "checkpoints" / str(fixture.STEP)
    )
    assert (
        config_in("elsewhere") is None
        and config_in(run / "checkpoints" / str(fixture.STEP) / "state") is None
    )
