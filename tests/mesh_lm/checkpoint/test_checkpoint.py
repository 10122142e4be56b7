"""Tests of checkpoints: stable format, any mesh, clear errors, no lost steps."""

import asyncio
import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tensorstore as ts
from fixtures import make_checkpoint as fixture
from support import shard_on

from mesh_lm.checkpoint import Checkpoints, find, manager, quiet
from mesh_lm.config import CheckpointConfig, OptimizerConfig, TrainConfig
from mesh_lm.errors import ConfigError, storage_failed
from mesh_lm.parallel.layout import ModelLayout

COMPILE_BUDGET = 10


def at(output: Path, **changes) -> TrainConfig:
    return dataclasses.replace(fixture.CONFIG, output=str(output), **changes)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(fixture.OUTPUT, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("rules", "mesh"), [("ddp", {}), ("hsdp+megatron+zero1", {"data": 2, "fsdp": 2, "tensor": 2})]
)
def test_a_checkpoint_of_jax_0_10_2_restores_here_on_any_mesh(
    copy: Path, rules: str, mesh: dict[str, int]
) -> None:
    """The fixture was written with jax 0.10.2 and is read with the installed jax."""
    versions = json.loads(
        (copy / "checkpoints" / str(fixture.STEP) / "metadata" / "metadata").read_text(
            encoding="utf-8"
        )
    )["versions"]
    assert versions["jax"] == "0.10.2"
    shard = shard_on(rules, **mesh)
    with Checkpoints(at(copy)) as checkpoints:
        saved = checkpoints.newest()
        assert saved is not None and (saved.step, saved.data) == (fixture.STEP, fixture.DATA)
        state = saved.state(fixture.abstract(fixture.CONFIG, shard))
    assert not state.pop("recent").any(), "that format has none"
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        np.testing.assert_array_equal(
            leaf, fixture.pattern(jax.tree_util.keystr(path), leaf.shape, leaf.dtype)
        )
        assert leaf.sharding.mesh.shape == shard.mesh.shape


def test_the_tree_on_disk_is_plain(copy: Path) -> None:
    """The keys are our parameter names: the format contains no class of Flax or optax."""
    metadata = json.loads(
        (copy / "checkpoints" / str(fixture.STEP) / "state" / "_METADATA").read_text(
            encoding="utf-8"
        )
    )
    keys = {
        tuple(key["key"] for key in leaf["key_metadata"])
        for leaf in metadata["tree_metadata"].values()
    }
    names = fixture.abstract(fixture.CONFIG, shard_on("ddp"))["params"]
    assert keys == {
        ("step",),
        ("skipped",),
        *((kind, name) for kind in ("params", "mu", "nu") for name in names),
    }


def test_changed_fields_are_reported(copy: Path) -> None:
    changed = at(copy, optimizer=OptimizerConfig(learning_rate=1.0), seed=5)
    with Checkpoints(changed) as checkpoints:
        saved = checkpoints.newest()
    assert saved is not None
    sections = ("optimizer", "diloco", "checkpoint", "seed")
    changes = {line for line in saved.changed(changed) if line.startswith(sections)}
    assert changes == {"optimizer.learning_rate: 0.0003 -> 1.0", "seed: 0 -> 5"}


def test_an_empty_directory_restores_nothing(tmp_path: Path) -> None:
    with Checkpoints(at(tmp_path)) as checkpoints:
        assert checkpoints.newest() is None
    (tmp_path / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"no complete checkpoint in .*/checkpoints"):
        find(tmp_path)


def test_a_checkpoint_is_found_by_its_run_and_by_its_step(copy: Path) -> None:
    """The weights can be read alone, without the run's config."""
    abstract = fixture.abstract(fixture.CONFIG, shard_on("ddp"))
    for path in (copy, copy / "checkpoints", copy / "checkpoints" / str(fixture.STEP), str(copy)):
        saved = find(path)
        assert saved is not None and saved.path == copy / "checkpoints" / str(fixture.STEP)
    assert find(copy.parent) is None and find(copy / "nothing") is None
    assert saved is not None
    found = saved.state({"params": abstract["params"]})
    assert found.keys() == {"params"} and found["params"].keys() == abstract["params"].keys()
    for name, leaf in found["params"].items():
        np.testing.assert_array_equal(
            leaf, fixture.pattern(f"['params']['{name}']", leaf.shape, leaf.dtype)
        )


def test_policy(tmp_path: Path) -> None:
    """Saves when due, keeps the newest, and ignores the remains of a killed save."""
    config = at(tmp_path, checkpoint=CheckpointConfig(every=2, keep=2))
    layout = ModelLayout.of(config.model, shard_on("ddp"))
    state = fixture.filled(fixture.abstract(config, layout.shard))
    with Checkpoints(config) as checkpoints:
        assert [step for step in range(1, 7) if checkpoints.due(step)] == [2, 4, 6]
        for step in (2, 4, 6):
            checkpoints.save(step, state, {"position": step}, layout, fixture.OPTIMIZER)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"4", "6"}
    (tmp_path / "checkpoints" / "8.orbax-checkpoint-tmp").mkdir()
    with Checkpoints(config) as checkpoints:
        assert checkpoints.newest().step == 6
        checkpoints.save(8, state, {"position": 8}, layout, fixture.OPTIMIZER)
    with Checkpoints(config) as checkpoints:
        assert checkpoints.newest().step == 8


