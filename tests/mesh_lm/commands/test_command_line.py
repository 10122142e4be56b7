"""The command line: accepted forms, and error messages."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_lm.commands.command_line import parse
from mesh_lm.config import TrainConfig, as_dict
from mesh_lm.errors import ConfigError
from sharding_rules import PRESETS, Rules, preset

CONFIG = '''
from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from mesh_lm.config import ModelConfig, OptimizerConfig, TrainConfig
from sharding_rules import preset


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of a block."""

    count: int = 8
    """Experts in one block."""


@dataclasses.dataclass(frozen=True)
class Mine(ModelConfig):
    """A model of my own."""

    n_layers: int = 4
    """How deep, in fathoms."""
    dropout: float = 0.0
    """How leaky."""
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    """Which norm."""
    sinks: bool = False
    """Whether water leaves."""
    window: tuple[int, ...] = ()
    """Widths, in tokens."""
    depth: int | None = None
    """Depth, in metres."""
    experts: Experts = Experts()
    act: Callable[[int], int] = abs
    """What is done to a number."""

    def __post_init__(self) -> None:
        if self.n_layers == 13:
            raise ValueError("13 layers sink")


def get_config() -> TrainConfig:
    rules = preset("ddp").replace(params={"mlp": None})
    return TrainConfig(model=Mine(n_layers=5), output="runs/mine", rules=rules, optimizer=OptimizerConfig(learning_rate=2e-4))
