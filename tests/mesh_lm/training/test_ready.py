"""Problems that are reported before the first device is used, and before JAX looks for one."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_lm.config import DataConfig, TrainConfig, load
from mesh_lm.errors import ConfigError
from mesh_lm.report import weights_and_biases
from mesh_lm.training.ready import require_ready

ROOT = Path(__file__).parents[3]
SIZES = sorted(path.stem for path in (ROOT / "configs").glob("[!_]*.py") if path.stem != "gpt_tiny")
NO_DATA = "it has no data: set data.path to a text, such as my_text.jsonl, or data.blend to tokenized files."


@pytest.mark.parametrize("name", SIZES)
def test_a_config_of_a_size_has_no_data_of_its_own(name: str) -> None:
    """10 MB of the standard library would be repeated hundreds of thousands of times."""
    with pytest.raises(ConfigError, match=f"^this run cannot start\n  - {NO_DATA}"):
        require_ready(load(name))


def test_data_by_path_or_blend() -> None:
    require_ready(load("gpt_tiny"))
    for data in (DataConfig(path="text.txt"), DataConfig(blend=("data/web",))):
        require_ready(dataclasses.replace(load("gpt2_124m"), data=data))
    require_ready(load("gpt2_124m"), has_data=True)


def test_all_that_is_missing_at_once_and_no_device_is_used() -> None:
    """Reported by the command, in a process in which JAX would find no device."""
    code = "import sys; sys.modules['wandb'] = None; import train; train.main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "--config=gpt2_124m", "--config.wandb=mine"]
    environment = os.environ | {"JAX_PLATFORMS": "nonesuch"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    needs = "wandb=mine needs the package wandb: pip install 'mesh_lm[wandb]'"
    assert f"this run cannot start\n  - {NO_DATA}" in done.stderr and done.stderr.endswith(f"  - {needs}\n"), done.stderr


def test_only_the_process_that_writes_metrics_must_be_logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(("mode", "logged_in", "fits"), [("online", True, True), ("online", False, False), ("offline", False, True)])
def test_who_is_logged_in(monkeypatch: pytest.MonkeyPatch, mode: str, logged_in: bool, fits: bool) -> None:
    monkeypatch.setitem(sys.modules, "wandb", Wandb(mode, logged_in))  # pyright: ignore[reportArgumentType]
    if fits:
        weights_and_biases.require_login("mine")
        return
    with pytest.raises(ConfigError, match=r"^wandb=mine: you are not logged in to Weights & Biases; run `wandb login`, or set WANDB_MODE="):
        weights_and_biases.require_login("mine")


def test_a_run_of_ones_own_config_has_no_default_data() -> None:
    with pytest.raises(ConfigError, match="it has no data"):
        require_ready(TrainConfig(model=load("gpt_tiny").model, output="runs/mine"))
