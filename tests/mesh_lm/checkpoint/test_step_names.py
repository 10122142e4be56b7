"""A step under another's name is never used, and a directory that is no step is left alone."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from fixtures import make_checkpoint as fixture
from support import shard_on

from mesh_lm.checkpoint import Checkpoints, DamagedCheckpoint, find
from mesh_lm.checkpoint.listing import newest
from mesh_lm.commands import checkpoint as command
from mesh_lm.errors import ConfigError
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State

COMPILE_BUDGET = 10
LAYOUT = ModelLayout.of(fixture.CONFIG.model, shard_on("ddp"))


def state(step: int) -> State:
    filled = fixture.filled(fixture.abstract(fixture.CONFIG, LAYOUT.shard))
    return filled | {"step": jax.device_put(np.int32(step), filled["step"].sharding)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with steps 20 and 30."""
    output = tmp_path_factory.mktemp("saved")
    with Checkpoints(dataclasses.replace(fixture.CONFIG, output=str(output))) as checkpoints:
        for step in (20, 30):
            checkpoints.save(step, state(step), {"position": step}, LAYOUT, fixture.OPTIMIZER)
    return output


@pytest.fixture
def run(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def resumed(output: Path) -> tuple[int, int] | None:
    """Returns the step of the name and of the state from which a run resumes; None if it starts
    from scratch."""
    with Checkpoints(dataclasses.replace(fixture.CONFIG, output=str(output))) as checkpoints:
        found, restored = checkpoints.restore(LAYOUT, fixture.OPTIMIZER)
    return (found.step, int(restored["step"])) if found and restored else None


def test_a_renamed_step_is_not_used(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = run / "checkpoints"
    (steps / "20").rename(steps / "40")
    for read in (lambda: find(run), lambda: newest(run).descriptions()):
        with pytest.raises(
            DamagedCheckpoint,
            match=r"40 is damaged\n  - it is step 20 under another name; .* rename it to 20",
        ):
            read()
    assert command.main(["verify", str(run)]) == 1
    assert "40: damaged\n  - it is step 20 under another name" in capsys.readouterr().out
    assert resumed(run) == (30, 30)
    assert (
        "it is step 20 under another name" in capsys.readouterr().out
        and (steps / "40.damaged").is_dir()
    )
    (steps / "40.damaged").rename(steps / "20.damaged")
    assert command.main(["verify", str(run), "--step=20.damaged"]) == 0, (
        "under its own number it is intact"
    )


def test_swapped_steps_are_not_used(run: Path) -> None:
    steps = run / "checkpoints"
    for old, new in (("20", "x"), ("30", "20"), ("x", "30")):
        (steps / old).rename(steps / new)
    with pytest.raises(ConfigError, match=r"is intact: 20\.damaged, 30\.damaged"):
        resumed(run)


@pytest.mark.parametrize("form", fixture.FORMATS)
def test_an_older_checkpoint_is_compared_with_its_state(
    tmp_path: Path, form: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Descriptions of earlier versions have no step."""
    run = Path(shutil.copytree(fixture.FORMATS[form], tmp_path / "run"))
    right, wrong = run / "checkpoints" / str(fixture.STEP), run / "checkpoints" / "400"
    assert "step" not in json.loads((right / "metadata" / "metadata").read_text(encoding="utf-8"))
    assert resumed(run) == (fixture.STEP, fixture.STEP) and command.main(["verify", str(run)]) == 0
    right.rename(wrong)
    found = find(run)
    assert found is not None
    weights = {"params": fixture.abstract(fixture.CONFIG, LAYOUT.shard)["params"]}
    with pytest.raises(DamagedCheckpoint, match=f"it is step {fixture.STEP} under another name"):
        found.state(weights)
    assert (
        command.main(["verify", str(run)]) == 1
        and "it is step 307 under another name" in capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match=r"is intact: 400\.damaged"):
        resumed(run)


def test_directories_that_are_no_steps_are_named_and_left_alone(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = run / "checkpoints"
    names = ("0040", "\uff14\uff10", "\u0664\u0660")
    for name in names:
        shutil.copytree(steps / "20", steps / name)
    assert resumed(run) == (30, 30)
    said = capsys.readouterr().out
    for name in names:
        assert (
            f"warning: {steps / name} is not a step (that would be 40); it is ignored" in said
            and (steps / name).is_dir()
        )
    assert newest(run).step == 30
    assert (steps / "30").is_dir() and find(steps / "0040") is None


@pytest.mark.parametrize("item", ["data", "metadata"])
@pytest.mark.parametrize("how", ["a directory", "below a file"])
def test_something_else_in_place_of_a_description_is_damage(
    run: Path, item: str, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = run / "checkpoints" / "30" / item
    if how == "a directory":
        (place / "metadata").unlink()
        (place / "metadata").mkdir()
    else:
        shutil.rmtree(place)
        place.write_text("a file", encoding="utf-8")
    assert resumed(run) == (20, 20)
    assert f"30 is damaged\n  - {item}/metadata is not a file" in capsys.readouterr().out
