"""The Python API: a run from Python is the run of the command line, twice in one process, and
callbacks are called and obeyed."""

import argparse
import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import mesh_lm
from mesh_lm.config import (
    CheckpointConfig,
    DataConfig,
    LaunchConfig,
    OptimizerConfig,
    TrainConfig,
    TrainLoop,
    as_dict,
    load,
)
from mesh_lm.data.dataset import Dataset
from mesh_lm.data.rows import TokenWindows
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.optim import rule_name
from mesh_lm.training import loop
from sharding_rules import MeshConfig
from sharding_rules.lab import LabError, lint

COMPILE_BUDGET = 280
ROOT = Path(__file__).parents[2]
MODEL = DecoderConfig(
    vocab_size=512, seq_len=32, n_layers=2, d_model=32, dtype="float32", loss_chunk=128
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """A run of four steps on two devices; the tests give it an output."""
    directory = tmp_path_factory.mktemp("api")
    (directory / "text.txt").write_text(inspect.getsource(argparse), encoding="utf-8")
    return TrainConfig(
        model=MODEL,
        output=str(directory / "none"),
        mesh=MeshConfig(data=8),
        train=TrainLoop(
            steps=4, global_batch=8, log_every=1, eval_every=2, eval_sequences=8, sample_tokens=0
        ),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=2),
        data=DataConfig(
            path=str(directory / "text.txt"), tokenizer_vocab=512, cache=str(directory / "cache")
        ),
        checkpoint=CheckpointConfig(every=0),
        launch=LaunchConfig(compile_cache=""),
    )


@pytest.fixture(scope="module")
def trained(config: TrainConfig, tmp_path_factory: pytest.TempPathFactory) -> mesh_lm.Run:
    return mesh_lm.train(to(tmp_path_factory.mktemp("trained"), config))


def to(output: Path, config: TrainConfig, **train: Any) -> TrainConfig:
    return dataclasses.replace(
        config, output=str(output), train=dataclasses.replace(config.train, **train)
    )


class Noted:
    """A callback that notes what it is told."""

    def __init__(self, raises: int = 0, stops: int = 0) -> None:
        self.told: list[tuple[str, int, list[str]]] = []
        self._raises, self._stops = raises, stops

    def on_start(self, run: mesh_lm.Run) -> None:
        self.told.append(("start", run.step, []))

    def on_step(self, run: mesh_lm.Run, metrics: Any) -> None:
        self.told.append(("step", run.step, sorted(metrics)))
        if run.step == self._raises:
            raise ZeroDivisionError("mine")
        if run.step == self._stops:
            run.stop()

    def on_evaluation(self, run: mesh_lm.Run, metrics: Any) -> None:
        self.told.append(("evaluation", run.step, sorted(metrics)))

    def on_end(self, run: mesh_lm.Run) -> None:
        self.told.append(("end", run.step, []))

    @property
    def order(self) -> list[tuple[str, int]]:
        return [(name, step) for name, step, _ in self.told]


