"""F6, F8, F11: damaged checkpoints and checkpoints of another model. Orbax alone silently restores
a flipped bit."""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from support import shard_on

from mesh_lm.checkpoint import Checkpoints
from mesh_lm.config import TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state.initial import init_state

COMPILE_BUDGET = 60
pytestmark = pytest.mark.fault
MODEL = DecoderConfig(
    vocab_size=64, vocab_multiple=1, seq_len=8, n_layers=2, d_model=16, n_heads=2, dtype="float32"
)
DAMAGES = ("flip", "zero", "truncate", "delete")
FLIPS = 80
"""Flips of random bits in random files, weighted by size; and each file damaged in each of four
ways."""


@pytest.fixture(scope="module", params=["ddp", "distributed"])
def layout(request: pytest.FixtureRequest) -> ModelLayout:
    """State in its usual form, and as flat vectors sharded over two devices, with a copy of the
    weights for the layers."""
    return ModelLayout.of(MODEL, shard_on(request.param, data=1 if request.param == "ddp" else 2))


@pytest.fixture(scope="module")
def optimizer() -> Optimizer:
    config = TrainConfig(model=MODEL, output="")
    return Optimizer(config.optimizer, config.train.steps, config.diloco)


@pytest.fixture(scope="module")
def good(
    layout: ModelLayout, optimizer: Optimizer, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainConfig, dict[int, dict]]:
    """A run's directory with steps 1 and 2, and their contents."""
    config = TrainConfig(model=MODEL, output=str(tmp_path_factory.mktemp("good")))
    held = {}
    with Checkpoints(config) as checkpoints:
        for step in (1, 2):
            state = init_state(layout, optimizer, seed=step)
            held[step] = jax.tree.map(np.asarray, state)
            checkpoints.save(step, state, {"position": step}, layout, optimizer)
    return config, held


def copied(good: tuple[TrainConfig, dict[int, dict]], to: Path) -> TrainConfig:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(good[0].output, to)
    return dataclasses.replace(good[0], output=str(to))


def files(config: TrainConfig, step: int) -> list[Path]:
    root = Path(config.output) / "checkpoints" / str(step)
    return sorted(path.relative_to(root) for path in root.rglob("*") if path.is_file())


def cases(good: tuple[TrainConfig, dict[int, dict]]) -> Iterator[tuple[Path, str, int]]:
    names, chance = files(good[0], 2), random.Random(0)
    root = Path(good[0].output) / "checkpoints" / "2"
    sizes = [(root / name).stat().st_size for name in names]
    for seed in range(FLIPS):
        yield chance.choices(names, sizes)[0], "flip", seed
    for name in names:
        for seed, damage in enumerate(DAMAGES):
            yield name, damage, seed


def damaged(path: Path, how: str, seed: int) -> bool:
    """Damages the file. Returns whether it changed."""
    before, chance = path.read_bytes(), random.Random(f"{path.name} {how} {seed}")
    if how == "delete":
        path.unlink()
        return True
    if not before:
        return False
    content = bytearray(before)
    if how == "flip":
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    elif how == "zero":
        start = chance.randrange(len(content))
        content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    else:
        del content[chance.randrange(len(content)) :]
    path.write_bytes(content)
    return bytes(content) != before


def test_f6_no_damage_is_restored_in_silence(
    good: tuple[TrainConfig, dict[int, dict]],
    layout: ModelLayout,
    optimizer: Optimizer,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    """Every restore returns exactly what was saved: step 2 if the damage hit nothing that is read,
    else step 1."""
    count = {"cases": 0, "older step taken": 0, "no effect": 0}
    for name, how, seed in cases(good):
        config = copied(good, tmp_path / "run")
        if not damaged(tmp_path / "run" / "checkpoints" / "2" / name, how, seed):
            continue
        with Checkpoints(config) as checkpoints:
            saved, state = checkpoints.restore(layout, optimizer)
        assert saved is not None and state is not None
        for (path, leaf), wanted in zip(
            jax.tree_util.tree_flatten_with_path(state)[0],
            jax.tree.leaves(good[1][saved.step]),
            strict=True,
        ):
            np.testing.assert_array_equal(
                leaf, wanted, err_msg=f"{how} of {name} (seed {seed}): {jax.tree_util.keystr(path)}"
            )
        said = capsys.readouterr().out
        if saved.step == 1:
            assert (
                "is damaged" in said and (tmp_path / "run" / "checkpoints" / "2.damaged").is_dir()
            ), (name, how, seed)
        count["cases"] += 1
        count["older step taken" if saved.step == 1 else "no effect"] += 1
    assert count["cases"] >= 100 and count["older step taken"] >= 40, count
    for what, number in count.items():
        record_property(what, number)


def test_f6_no_intact_checkpoint_is_an_error(
    good: tuple[TrainConfig, dict[int, dict]],
    layout: ModelLayout,
    optimizer: Optimizer,
    tmp_path: Path,
) -> None:
    """A run without an intact checkpoint fails, at once and when it is started again."""
    config = copied(good, tmp_path / "run")
    for step in (1, 2):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step) / "state" / "d")
    message = (
        r"no checkpoint in .* is intact: 1\.damaged, 2\.damaged; repair one and remove \.damaged "
        r"from its name"
    )
    with Checkpoints(config) as checkpoints, pytest.raises(ConfigError, match=message):
        checkpoints.restore(layout, optimizer)
    with pytest.raises(ConfigError, match=message):
        Checkpoints(config)


