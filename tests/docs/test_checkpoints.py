"""docs/checkpoints.md: its commands are run on a tiny model, and their output, and what a run says,
are what the page shows."""

import dataclasses
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
from fixtures import make_checkpoint as fixture
from support import shard_on

from mesh_lm.checkpoint import Checkpoints, manager
from mesh_lm.commands.checkpoint import main
from mesh_lm.commands.command_line import parse
from mesh_lm.config import CheckpointConfig, OptimizerConfig, TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.optim import Lion, Optimizer, rule_name
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state.initial import init_state

COMPILE_BUDGET = 55
PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.M | re.S)
COMMANDS = [(text, BLOCKS[at + 1][1]) for at, (kind, text) in enumerate(BLOCKS) if kind == "sh"]
TEXTS = [text for kind, text in BLOCKS if kind == "text"]
OPTIMIZER = fixture.OPTIMIZER


def configured(output: Path, **changes: object) -> TrainConfig:
    return dataclasses.replace(fixture.CONFIG, output=str(output), **changes)


def layout() -> ModelLayout:
    return ModelLayout.of(fixture.CONFIG.model, shard_on("ddp"))


def write(config: TrainConfig, steps: tuple[int, ...], samples: int) -> None:
    """In each step three elements of one array are others."""
    filled = fixture.filled(fixture.abstract(config, layout().shard))
    with Checkpoints(config) as checkpoints:
        for step in steps:
            weight = np.array(filled["params"]["positions"])
            weight[0, :3] += np.float32(step / 1000 + config.seed)
            state = filled | {
                "step": jax.numpy.int32(step),
                "params": filled["params"] | {"positions": jax.numpy.asarray(weight)},
            }
            checkpoints.save(
                step,
                state,
                {"position": 32 * step, "samples": f"{step * samples % 2**64:016x}"},
                layout(),
                OPTIMIZER,
            )


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the runs of the page. One element of step 1000 of the first is not what was
    saved."""
    directory = tmp_path_factory.mktemp("here")
    runs = directory / "runs"
    write(configured(runs / "gpt_tiny"), (500, 750, 1000), 0x9E3779B97F4A7C15)
    write(configured(runs / "other_seed", seed=1), (1000,), 0xD1B54A32D192ED03)
    write(configured(runs / "again"), (750,), 0x9E3779B97F4A7C15)
    files = {"driver": "file", "path": f"{runs}/gpt_tiny/checkpoints/1000/state/"}
    kvstore = {"driver": "ocdbt", "base": files, "path": "params.embedding/"}
    ts.open({"driver": "zarr3", "kvstore": kvstore}).result()[5, 5] = 1e-3
    return directory


@pytest.fixture
def shown(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """A text without what is another each time: where the runs are, times, and sizes on disk, in
    which versions are written."""

    def plain(text: str) -> str:
        text = re.sub(
            r"\d{4}-\d\d-\d\d \d\d:\d\d", "2026-11-22 09:30", text.replace(f"{here}/", "/data/")
        )
        return re.sub(
            r"\d+\.\d s$",
            "0.1 s",
            re.sub(r"  \d[\d.]* kB +(?=3 )", "  85.29 kB  ", text),
            flags=re.M,
        )

    return plain


def test_the_page(
    here: Path,
    shown: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From top to bottom: commands, and between them what a run says that continues."""
    monkeypatch.chdir(here)
    statuses = []
    for command, output in COMMANDS[:4]:
        program, subcommand, *words = shlex.split(command)
        assert (program, subcommand) == ("mesh-lm", "checkpoint")
        statuses.append(main(words))
        assert shown(capsys.readouterr().out) == shown(output)
    assert statuses == [0, 1, 1, 0]

    config = configured(here / "runs" / "gpt_tiny")
    with Checkpoints(config) as checkpoints:
        saved, _ = checkpoints.restore(layout(), OPTIMIZER)
    assert (
        saved is not None
        and saved.step == 750
        and shown(capsys.readouterr().out) in map(shown, TEXTS)
    )
    assert f"resumed at step 750 ({saved.certificate})\n" in TEXTS[-1]
    (repair,) = [text for text, _ in COMMANDS if "\nmv " in text]
    verify, move = map(shlex.split, repair.splitlines())
    assert main(verify[2:]) == 1
    assert (here / move[1]).is_dir() and move[1].removesuffix(".damaged") == move[2]

    alone = here / "alone" / "runs" / "gpt_tiny"
    shutil.copytree(
        here / "runs" / "gpt_tiny" / "checkpoints" / "1000.damaged",
        alone / "checkpoints" / "1000.damaged",
    )
    with pytest.raises(ConfigError) as caught:
        Checkpoints(configured(alone))
    assert f"error: {caught.value}\n".replace(f"{here}/alone", "/data") in TEXTS