def test_importing_the_package_costs_nothing() -> None:
    code = (
        "import mesh_lm, sys; print(mesh_lm.__version__, [m for m in ('jax', 'numpy', 'tyro', "
        "'mesh_lm.api') if m in sys.modules])"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert out.split() == [mesh_lm.__version__, "[]"]
    with pytest.raises(
        AttributeError, match=r"no attribute 'fit'; it has Run, __version__, load, plan, train"
    ):
        mesh_lm.fit  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_a_run_tells_what_it_measured(trained: mesh_lm.Run) -> None:
    rows = [
        json.loads(line)
        for line in (trained.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert trained.metrics == rows and trained.losses == [
        row["loss"] for row in rows if "loss" in row
    ]
    assert len(trained.losses) == 4 and trained.losses[-1] < trained.losses[0]
    assert (trained.step, int(trained.state["step"]), trained.status, trained.unfinished) == (
        4,
        4,
        0,
        False,
    )
    assert {"params", "mu", "nu"} < trained.state.keys()
    assert {"mean_loss", "tokens", "epoch", "wait_ms"} < {*rows[0]} and rows[0]["tokens"] == 256
    assert (
        json.loads((trained.output / "config.json").read_text(encoding="utf-8"))["model"]["d_model"]
        == 32
    )
    log = (trained.output / "log.txt").read_text(encoding="utf-8")
    assert (
        "attention: xla (model.attention=auto)" in log
        and "k parameters, 256 tokens a step, rules ddp" in log
    )
    assert (
        log.startswith("--- ")
        and "training a byte-level BPE" in log
        and "saving step 4 (state " in log
    )
    assert (
        "0.03 epochs\n" in log
        and "step 4/4  loss" in log
        and "step 4: held-out" in log
        and "wall time" in log
    )


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        (
            [type("Mine", (), {"on_stp": print})()],
            r"Mine\.on_stp: no such method of a callback; did you mean on_step\?",
        ),
        (7, "callbacks=7: expected a list"),
    ],
)
def test_what_is_no_callback_is_refused_before_anything_begins(
    config: TrainConfig, tmp_path: Path, callbacks: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        mesh_lm.train(to(tmp_path / "none", config), callbacks=callbacks)
    assert not (tmp_path / "none").exists()


def test_the_same_run_again_and_in_two_halves(
    config: TrainConfig, trained: mesh_lm.Run, tmp_path: Path
) -> None:
    """The second call goes on from the first one's checkpoint, and a third finds nothing to do."""
    noted = Noted(stops=2)
    half = mesh_lm.train(to(tmp_path, config), callbacks=[noted])
    assert half.losses == trained.losses[:2] and half.step == 2 and half.status == 0
    assert noted.order == [("start", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("end", 2)]
    noted = Noted()
    whole = mesh_lm.train(to(tmp_path, config), callbacks=[noted])
    assert whole.losses == trained.losses
    assert noted.order == [("start", 2), ("step", 3), ("step", 4), ("evaluation", 4), ("end", 4)]
    before = (tmp_path / "loss.png").stat().st_mtime_ns
    assert mesh_lm.train(to(tmp_path, config)).losses == trained.losses
    last = (tmp_path / "log.txt").read_text(encoding="utf-8").rpartition("--- ")[2]
    assert (
        "already finished (step 4 of 4): nothing to do; raise train.steps to train on (" in last
        and "loss curve" not in last
    )
    assert "goodput" not in last and "wall time" not in last
    assert (tmp_path / "loss.png").stat().st_mtime_ns == before and "resumed at step 2" in (
        tmp_path / "log.txt"
    ).read_text(encoding="utf-8")


def test_the_kept_config_repeats_the_run(
    config: TrainConfig, trained: mesh_lm.Run, tmp_path: Path
) -> None:
    again = mesh_lm.train(to(tmp_path, load(str(trained.output / "config.json"))))
    assert again.losses == trained.losses and as_dict(again.config) == as_dict(
        to(tmp_path, trained.config)
    )


def test_callbacks_are_told_of_every_step_and_evaluation(
    config: TrainConfig, tmp_path: Path
) -> None:
    noted = Noted()
    mesh_lm.train(to(tmp_path, config), callbacks=[noted, object()])
    steps = [("step", n) for n in (1, 2, 3, 4)]
    assert noted.order == [
        ("start", 0),
        *steps[:2],
        ("evaluation", 2),
        *steps[2:],
        ("evaluation", 4),
        ("end", 4),
    ]
    about = {name: keys for name, _, keys in noted.told}
    assert {"loss", "grad_norm", "learning_rate"} < {*about["step"]} and about["evaluation"] == [
        "heldout_bpb",
        "heldout_loss",
    ]


@pytest.mark.slow
def test_an_exception_in_a_callback_is_the_users_after_the_run_was_saved(
    config: TrainConfig, trained: mesh_lm.Run, tmp_path: Path
) -> None:
    with pytest.raises(ZeroDivisionError, match="mine"):
        mesh_lm.train(to(tmp_path, config), callbacks=[Noted(raises=3)])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]
    assert mesh_lm.train(to(tmp_path, config)).losses == trained.losses


def test_a_trained_model_writes_and_scores(trained: mesh_lm.Run) -> None:
    model = mesh_lm.load(trained.output)
    texts = model.generate(["def ", "import "], 8, seed=1)
    assert model.step == 4 and len(texts) == 2 and all(isinstance(text, str) for text in texts)
    assert model.generate("def ", 8, seed=1) == texts[0], (
        "a text depends on its own place in the list, and on the seed"
    )
    short, both = model.score("import os\n"), model.score(["import os\n", "class Action:\n"])
    assert (
        both.texts == 2
        and both.nats > short.nats > 0
        and both.n_bytes == len("import os\nclass Action:\n")
    )
    with pytest.raises(
        ConfigError, match="holds neither checkpoints of a run nor a Hugging Face model"
    ):
        mesh_lm.load(trained.output / "nothing")


class SignDescent:
    """A rule that is no dataclass."""

    elementwise = True

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    def slots(self, leaves: Any) -> dict:
        return {}

    def direction(self, grads: Any, slots: Any, params: Any, *, count: Any, leaves: Any) -> Any:
        return {name: self._scale * jnp.sign(g) for name, g in grads.items()}, {}


@pytest.mark.slow
def test_an_optimizer_of_ones_own(config: TrainConfig, tmp_path: Path) -> None:
    """In the config and beside it; it goes on from its own checkpoint, and no other optimizer
    does."""
    rule = SignDescent()
    own = dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, rule=rule))
    in_config = mesh_lm.train(to(tmp_path / "config", own))
    beside = mesh_lm.train(to(tmp_path / "beside", config), optimizer=rule)
    assert in_config.losses == beside.losses and beside.losses[-1] < beside.losses[0] - 0.05
    assert beside.state.keys() == {"params", "recent", "skipped", "step"}, (
        "slots that no one asked for"
    )
    assert rule_name(beside.config.optimizer.rule) == f"{__name__}:SignDescent"
    slower = mesh_lm.train(to(tmp_path / "slower", config), optimizer=SignDescent(scale=0.1))
    assert slower.losses[-1] > beside.losses[-1] + 0.02
    half = to(tmp_path / "half", config)
    mesh_lm.train(half, optimizer=rule, callbacks=[Noted(stops=2)])
    with pytest.raises(ConfigError, match="checkpoint"):
        mesh_lm.train(half)
    assert mesh_lm.train(half, optimizer=rule).losses == beside.losses
    with pytest.raises(
        ConfigError,
        match=r"optimizer\.rule=builtins:dict is not an update rule: it lacks elementwise, slots,",
    ):
        mesh_lm.train(config, optimizer={1: 2})  # pyright: ignore[reportArgumentType]