@pytest.mark.parametrize("missing", ["state", "data", "metadata"])
def test_f8_a_half_copied_step(
    good: tuple[TrainConfig, dict[int, dict]],
    layout: ModelLayout,
    optimizer: Optimizer,
    tmp_path: Path,
    missing: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Covers an incomplete checkpoint under a complete one's name, as an aborted manual copy leaves
    it."""
    config = copied(good, tmp_path / "run")
    steps = tmp_path / "run" / "checkpoints"
    shutil.copytree(steps / "2", steps / "3")
    shutil.rmtree(steps / "3" / missing)
    with Checkpoints(config) as checkpoints:
        saved, _ = checkpoints.restore(layout, optimizer)
    assert saved is not None and saved.step == 2
    assert "3 is damaged" in capsys.readouterr().out and (steps / "3.damaged").is_dir()


def test_f8_an_empty_directory_with_a_steps_name(
    good: tuple[TrainConfig, dict[int, dict]],
    layout: ModelLayout,
    optimizer: Optimizer,
    tmp_path: Path,
) -> None:
    config = copied(good, tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "7").mkdir()
    with Checkpoints(config) as checkpoints:
        saved, _ = checkpoints.restore(layout, optimizer)
    assert saved is not None and saved.step == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"d_ff": 32},
            (
                r"blocks\.mlp\.up\.weight: \[2, 16, 64, 'float32'\] in the checkpoint, \[2, 16, "
                r"32, "
                r"'float32'\] in this config"
            ),
        ),
        (
            {"vocab_size": 128},
            (
                r"embedding: \[64, 16, 'float32'\] in the checkpoint, \[128, 16, 'float32'\] in "
                r"this "
                r"config"
            ),
        ),
        (
            {"norm": "rmsnorm"},
            (
                r"blocks\.attention_norm\.bias: \[2, 16, 'float32'\] in the checkpoint, absent in "
                r"this "
                r"config"
            ),
        ),
    ],
)
def test_f11_another_model(
    good: tuple[TrainConfig, dict[int, dict]],
    optimizer: Optimizer,
    tmp_path: Path,
    changes: dict[str, object],
    message: str,
) -> None:
    """A wrong config, vocabulary or tree gives one error before any array is read, and nothing is
    renamed to `.damaged`."""
    config = copied(good, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2" / "state" / "d")  # the arrays
    model = dataclasses.replace(MODEL, **changes)
    config = dataclasses.replace(config, model=model)
    with Checkpoints(config) as checkpoints, pytest.raises(ConfigError, match=message):
        checkpoints.restore(ModelLayout.of(model, shard_on("ddp")), optimizer)
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"1", "2"}


def test_f11_a_tree_with_a_leaf_too_few(
    good: tuple[TrainConfig, dict[int, dict]],
    layout: ModelLayout,
    optimizer: Optimizer,
    tmp_path: Path,
) -> None:
    """The list of arrays lacks a leaf that the metadata describes."""
    config = copied(good, tmp_path / "run")
    tree = tmp_path / "run" / "checkpoints" / "2" / "state" / "_METADATA"
    described = json.loads(tree.read_text(encoding="utf-8"))
    described["tree_metadata"] = {
        key: leaf for key, leaf in described["tree_metadata"].items() if "embedding" not in key
    }
    tree.write_text(json.dumps(described), encoding="utf-8")
    with Checkpoints(config) as checkpoints:
        saved, state = checkpoints.restore(layout, optimizer)
    assert saved is not None and state is not None
    np.testing.assert_array_equal(
        state["params"]["embedding"], good[1][saved.step]["params"]["embedding"]
    )