@pytest.mark.parametrize(
    "tail",
    ["No space left on device [os_error_code='28']", "[OS error 28: No space left on device]"],
)
def test_the_reason_of_a_failed_save_is_not_cut_off(tail: str) -> None:
    """TensorStore's own text on a full tmpfs, in two versions: names first, and the reason last."""
    files = f'Failed writing: "{"/deep" * 40}/40.saving-3f56f/state/d/c4f1436810845cb42097687872b622c4.__lock": '
    text = (
        'RESOURCE_EXHAUSTED: Error writing "mu.blocks/c/0/0" in OCDBT database at local file '
        f'"/state/": {files}'
    )
    assert quiet.reason(
        ValueError(f"{text}{tail} [source locations='tensorstore/a.cc:1\ntensorstore/b.cc:2']")
    ) == ("[Errno 28] No space left on device")
    assert quiet.reason(ValueError(f"{text}the peer is gone")).endswith("the peer is gone")
    assert (
        quiet.reason(OSError(28, "No space left on device")) == "[Errno 28] No space left on device"
    )
    assert quiet.reason(RuntimeError()) == "RuntimeError()"


def test_a_failed_save_is_retried_when_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure is seen three steps after its save; the last save is a StorageError with the
    reason, so that it is tried again."""
    config = at(tmp_path, checkpoint=CheckpointConfig(every=20))
    layout = ModelLayout.of(config.model, shard_on("ddp"))
    state = fixture.filled(fixture.abstract(config, layout.shard))
    said: list[str] = []
    monkeypatch.setattr(manager.time, "sleep", lambda seconds: None)
    with Checkpoints(config, say=said.append) as checkpoints:

        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        outcome = checkpoints._outcome

        def late_outcome(save: manager._Save) -> manager.SaveOutcome:
            return manager.SaveOutcome.WRITING if step < save.step + 3 else outcome(save)

        monkeypatch.setattr(checkpoints._saver, "save", full)
        monkeypatch.setattr(checkpoints, "_outcome", late_outcome)
        for step in range(20, 100):
            if checkpoints.due(step):
                state = checkpoints.save(step, state, {"position": step}, layout, fixture.OPTIMIZER)
            checkpoints.poll(step)
        begun = [int(n) for n in re.findall(r"^saving step (\d+)", "\n".join(said), re.M)]
        announced = [
            int(n)
            for n in re.findall(r"retried (?:after step|at once, with step) (\d+)", "\n".join(said))
        ]
        assert begun == [20, 25, 32, 40, 59, 60, 80] and announced == [*begun[1:], 100], said
        with pytest.raises(
            ConfigError,
            match=(
                r"^step 101 could not be saved in .*: \[Errno 28\] No space left on device; all "
                r"attempts to save this last step failed, and there is no older checkpoint"
            ),
        ) as last:
            checkpoints.save(101, state, {"position": 101}, layout, fixture.OPTIMIZER, last=True)
        assert storage_failed(last.value)


def test_errors_after_the_first_failure_are_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silences TensorStore writes that end after a failed one closed the event loop, and pending
    Orbax reads; other errors are shown."""
    told: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda error: told.append(error.exc_type))
    promise, future = ts.Promise.new()

    async def never_waited_for() -> None:
        next(future.__await__())

    class Other:
        def __del__(self) -> None:
            raise ValueError

    quiet.quiet.__wrapped__()
    asyncio.run(never_waited_for())
    promise.set_result(None)
    code = "async def read():\n try: await future\n finally: raise OSError"
    exec(
        compile(code, "site-packages/orbax/serialization.py", "exec"),
        orbax := {"future": ts.Promise.new()[1]},
    )

    async def left() -> None:
        orbax["read"]().send(None)

    asyncio.run(left())
    assert told == []
    Other()
    assert told == [ValueError]


def test_another_model_is_refused_before_any_array_is_read(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints" / str(fixture.STEP) / "state" / "d")  # the arrays
    wider = dataclasses.replace(
        fixture.CONFIG, model=dataclasses.replace(fixture.CONFIG.model, d_ff=16, tied=False)
    )
    with Checkpoints(at(copy)) as checkpoints, pytest.raises(ConfigError) as caught:
        saved = checkpoints.newest()
        assert saved is not None
        saved.state(fixture.abstract(wider, shard_on("ddp")))
    lines = str(caught.value).split("\n")
    assert lines[0].endswith("checkpoints/307 is a checkpoint of another model")
    assert (
        "  - blocks.mlp.up.weight: [2, 8, 32, 'float32'] in the checkpoint, [2, 8, 16, 'float32'] "
        "in this config"
    ) in lines
    assert "  - head: absent in the checkpoint, [64, 8, 'float32'] in this config" in lines
