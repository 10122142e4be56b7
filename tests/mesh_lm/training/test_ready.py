"""Problems that are reported before the first device is used, and before JAX looks for one."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh_lm import checkpoint
from mesh_lm.config import DataConfig, OptimizerConfig, TrainConfig, load
from mesh_lm.data.dataset import dataset_of
from mesh_lm.data.indexed import write_documents
from mesh_lm.errors import ConfigError, StorageError, storage_failed
from mesh_lm.model import DecoderConfig
from mesh_lm.optim import Adafactor
from mesh_lm.report import weights_and_biases
from mesh_lm.training.ready import require_ready
from sharding_rules import MeshConfig, preset

ROOT = Path(__file__).parents[3]
SIZES = sorted(
    path.stem
    for path in (ROOT / "configs").glob("[!_]*.py")
    if not path.stem.startswith("gpt_tiny")
)
NO_DATA = (
    "it has no data: set data.path to a text (.txt, .jsonl, .parquet, or a directory of such "
    "files), or data.blend to what `mesh-lm prepare` wrote, such as 0.7,data/web,0.3,data/code "
    "(docs/data.md; from the Hugging Face Hub: docs/prepare.md)."
)


@pytest.mark.parametrize("name", SIZES)
def test_a_config_of_a_size_has_no_data_of_its_own(name: str) -> None:
    """10 MB of the standard library would be repeated hundreds of thousands of times."""
    with pytest.raises(ConfigError, match=f"^this run cannot start\n  - {re.escape(NO_DATA)}"):
        require_ready(load(name))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: a text of two documents, and the same text as Megatron's files."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("one\ntwo\n", encoding="utf-8")
    Path("empty.jsonl").touch()
    Path("data").mkdir()
    write_documents("data/web", [np.arange(1000)] * 2, vocab=1000)
    return tmp_path


def given(data: DataConfig, name: str = "gpt2_124m", **changes: Any) -> TrainConfig:
    return dataclasses.replace(load(name), data=data, **changes)


def test_data_by_path_or_blend(here: Path) -> None:
    require_ready(load("gpt_tiny"))
    for data in (
        DataConfig(path="text.txt"),
        DataConfig(path="."),
        DataConfig(blend=("0.7", "data/web")),
    ):
        require_ready(given(data))
    require_ready(load("gpt2_124m"), dataset_of([1] * 100))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DataConfig(path="txet.txt"),
            "data.path=txet.txt: no such data file or directory; give one of .txt, ",
        ),
        (
            DataConfig(path="empty.jsonl"),
            "data.path=empty.jsonl is a file of 0 bytes; give one of .txt, ",
        ),
        (
            DataConfig(blend=("data/web", "data/code")),
            (
                "data.blend=data/code: no such file: data/code.bin and data/code.idx; mesh-lm "
                "prepare --input=TEXT --output=data/code writes"
            ),
        ),
        (
            DataConfig(blend=("data/web.bin",)),
            "data.blend=data/web.bin: no such file: .* leave out .bin$",
        ),
        (
            DataConfig(blend=("1", "data/web", "data/code")),
            "data.blend=1 data/web data/code: give prefixes only",
        ),
    ],
)
def test_data_that_is_not_there(here: Path, data: DataConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^this run cannot start\n  - {message}"):
        require_ready(given(data))


@pytest.mark.parametrize(
    ("encoding", "errors"), [("latin-1", "strict"), ("ascii", "surrogateescape")]
)
def test_an_output_whose_name_two_libraries_would_spell_differently(
    here: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, errors: str
) -> None:
    """In a locale that is not UTF-8; ASCII letters are the same in all of them."""
    monkeypatch.setattr(os, "fsencode", lambda path: str(path).encode(encoding, errors))
    data = DataConfig(path="text.txt")
    require_ready(given(data, output="run"))
    with pytest.raises(
        ConfigError,
        match=(
            r"output=.*: names of this locale are in .*, .*; set the environment variable "
            r"PYTHONUTF8=1, or"
        ),
    ):
        require_ready(given(data, output="über".encode().decode(encoding, errors)))


def test_an_output_that_cannot_be_written(here: Path) -> None:
    """A file in its place, a bucket, and a disk without room; nothing is left behind where it
    can."""
    data = DataConfig(path="text.txt")
    require_ready(given(data, output="new/run"))
    assert not Path("new").exists() and not [*here.glob(".mesh_lm*")]
    for output, message in (
        (
            "text.txt/run",
            (
                r"output=text.txt/run cannot be written: Not a directory \(.*text.txt\); set "
                r"another output directory, or move that file away$"
            ),
        ),
        (
            "text.txt",
            (
                "output=text.txt cannot be written: Not a directory; set another output "
                "directory, or move that file away$"
            ),
        ),
        ("gs://bucket", "output=gs://bucket must be a directory; mount a bucket as one"),
        ("/proc/run", r"output=/proc/run cannot be written: .* \(/proc\); set another output"),
    ):
        with pytest.raises(ConfigError, match=f"^this run cannot start\n  - {message}") as caught:
            require_ready(given(data, output=output))
        assert not storage_failed(caught.value)


@pytest.mark.parametrize(
    ("number", "cure"),
    [
        (28, "make room on that disk"),
        (30, "mount that disk writable"),
        (13, "give this user permission to write there"),
    ],
)
def test_each_reason_has_its_own_cure(
    here: Path, monkeypatch: pytest.MonkeyPatch, number: int, cure: str
) -> None:
    def fails(**_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tempfile.TemporaryFile", fails)
    with pytest.raises(
        ConfigError,
        match=f"cannot be written: {os.strerror(number)}.*; set another output directory, or {cure}$",
    ):
        require_ready(given(DataConfig(path="text.txt"), output="new"))


def test_a_disk_without_room(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have some later, so that the launcher tries again; but not if the config has mistakes
    as well."""
    free = 2**30
    monkeypatch.setattr(
        "shutil.disk_usage", lambda path: shutil._ntuple_diskusage(2**40, 2**40 - free, free)
    )  # pyright: ignore
    room = (
        "output=runs/gpt2_124m: its disk has 1.0 GiB left, and one checkpoint of this model needs "
        "1.4 GiB or more; make room there, or"
    )
    with pytest.raises(
        StorageError, match=f"^this run cannot start\n  - {room} set another output$"
    ):
        require_ready(given(DataConfig(path="text.txt")), thorough=True)
    with pytest.raises(ConfigError, match=f"  - {re.escape(NO_DATA)}.*\n  - {room}") as caught:
        require_ready(load("gpt2_124m"), thorough=True)
    assert not storage_failed(caught.value)
    require_ready(
        given(DataConfig(path="text.txt"), optimizer=OptimizerConfig(Adafactor())), thorough=True
    )