def test_saves_that_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No space from step 1000 on; step 1012 is the last one."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    config = configured(tmp_path / "runs" / "gpt_tiny", checkpoint=CheckpointConfig())
    state = fixture.filled(fixture.abstract(config, layout().shard))
    slept: list[float] = []
    monkeypatch.setattr("mesh_lm.checkpoint.manager.time.sleep", slept.append)
    with Checkpoints(config) as checkpoints:
        checkpoints.save(750, state, {"position": 24000}, layout(), OPTIMIZER, last=True)
        monkeypatch.setattr(checkpoints._saver, "save", full)
        for step in range(1000, 1012):
            if checkpoints.due(step):
                checkpoints.save(step, state, {"position": 32 * step}, layout(), OPTIMIZER)
            checkpoints.poll(step)
        said = [
            line
            for line in capsys.readouterr().out.splitlines(keepends=True)
            if "could not be saved" in line
        ]
        with pytest.raises(ConfigError) as caught:
            checkpoints.save(1012, state, {"position": 32 * 1012}, layout(), OPTIMIZER, last=True)
    assert "".join(said).replace(f"{tmp_path}/", "/data/") in TEXTS
    assert f"error: {caught.value}\n".replace(f"{tmp_path}/", "/data/") in TEXTS
    assert len(slept) == 3 and sum(slept) == 14 and "four times over 14 s" in PAGE
    prose = " ".join(PAGE.split())
    assert f"After {manager.ALARM} failures in a row" in prose
    assert f"`checkpoint.keep` ({config.checkpoint.keep})" in prose


def test_another_optimizer(here: Path, shown: Callable[[str], str]) -> None:
    """Is one error, nothing is put aside, and the page's way out is understood."""
    config = configured(here / "runs" / "again", optimizer=OptimizerConfig(Lion()))
    with Checkpoints(config) as checkpoints, pytest.raises(ConfigError) as caught:
        checkpoints.restore(layout(), Optimizer(config.optimizer, 9))
    assert shown(f"error: {caught.value}\n") in TEXTS
    assert [path.name for path in checkpoints.directory.iterdir() if path.is_dir()] == ["750"]
    (command,) = [text for kind, text in BLOCKS if kind == "sh" and "mesh-lm train" in text]
    asked = parse(shlex.split(command)[2:])
    assert (asked.init_from, rule_name(asked.optimizer.rule)) == (
        "runs/again",
        "lion",
    ) and asked.output != asked.init_from


def test_nothing_is_flat_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same state, saved from one device and from eight replicas with a distributed optimizer,
    has the same arrays and bits."""
    monkeypatch.chdir(tmp_path)
    for name, rules, mesh in (("plain", "ddp", {}), ("flat", "distributed", {"data": 8})):
        whole = ModelLayout.of(
            dataclasses.replace(fixture.CONFIG.model, dtype="bfloat16"), shard_on(rules, **mesh)
        )
        state = init_state(whole, OPTIMIZER, seed=0)
        assert ("master" in state) == (name == "flat")
        with Checkpoints(
            dataclasses.replace(configured(tmp_path / name), model=whole.config)
        ) as checkpoints:
            checkpoints.save(1, state, {}, whole, OPTIMIZER, last=True)
    assert main(["diff", "plain", "flat"]) == 0
    assert "all arrays have the same bits" in capsys.readouterr().out
    found = [
        json.loads(
            (tmp_path / name / "checkpoints/1/metadata/metadata").read_text(encoding="utf-8")
        )["parts"]
        for name in ("plain", "flat")
    ]
    assert found[0] == found[1] and list(found[0]) == ["params", "mu", "nu"]
    assert {kind for part in found[1].values() for *_, kind in part.values()} == {"float32"}


def test_refusals(here: Path, shown: Callable[[str], str]) -> None:
    said = ""
    required, never = CheckpointConfig(resume="required"), CheckpointConfig(resume="never")
    for output, policy in (
        (here / "runs" / "new", required),
        (here / "runs" / "other_seed", never),
    ):
        with pytest.raises(ConfigError) as caught:
            Checkpoints(configured(output, checkpoint=policy))
        said += f"error: {caught.value}\n"
    assert shown(said) in TEXTS
