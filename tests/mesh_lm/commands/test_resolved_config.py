"""config.json in the output of a run is read again by --config, as the same run, and what is not
such a file is one clear error."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mesh_lm.commands.command_line import parse
from mesh_lm.config import TrainConfig, as_dict, load
from mesh_lm.config.resolved import rules_from, to_json
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig, SegmentConfig
from sharding_rules import PRESETS, MeshConfig

ROOT = Path(__file__).parents[3]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("[!_]*.py"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.json"


def reload(config: TrainConfig, file: Path) -> TrainConfig:
    file.write_text(to_json(config), encoding="utf-8")
    return load(str(file))


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_config_is_the_same_again(name: str, file: Path) -> None:
    config = load(name)
    reloaded = reload(config, file)
    assert as_dict(reloaded) == as_dict(config)
    assert type(reloaded.model) is type(config.model)
    assert dataclasses.replace(reloaded, rules=config.rules) == config, (
        "the types of all fields are the same, tuples included"
    )


@pytest.mark.parametrize("name", PRESETS)
def test_rules_are_the_same_again(name: str, file: Path) -> None:
    config = dataclasses.replace(
        load("gpt_tiny"), rules=PRESETS[name].replace(params={"mlp": None})
    )
    assert reload(config, file).rules.as_dict() == config.rules.as_dict()


def test_exchanges_of_tokens_are_the_same_again() -> None:
    rules = PRESETS["experts_gather"].replace(exchange={"data": "padded"})
    again = rules_from(rules.as_dict())
    assert again.as_dict() == rules.as_dict()
    assert again.exchange == {"expert": "gather", "data": "padded"}


def test_a_config_with_all_kinds_of_fields(file: Path) -> None:
    """Nested dataclasses, tuples, None, and a layer of the user's own."""
    segments = (SegmentConfig.parse("front:1:dense:full"), SegmentConfig.parse("back:1"))
    model = DecoderConfig(n_layers=2, segments=segments, window=(8, 0), remat_layers=None)
    config = dataclasses.replace(
        load("gpt_tiny"), model=model, mesh=MeshConfig(data=2, extra=("tensor_y=2",))
    )
    reloaded = reload(config, file)
    assert dataclasses.replace(reloaded, rules=config.rules) == config


def test_it_repeats_a_run_from_the_command_line(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its path, and with changes, also for a model of the user's own, whose code is in a config
    file."""
    monkeypatch.chdir(file.parent)
    config = parse([str(ROOT / "docs" / "custom_model.py"), "--train.steps=7", "--mesh.data=4"])
    Path("config.json").write_text(to_json(config), encoding="utf-8")
    repeated = parse(["config.json", "--output=again"])
    assert repeated.output == "again"
    assert as_dict(dataclasses.replace(repeated, output=config.output)) == as_dict(config)
    assert type(repeated.model).__name__ == type(config.model).__name__
    assert repeated.train.steps == 7
    assert repeated.mesh.data == 4
    assert parse(["--config=config.json"]).train.steps == 7


def without(*path: str) -> Any:
    def change(plain: dict[str, Any]) -> None:
        *sections, name = path
        for section in sections:
            plain = plain[section]
        del plain[name]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda plain: plain["train"].update(steps="many"),
            "train.steps='many': expected a value of type int",
        ),
        (
            lambda plain: plain["train"].update(steps=True),
            "train.steps=True: expected a value of type int",
        ),
        (
            lambda plain: plain["data"].update(blend=[1]),
            r"data.blend\[0\]=1: expected a value of type str",
        ),
        (
            lambda plain: plain["data"].update(documents="loose"),
            r"data.documents='loose': expected .*'joined', 'separate', .*'packed'",
        ),
        (
            lambda plain: plain["model"].update(d_mode=3),
            "model.d_mode: this version has no such field; remove it",
        ),
        (
            lambda plain: plain["optimizer"].update({"class": "Mine"}),
            "optimizer is a Mine, not a OptimizerConfig; set it in the Python config again",
        ),
        (
            lambda plain: plain["model"].update(module="os.path"),
            "its model is a DecoderConfig, which os.path does not have; name",
        ),
        (
            lambda plain: plain["model"].update(module="no.such"),
            "the module of its model: cannot import the module 'no.such'",
        ),
        (
            lambda plain: plain["mesh"].update(extra=["no"]),
            "mesh.extra='no' is not an axis and its size",
        ),
        (without("model", "class"), "its model has no class and module"),
        (
            without("rules", "params"),
            "rules: expected a name, and a column each for params, gathered, ",
        ),
        (without("model"), "expected a config.json from the output of a run"),
        (lambda plain: plain.update(train=[]), "train: expected an object with its fields"),
    ],
)
def test_a_file_that_was_changed(file: Path, change: Any, message: str) -> None:
    plain = json.loads(to_json(load("gpt_tiny")))
    change(plain)
    file.write_text(json.dumps(plain), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^--config={file}: {message}"):
        load(str(file))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"model": {}}', "[" * 100_000, '{"architectures": ["LlamaForCausalLM"]}'],
)
def test_what_is_no_config(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=f"^--config={file}: "):
        load(str(file))