def test_all_that_is_missing_at_once_and_no_device_is_used() -> None:
    """Reported by the command, in a process in which JAX would find no device."""
    code = "import sys; sys.modules['wandb'] = None; import train; train.main(sys.argv[1:])"
    command = [
        sys.executable,
        "-c",
        code,
        "--config=gpt2_124m",
        "--config.wandb=mine",
        "--output=/proc/run",
    ]
    environment = os.environ | {"JAX_PLATFORMS": "nonesuch"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    needs = "wandb=mine needs the package wandb: pip install -e '.[wandb]'"
    assert f"this run cannot start\n  - {NO_DATA}" in done.stderr and done.stderr.endswith(
        f"  - {needs}\n"
    ), done.stderr
    assert "  - output=/proc/run cannot be written" in done.stderr, done.stderr


def test_only_the_process_that_writes_metrics_must_be_logged_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("mesh_lm.training.ready.require_login", asked.append)
    config = dataclasses.replace(load("gpt_tiny"), wandb="mine")
    for index in (0, 1):
        launch = dataclasses.replace(config.launch, coordinator="a:1", processes=2, index=index)
        require_ready(dataclasses.replace(config, launch=launch))
    assert asked == ["mine"]


class Wandb:
    """A stand-in for the part of W&B's package that is used."""

    def __init__(self, mode: str, logged_in: bool) -> None:
        self.mode, self.logged_in = mode, logged_in
        self.settings = self

    def setup(self) -> "Wandb":
        return self

    def login(self, *, prompt: bool, verify: bool) -> bool:
        assert not prompt and not verify, "no question at a terminal of a batch job, and no server"
        return self.logged_in


@pytest.mark.parametrize(
    ("mode", "logged_in", "fits"),
    [("online", True, True), ("online", False, False), ("offline", False, True)],
)
def test_who_is_logged_in(
    monkeypatch: pytest.MonkeyPatch, mode: str, logged_in: bool, fits: bool
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Wandb(mode, logged_in))  # pyright: ignore[reportArgumentType]
    if fits:
        weights_and_biases.require_login("mine")
        return
    with pytest.raises(
        ConfigError,
        match=(
            r"^wandb=mine: you are not logged in to Weights & Biases; run `wandb login`, or set "
            r"WANDB_MODE="
        ),
    ):
        weights_and_biases.require_login("mine")


def test_a_run_of_ones_own_config_has_no_default_data() -> None:
    with pytest.raises(ConfigError, match="it has no data"):
        require_ready(TrainConfig(model=load("gpt_tiny").model, output="runs/mine"))


def test_a_run_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    """It was called damaged."""
    run = tmp_path / "caf\udce9"
    (run / "checkpoints" / "5").mkdir(parents=True)
    for path in (run, run / "checkpoints" / "5"):
        with pytest.raises(
            ConfigError,
            match=(
                r"checkpoints: names of this locale are in .*, and checkpoints are read from names "
                r"in UTF-8"
            ),
        ):
            checkpoint.find(path)


def test_a_problem_that_several_checks_find_is_listed_once(here: Path) -> None:
    """The vocabulary, and the epochs of the text, both need the tokenizer."""
    Path("text.txt").write_text("a\nb\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        require_ready(
            given(DataConfig(path="text.txt", tokenizer="gpt2"), "gpt_tiny"), thorough=True
        )
    assert [line.split(":")[0] for line in str(caught.value).split("\n  - ")] == [
        "this run cannot start",
        "tokenizer gpt2",
    ]


def test_every_problem_in_one_round(here: Path) -> None:
    """Of the data, the vocabulary, the epochs, the mesh and the sizes, before JAX looks for a
    device."""
    config = given(
        DataConfig(blend=("data/web",), tokenizer="nope.json"),
        "gpt_tiny",
        mesh=MeshConfig(tensor=3),
        rules=preset("megatron"),
    )
    with pytest.raises(ConfigError) as caught:
        require_ready(config, thorough=True)
    head, *problems = str(caught.value).split("\n  - ")
    assert head == "this run cannot start"
    assert [problem.split(" ")[0] for problem in problems] == [
        "tokenizer", "train.steps=600", "mesh", "model.n_heads=4", "model.d_ff=352",
        "model.vocab_size=4096"
    ]  # fmt: skip
    small = dataclasses.replace(
        config,
        data=DataConfig(path="text.txt", tokenizer="bytes"),
        model=DecoderConfig(vocab_size=200),
    )
    with pytest.raises(
        ConfigError,
        match=r"data.tokenizer=bytes has ids up to 256, which model.vocab_size=200 does not have",
    ):
        require_ready(small, thorough=True)
