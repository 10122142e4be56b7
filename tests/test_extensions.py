"""An optimizer, a data format, a preset and a kind of layer from one file outside of the package:
what [design](../docs/design.md) says under "Where do I add ...".
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mesh_lm
from mesh_lm.commands.command_line import parse
from mesh_lm.config import load
from mesh_lm.data import formats
from mesh_lm.optim import rule_name
from sharding_rules import PRESETS

COMPILE_BUDGET = 120
CONFIG = '''
import csv
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp

from mesh_lm.config import CheckpointConfig, DataConfig, LaunchConfig, OptimizerConfig, TrainConfig, TrainLoop, option
from mesh_lm.data import formats
from mesh_lm.model import DecoderConfig, dense
from sharding_rules import PRESETS, MeshConfig, preset


@dataclasses.dataclass(frozen=True)
class Sign:
    """An optimizer with a hyperparameter of its own."""

    elementwise: ClassVar[bool] = True
    scale: float = option(1.0, above=0)
    """The length of each step, in learning rates."""

    def slots(self, leaves):
        return {}

    def direction(self, grads, slots, params, *, count, leaves):
        return {name: self.scale * jnp.sign(grad) for name, grad in grads.items()}, {}


class Csv(formats.Items):
    """A data format: tables with a header."""

    name = "csv"

    def items(self, path: Path) -> list[Any]:
        return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))

    def text(self, item: Any, field: str, location: str) -> str:
        return item[field]


class Doubled(dense.Layer):
    """A kind of layer: its input counts twice in the residual stream."""

    def __call__(self, x_BSD, ctx):
        y_BSD, cache, sums = super().__call__(x_BSD, ctx)
        return x_BSD + y_BSD, cache, sums

    n_params = staticmethod(dense.n_params)


formats.FORMATS[".csv"] = Csv()
PRESETS["mine"] = preset("ddp").replace("mine", params={"mlp": "tensor"}, activations={"mlp": "tensor"})


def get_config() -> TrainConfig:
    return TrainConfig(
        model=DecoderConfig(vocab_size=272, seq_len=16, d_model=32, n_layers=2, dtype="float32", block=f"{__name__}:Doubled"),
        output="run",
        mesh=MeshConfig(data=-1, tensor=2),
        rules=preset("mine"),
        train=TrainLoop(steps=3, global_batch=4, log_every=1, eval_sequences=4, sample_tokens=0),
        optimizer=OptimizerConfig(Sign(scale=0.5), learning_rate=1e-3, warmup_steps=0),
        data=DataConfig(path="text.csv", tokenizer="bytes", cache="cache", max_epochs=0),
        checkpoint=CheckpointConfig(every=0),
        launch=LaunchConfig(compile_cache=""),
    )
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The config; what it adds to tables is removed again."""
    (tmp_path / "mine.py").write_text(CONFIG, encoding="utf-8")
    rows = "".join(f"{n},row {n} of a table\n" for n in range(200))
    (tmp_path / "text.csv").write_text(f"n,text\n{rows}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    presets, known = dict(PRESETS), dict(formats.FORMATS)
    yield "mine.py"
    PRESETS.clear()
    PRESETS.update(presets)
    formats.FORMATS.clear()
    formats.FORMATS.update(known)


@pytest.mark.slow
def test_a_run_with_one_of_each(file: str) -> None:
    config = load(file)
    run = mesh_lm.train(config)
    assert run.step == 3 and np.isfinite(run.losses).all()
    up = run.state["params"]["blocks.mlp.up.weight"]
    assert "tensor" in str(up.sharding.spec)
    resolved = load("run/config.json")
    assert resolved.optimizer == config.optimizer and resolved.model == config.model


def test_the_command_line_knows_them(file: str) -> None:
    config = parse([file, "--optimizer.rule.scale=2", "--rules=mine+zero1", "--data.path=text.csv"])
    assert rule_name(config.optimizer.rule).endswith("mine.py:Sign")
    assert vars(config.optimizer.rule) == {"scale": 2.0}
    assert config.rules.name == "mine+zero1" and config.rules.params["mlp"] == "tensor"
    assert formats.detect("text.csv") is formats.FORMATS[".csv"]
    assert ".csv" in formats.suffixes()