'''
WriteConfig = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteConfig:
    """Puts a config file next to the current directory, and returns its relative path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def write_(text: str) -> str:
        (tmp_path / "mine.py").write_text(textwrap.dedent(text), encoding="utf-8")
        return "mine.py"

    return write_


@pytest.fixture
def config(write: WriteConfig) -> str:
    return write(CONFIG)


def error_of(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(list(argv))
    return str(caught.value)


def problems_of(*argv: str) -> list[str]:
    first, *problems = error_of(*argv).split("\n  - ")
    assert first == "bad command line"
    return problems


def leaves(section: Any, prefix: str = "--config") -> Iterator[str]:
    """The fields that --help shows without --help-all."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, Rules):
            yield from leaves(value, f"{prefix}.{field.name}")
        elif not field.metadata.get("expert"):
            yield f"{prefix}.{field.name}"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("model.n_layers", "7", 7),
        ("model.vocab_size", "1_024", 1024),
        ("model.dropout", "1e-3", 0.001),
        ("model.norm", "rmsnorm", "rmsnorm"),
        ("model.sinks", "true", True),
        ("model.sinks", "False", False),
        ("model.window", "1024,0", (1024, 0)),
        ("model.window", "", ()),
        ("model.depth", "3", 3),
        ("model.depth", "None", None),
        ("model.experts.count", "2", 2),
        ("data.megatron", "", ()),
        (
            "data.megatron",
            "no_extra_token,drop_last_partial",
            ("no_extra_token", "drop_last_partial"),
        ),
        ("mesh.data", "-1", -1),
        ("mesh.tensor", "8", 8),
        ("mesh.extra", "tensor_y=2", ("tensor_y=2",)),
        ("mesh.extra", "tensor_y=2,replica=-1", ("tensor_y=2", "replica=-1")),
        ("optimizer.schedule", "wsd", "wsd"),
        ("output", "-odd=name", "-odd=name"),
        ("launch.compile_cache", "", ""),
        ("rules", "zero1", PRESETS["zero1"]),
        ("rules", "fsdp+megatron_sp", preset("fsdp+megatron_sp")),
        (
            "rules",
            "fsdp+reduce_float32",
            PRESETS["fsdp"].replace("fsdp+reduce_float32", reduction="float32"),
        ),
    ],
)
@pytest.mark.parametrize("joined", [True, False], ids=["=", "space"])
def test_override(config: str, name: str, text: str, value: object, joined: bool) -> None:
    words = [f"--config.{name}={text}"] if joined else [f"--config.{name}", text]
    found: Any = parse([f"--config={config}", *words])
    for part in name.split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_overrides_leave_the_rest_alone(config: str) -> None:
    plain = parse(["--config", config])
    assert isinstance(plain, TrainConfig)
    assert type(plain.model).__name__ == "Mine"
    assert plain.rules.name == "ddp (changed)"
    changed = parse(
        [
            f"--config={config}",
            "--config.train.steps=3",
            "--config.train.steps=4",
            "--config.model.n-layers=6",
        ]
    )
    expected = as_dict(plain)
    expected["train"]["steps"] = 4
    expected["model"]["n_layers"] = 6
    assert as_dict(changed) == expected


def test_every_problem_at_once(config: str) -> None:
    argv = """--config.model.n_layer=3 --config.n_layers=4 --config.trian.steps=3 --config.steps=4 --config.train.step=1
        --config.train.steps=abc --config.train.steps=1e3 --config.optimizer.lr=1 --config.optimizer.schedule=cosin --config.model=gpt
        --config.model.sinks=yes --config.model.sinks --config.model.window=1,b --config.model.depth=x --config.model.act=f
        --config.rules=fspd+megatron --confg=x --model.n_layers 4 bar --foo=1 baz mine.py"""
    assert problems_of(f"--config={config}", *argv.split()) == [
        "--config.model.n_layer: the config has no such field; did you mean --config.model.n_layers=3?",
        "--config.n_layers: the config has no such field; did you mean --config.model.n_layers=4?",
        "--config.trian.steps: the config has no such field; did you mean --config.train.steps?",
        (
            "--config.steps: the config has no such field; did you mean --config.train.steps or "
            "--config.profile.steps?"
        ),
        "--config.train.step: the config has no such field; did you mean --config.train.steps?",
        "--config.train.steps=abc: expected int",
        "--config.train.steps=1e3: expected int",
        "--config.optimizer.lr: the config has no such field; did you mean --config.optimizer.learning_rate=1?",
        (
            "--config.optimizer.schedule=cosin: expected one of cosine, wsd, linear, constant; did "
            "you mean cosine?"
        ),
        "--config.model: this is a section, not a field; set its fields, as in --config.model.vocab_size",
        "--config.model.sinks=yes: expected true or false",
        "--config.model.window=1,b: expected int, with commas between several and nothing for none",
        "--config.model.depth=x: expected int | None",
        "--config.model.act=f: expected collections.abc.Callable[[int], int]",
        "--config.rules=fspd+megatron: there is no rules preset 'fspd'; did you mean 'fsdp'?",
        "--confg: the config has no such field; did you mean --config?",
        "--foo: the config has no such field; see --help",
        "mine.py: belongs to no option; did you mean --config=mine.py?",
        "bar: belongs to no option",
    ]


def test_an_extra_mesh_axis_that_cannot_be(config: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([f"--config={config}", "--config.mesh.extra=tensor=2"])
    assert str(caught.value) == (
        f"{config}: mesh.extra='tensor=2': the mesh already has an axis 'tensor'; set mesh.tensor=2"
    )


def test_config_twice_or_without_a_file(config: str) -> None:
    assert problems_of(f"--config={config}", f"--config={config}") == [
        "--config is given 2 times: mine.py, mine.py"
    ]
    with pytest.raises(ConfigError, match=r"needs a file, as in --config=configs/gpt_tiny\.py"):
        parse(["--config"], default=config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "mine.py: no function get_config() -> TrainConfig"),
        (
            "def get_config():\n    return {}\n",
            "mine.py: get_config() returned a value of type dict; expected TrainConfig",
        ),
        ("\n1 / 0\n", "mine.py:2: ZeroDivisionError: division by zero"),
        (
            "import json\n\ndef get_config():\n    return json.loads('{')\n",
            "mine.py:4: JSONDecodeError: Expecting property name",
        ),
        (
            "import sharding_rules as s\n\nR = s.preset('dpd')\n",
            "mine.py:3: ShardingRuleError: there is no rules preset 'dpd'; did you mean 'ddp'?",
        ),
        ("def get_config(:\n", "mine.py:1: SyntaxError: invalid syntax"),
        ("import nonesuch\n", "mine.py:1: ModuleNotFoundError: No module named 'nonesuch'"),
        (
            CONFIG.replace("depth: int", "depth: Nonesuch"),
            "Mine: name 'Nonesuch' is not defined; the types of its fields must be",
        ),
    ],
)
def test_bad_file(write: WriteConfig, text: str, message: str) -> None:
    assert error_of(f"--config={write(text)}", "--help").startswith(message)


def test_missing_file(config: str, tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    assert (
        error_of("--config=other.py")
        == f"--config=other.py: cannot find a file of this name in {tmp_path} or {root}"
    )
    assert (
        error_of("--config=minne.py")
        == f"--config=minne.py: cannot find a file of this name in {tmp_path} or {root}; did you mean mine.py?"
    )
    assert (
        error_of(f"--config={tmp_path}/minne.py")
        == f"--config={tmp_path}/minne.py: cannot find a file of this name; did you mean {tmp_path}/mine.py?"
    )
    Path("mine.yaml").touch()
    assert error_of("--config=mine.yaml").startswith(
        "--config=mine.yaml: a config is a .py file with get_config(), or the config.json of a "
        "run; "
    )


def test_a_file_beside_the_package_is_found_from_anywhere(config: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^mesh_lm/commands/command_line.py: no function get_config\(\)"
    ):
        parse(["--config=mesh_lm/commands/command_line.py"])


def test_post_init_of_the_user(config: str) -> None:
    assert error_of(f"--config={config}", "--config.model.n_layers=13") == "mine.py: 13 layers sink"


@pytest.mark.parametrize("flag", ["--help", "-h", "--help-all"])
def test_help(
    config: str, flag: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options as the docs spell them, with their values; the complete help has types and all that
    is known."""
    if flag != "--help-all":  # which is laid out in columns where there is room
        monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as caught:
        parse([f"--config={config}", flag])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", text).split())
    hidden = {
        name
        for name in leaves(parse([f"--config={config}"]))
        if f"--{name.removeprefix('--config.')}" not in words
    }
    assert (
        "--config." not in words
        and "--model.n_layers" in words
        and ("--data.threads" in words) == (flag == "--help-all")
    )
    assert not hidden and "the values below are those of mine.py" in words
    complete = (
        "--model.n_layers INT How deep, in fathoms. (default: 5)",
        "--model.vocab_size INT Token ids run from 0 to vocab_size - 1. (default: 4096)",
        "--model.experts.count INT Experts in one block. (default: 8)",
        "--model.norm {layernorm,rmsnorm} Which norm. (default: layernorm)",
        "--launch.deterministic {true,false} On a GPU, use only",
        "(default: 'ddp (changed)')",
    )
    short = (
        "--model.n_layers=5 How deep, in fathoms ",
        "--model.vocab_size=4096 Token ids run from 0 to vocab_size - 1 ",
        "--model.experts.count=8 Experts in one block ",
        "--model.norm=layernorm Which norm [layernorm, rmsnorm] ",
        "--model.act=abs What is done to a number ",
        "--optimizer.learning_rate=0.0002 Peak learning rate ",
        (
            "--launch.deterministic=false On a GPU, use only operations that give the same bits "
            "every time"
        ),
        "--rules=ddp (changed) Sharding rules: a preset",
        "--mesh.tensor=1 Shards of each matmul (tensor parallelism); keep them inside a node ",
    )
    for expected in complete if flag == "--help-all" else short:
        assert expected in words


def test_the_help_is_short(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a terminal is 80 columns wide, the help of the tiny config has under 200 lines."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(["--config=configs/gpt_tiny.py", "--help"])
    assert capsys.readouterr().out.count("\n") < 200


def test_only_the_command_line_knows_tyro() -> None:
    code = (
        "import sys, mesh_lm.config, mesh_lm.report; sys.exit(sorted({'tyro', 'matplotlib'} & "
        "set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