class Counting(Dataset):
    """Sequence k counts up from k, as an order of one's own gives it."""

    name, train_tokens, heldout_tokens = "counting", 1000 * 32, 8 * 32

    def training_order(self, config: TrainConfig, saved: Any, last: int) -> Any:
        return Counted(config.model.seq_len, 1000)

    def heldout_order(self, config: TrainConfig) -> Any:
        return Counted(config.model.seq_len, 8)


class NothingHeldOut(Counting):
    heldout_tokens = 0

    def heldout_order(self, config: TrainConfig) -> Any:
        raise AssertionError("not called")


class Counted:
    def __init__(self, seq_len: int, n: int) -> None:
        self.seq_len, self._n = seq_len, n

    def __len__(self) -> int:
        return self._n

    def read(self, indices: np.ndarray) -> TokenWindows:
        return TokenWindows.of(
            ((indices[:, None] % self._n + np.arange(self.seq_len + 1)) % 512).astype(np.int32)
        )


@pytest.mark.slow
def test_data_of_ones_own(config: TrainConfig, tmp_path: Path) -> None:
    """An array of ids, a list of them, and a dataset; each goes on from its own checkpoint, and no
    other data does."""
    ids = (np.arange(20_000) ** 2 % 509).astype(np.uint16)
    by_array = mesh_lm.train(to(tmp_path / "array", config), data=ids)
    by_list = mesh_lm.train(to(tmp_path / "list", config), data=ids.tolist())
    assert by_array.losses == by_list.losses and len(by_array.losses) == 4
    assert {"heldout_loss"} == {*by_array.metrics[-1]} - {"step"}, "bytes are not known"
    counting = to(tmp_path / "counting", config)
    mesh_lm.train(counting, data=Counting(), callbacks=[Noted(stops=2)])
    with pytest.raises(
        ConfigError,
        match=r"was trained on corpus counting in sequences of 32, seed 0, this config reads tokens-",
    ):
        mesh_lm.train(counting, data=ids)
    run = mesh_lm.train(counting, data=NothingHeldOut(), callbacks=[noted := Noted()])
    assert run.losses != by_array.losses and len(run.losses) == 4
    assert noted.order == [("start", 2), ("step", 3), ("step", 4), ("end", 4)]
    assert (tmp_path / "counting" / "log.txt").read_text(encoding="utf-8").count(
        "the data has no held-out part: evaluation is off\n"
    ) == 1
    for wrong, said in (
        ([0.5, 1.5], r"not float64 \[2\]"),
        ([[1, 2], [3]], "not list"),
        (np.ones(5, int), "5 token ids are too few"),
    ):
        with pytest.raises(ConfigError, match=said):
            mesh_lm.train(config, data=wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ConfigError,
        match=r"the given token ids, document 0: token id 600, but model\.vocab_size=512",
    ):
        mesh_lm.train(to(tmp_path / "wrong", config), data=ids + 600 - ids)


def test_a_config_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: list[TrainConfig] = []
    monkeypatch.setattr(loop, "train", lambda config, *rest, **options: given.append(config))
    monkeypatch.chdir(tmp_path)
    mesh_lm.train("gpt_tiny")
    mesh_lm.train(ROOT / "configs" / "gpt2_124m.py")
    assert [each.output for each in given] == ["runs/gpt_tiny", "runs/gpt2_124m"]
    with pytest.raises(
        ConfigError, match=r"--config=gpt_tny: there is no such config; did you mean gpt_tiny\?$"
    ):
        mesh_lm.train("gpt_tny")


@pytest.mark.deviceless
def test_a_plan(config: TrainConfig) -> None:
    report = mesh_lm.plan(config, "h100", 8)
    assert report.fits and report.n_devices == 8 and report.count("all-reduce", "data") > 0
    with pytest.raises(ConfigError, match="mesh"):
        mesh_lm.plan(config, "h100", 6)
    misspelt = dataclasses.replace(config, rules=config.rules.replace(params={"mpl": None}))
    assert [one.check for one in lint(report, misspelt.rules)] == ["dead-rule"], (
        "the report has the names of the dimensions"
    )
    assert (
        mesh_lm.plan(dataclasses.replace(config, rules="ddp"), "h100", 8).collectives
        == report.collectives
    )  # pyright: ignore
    with pytest.raises(
        LabError, match=r"^the target 'h1000' is unknown; expected one of h100, h200, a100, b200$"
    ):
        mesh_lm.plan(config, "h1000", 8)
