"""Node-local checkpoints: used if complete, newest and of the same layout, else the durable one;
never with a wrong bit."""

import dataclasses
import functools
import re
import resource
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from fault.job import Job, arguments, certificates, corpus
from fixtures import make_checkpoint as fixture
from support import shard_on

from mesh_lm import distributed
from mesh_lm.checkpoint import Checkpoints, SavedCheckpoint
from mesh_lm.checkpoint.copies import Server
from mesh_lm.config import CheckpointConfig, ModelConfig, PipelineConfig, TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig
from mesh_lm.network.secret import Secret
from mesh_lm.network.wire import LOOPBACK
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, abstract_state
from mesh_lm.state.disk_form import with_used, without_used
from mesh_lm.training.check import check
from sharding_rules import Shard

COMPILE_BUDGET = 130


@dataclasses.dataclass
class Run:
    """Saves and restores states whose values depend on the step, with one layout, on disks below
    one directory."""

    config: TrainConfig
    shard: Shard
    pipeline: PipelineConfig = PipelineConfig()

    @functools.cached_property
    def layout(self) -> ModelLayout:
        return ModelLayout.of(self.config.model, self.shard, self.pipeline)

    @functools.cached_property
    def abstract(self) -> State:
        return abstract_state(
            self.layout, Optimizer(self.config.optimizer, self.config.train.steps)
        )

    def state(self, step: int) -> State:
        def filled(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
            values = (
                fixture.pattern(jax.tree_util.keystr(path), leaf.shape, np.dtype(np.float32)) + step
            )
            return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

        return with_used(self.layout, jax.tree_util.tree_map_with_path(filled, self.abstract))

    def save(self, *steps: int) -> None:
        with Checkpoints(self.config) as checkpoints:
            checkpoints.restore(
                self.layout, Optimizer(self.config.optimizer, self.config.train.steps)
            )
            for step in steps:
                assert checkpoints.due(step)
                checkpoints.save(
                    step,
                    self.state(step),
                    {"position": step, "samples": f"{step:016x}"},
                    self.layout,
                    fixture.OPTIMIZER,
                )

    def restored(self) -> tuple[SavedCheckpoint, State]:
        with Checkpoints(self.config) as checkpoints:
            saved, state = checkpoints.restore(
                self.layout, Optimizer(self.config.optimizer, self.config.train.steps)
            )
        assert saved is not None and state is not None
        return saved, state

    def require(self, step: int) -> SavedCheckpoint:
        """Asserts that the state of this step is restored: bits, shardings and data."""
        saved, state = self.restored()
        assert (saved.step, saved.data["position"]) == (step, step)
        leaves = jax.tree_util.tree_flatten_with_path(state)[0]
        for (path, leaf), expected in zip(leaves, jax.tree.leaves(self.state(step)), strict=True):
            assert leaf.sharding == expected.sharding and leaf.dtype == expected.dtype, path
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected), str(path))
        return saved

    @property
    def directories(self) -> list[Path]:
        """Returns the directories of the steps on the local disk."""
        return sorted(
            Path(self.config.checkpoint.local).glob("*/*/*-of-*"),
            key=lambda path: int(path.parent.name),
        )


def config_at(tmp_path: Path, model: ModelConfig = fixture.CONFIG.model) -> TrainConfig:
    policy = CheckpointConfig(every=10, local=str(tmp_path / "local"), local_every=2)
    return dataclasses.replace(
        fixture.CONFIG, output=str(tmp_path / "run"), checkpoint=policy, model=model
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(config_at(tmp_path), shard_on("hsdp+megatron", data=2, fsdp=2, tensor=2))


def test_the_newest_local_step_comes_back(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.save(2, 4, 10, 12, 14, 16)
    assert [path.parent.name for path in run.directories] == ["14", "16"], "the newest two are kept"
    saved = run.require(16)
    assert (
        f"step 16 is on the local disks of all processes ({saved.directory}), newer"
        in capsys.readouterr().out
    )
    assert saved.digests and saved.changed(run.config) == []
    n_bytes = (run.directories[-1] / "state.raw").stat().st_size
    assert n_bytes == sum(x.nbytes for x in jax.tree.leaves(run.state(16))), (
        "a part that several devices hold is written once"
    )
    run.save(20)
    assert run.require(20).directory.name == "checkpoints", "a durable step that is newer"


def test_local_steps_alone_are_a_run(run: Run) -> None:
    run.save(2)
    run.require(2)


def test_stages_are_saved_as_they_lie_in_memory(tmp_path: Path) -> None:
    """Padding is saved too: no layer moves."""
    model = DecoderConfig(
        vocab_size=64,
        vocab_multiple=1,
        seq_len=8,
        n_layers=6,
        d_model=8,
        n_heads=2,
        dtype="float32",
    )
    staged = Run(
        config_at(tmp_path, model),
        shard_on("megatron", pipeline=2, tensor=2),
        PipelineConfig(chunks=2, layers=(2, 2, 1, 1)),
    )
    assert not staged.layout.is_contiguous
    staged.save(2)
    staged.require(2)
    other = dataclasses.replace(staged, pipeline=PipelineConfig(chunks=2, layers=(1, 1, 2, 2)))
    with Checkpoints(other.config) as checkpoints:
        restored = checkpoints.restore(
            other.layout, Optimizer(other.config.optimizer, other.config.train.steps)
        )
    assert restored == (None, None), "the same shapes, with other layers in the rows"


def test_flat_vectors(tmp_path: Path) -> None:
    """Flat vectors are restored, and the layers' copy is computed from them; vectors of another
    model, of equal sizes, are refused."""
    model = DecoderConfig(
        vocab_size=64, vocab_multiple=1, seq_len=8, n_layers=2, d_model=8, n_heads=2, biases=False
    )
    run = Run(config_at(tmp_path, model), shard_on("distributed+megatron", data=2, tensor=2))
    run.save(2)
    run.require(2)
    n_bytes = (run.directories[-1] / "state.raw").stat().st_size
    assert n_bytes == sum(
        x.nbytes for x in jax.tree.leaves(without_used(run.layout, run.state(2)))
    ), "that copy is not written"
    other = dataclasses.replace(
        run, config=config_at(tmp_path, dataclasses.replace(model, n_heads=4))
    )
    assert [leaf.shape for leaf in other.layout.flat.leaves.values()] == [
        leaf.shape for leaf in run.layout.flat.leaves.values()
    ]
    with Checkpoints(other.config) as checkpoints:
        assert checkpoints.restore(other.layout, Optimizer(other.config.optimizer, 10)) == (
            None,
            None,
        )


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("state.raw", "flip"),
        ("state.raw", "cut"),
        ("description.json", "flip"),
        ("description.json", "delete"),
        ("description.json", "edit"),
    ],
)
def test_a_damaged_part_means_the_step_before_it_or_the_durable_one(
    run: Run, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save(10, 12, 14)

    def damage_file(file: Path) -> None:
        data = bytearray(file.read_bytes())
        middle = len(data) // 2
        match damage:
            case "delete":
                file.unlink()
            case "cut":
                file.write_bytes(data[:middle])
            case "edit":
                file.write_bytes(data.replace(b'"position"', b'"pasition"'))
            case "flip":
                data[middle] ^= 1
                file.write_bytes(data)

    older, newer = run.directories
    damage_file(newer / name)
    capsys.readouterr()
    run.require(12)
    damage_file(older / name)
    run.require(10)
    output = capsys.readouterr().out
    if (name, damage) == ("state.raw", "flip"):
        reasons = (
            r"local checkpoints are not used: step 14 on process 0: \S+ is damaged in state.raw: "
            r"its digest is not the saved one; step 12 on"
        )
        assert re.search(reasons, output), output
    run.require(10)
    assert "not used" not in capsys.readouterr().out, "they are removed"


@pytest.mark.slow
def test_another_layout_means_the_durable_step(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save(10, 12)
    directory = run.directories[0]
    copy = shutil.copytree(directory, tmp_path / "copy")
    dataclasses.replace(run, shard=shard_on("hsdp+megatron", data=4, tensor=2)).require(10)
    assert (
        "not used: step 12 on process 0: it was saved by a run with different mesh sizes\n"
        in capsys.readouterr().out
    )
    shutil.copytree(copy, directory)
    dataclasses.replace(run, shard=shard_on("fsdp", data=2, fsdp=2, tensor=2)).require(10)
    assert re.search(
        r"not used: step 12 on process 0: \S+ was sharded differently when it was saved\n",
        capsys.readouterr().out,
    )
    shutil.copytree(copy, directory.with_name("0-of-2"))
    run.require(10)
    assert "not used: step 12 was saved by 2 processes\n" in capsys.readouterr().out
    assert not run.directories


def test_a_mixture_of_two_lives_is_never_taken(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process that was killed during a save still has that step from before its restart."""
    run.save(10, 12)

    def gather_from_two(value: object) -> list[object]:
        match value:
            case ["", _]:
                return [value, ["", "state 0, samples 0"]]
            case [[int(), _], *_]:  # it has its own files of the same steps
                return [value, [[step, [1]] for step, _ in value]]
        return [value, value]

    monkeypatch.setattr(distributed, "gather_from_all", gather_from_two)
    run.require(10)
    assert "not used: step 12 is not of the same run on all processes\n" in capsys.readouterr().out


@pytest.mark.parametrize("damaged", ["", "copy", "original"])
def test_files_that_are_lost_here_come_from_the_other_node(
    run: Run,
    tmp_path: Path,
    damaged: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Process 0 has lost its disk, or it is damaged. Process 1, whose server is the real one here,
    has its files and a copy of those."""
    run.save(10, 12)
    (original,) = run.directories
    copy = tmp_path / "peer" / "12" / original.name
    shutil.copytree(original, copy)
    if damaged:
        arrays = (original if damaged == "original" else copy) / "state.raw"
        arrays.write_bytes(bytes(arrays.stat().st_size))
    if damaged != "original":
        shutil.rmtree(original)
    monkeypatch.setenv("MESH_LM_SECRET", "a secret of these two processes")
    server = Server(
        Secret.shared(),
        LOOPBACK,
        lambda step, process: tmp_path / "peer" / str(step) / f"{process}-of-1",
        print,
        2,
    )

    def gather_from_two(value: object) -> list[object]:
        match value:
            case [str(), int()]:
                return [value, [LOOPBACK, server.port]]
            case str() | int():  # tokens, and the nodes of both
                return [value, 1]
            case None | ["", _] | [str(), _]:
                return [value, value]
        return [value, [[12, [0, 1]]]]

    monkeypatch.setattr(distributed, "gather_from_all", gather_from_two)
    with_copies = dataclasses.replace(run.config.checkpoint, local_copies=1)
    run.config = dataclasses.replace(run.config, checkpoint=with_copies)
    run.require(10 if damaged == "copy" else 12)
    output = capsys.readouterr().out
    server.close()
    was_lost = (
        "newer than the output's checkpoints; fetched from other nodes: process 0\n" in output
    )
    was_replaced = "its digest is not the saved one; fetched from another node\n" in output
    assert was_lost == (not damaged), output
    assert was_replaced == (damaged == "original"), output
    assert ("is damaged in state.raw" in output) == bool(damaged)
    names = [directory.name for directory in run.directories]
    assert names == ([] if damaged == "copy" else [original.name])


def test_copies_need_another_node(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.config = dataclasses.replace(
        run.config, checkpoint=dataclasses.replace(run.config.checkpoint, local_copies=1)
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"local_copies=1 needs 2 nodes, but this run has 1 .* set it to 0, or checkpoint.local "
            r"to a dir"
        ),
    ):
        run.save(2)
    monkeypatch.setenv("MESH_LM_ELASTIC", "2")
    monkeypatch.setenv("MESH_LM_SECRET", "a secret of these two processes")
    run.save(2)
    assert (
        "warning: checkpoint.local_copies=1, but only 1 nodes are left: local checkpoints have 0 "
        "copies"
    ) in capsys.readouterr().out
    assert [path.parent.name for path in run.directories] == ["2"]


def test_a_start_removes_what_no_process_can_use(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that comes back in another place has steps of its old one, which nothing there would
    replace."""
    run.save(10, 12, 14, 20)
    assert [path.parent.name for path in run.directories] == ["12", "14"]
    run.require(20)
    assert not run.directories
    run.config = dataclasses.replace(
        run.config, checkpoint=dataclasses.replace(run.config.checkpoint, local_copies=1)
    )
    monkeypatch.setenv("MESH_LM_ELASTIC", "2")
    monkeypatch.setenv("MESH_LM_SECRET", "a secret of these two processes")
    run.save(22)
    shutil.copytree(run.directories[0], run.directories[0].with_name("3-of-1"))
    run.save(24)
    assert [path.parent.name for path in run.directories] == ["22", "22", "24"], (
        "the other one may still be needed"
    )
    run.save(26)
    assert [(path.parent.name, path.name) for path in run.directories] == [
        ("24", "0-of-1"),
        ("26", "0-of-1"),
    ]


def test_what_no_longer_belongs_to_the_run_is_not_taken(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run.save(10, 20)
    run.save(22)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "20")  # as a user does to roll back
    run.require(10)
    assert (
        "not used: step 22 on process 0: it was saved when the output had step 20, which is "
        "missing now\n"
    ) in capsys.readouterr().out
    shutil.rmtree(tmp_path / "run")
    run.save(2)
    shutil.rmtree(tmp_path / "run")
    with Checkpoints(run.config) as checkpoints:
        restored = checkpoints.restore(
            run.layout, Optimizer(run.config.optimizer, run.config.train.steps)
        )
    assert restored == (None, None) and not run.directories, "a run that starts from scratch"


def test_going_back_behind_a_step_forgets_it(run: Run) -> None:
    run.save(10, 12, 14)
    with Checkpoints(run.config) as checkpoints:
        saved, _ = checkpoints.roll_back(
            15, {}, run.layout, Optimizer(run.config.optimizer, run.config.train.steps)
        )
    assert saved.step == 10 and not run.directories
    run.require(10)


def test_going_back_leaves_the_step_itself_behind(run: Run) -> None:
    run.save(10, 20)
    optimizer = Optimizer(run.config.optimizer, run.config.train.steps)
    with Checkpoints(run.config) as checkpoints:
        saved, state = checkpoints.roll_back(20, {}, run.layout, optimizer)
        assert saved.step == 10 and int(state["step"]) == int(run.state(10)["step"])
        assert (checkpoints.directory / "20.passed").is_dir()


def test_a_disk_that_fails_is_a_warning(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Covers a full file system, found by the background write, and a missing one."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    run.save(10)
    with Checkpoints(run.config) as checkpoints:
        checkpoints.save(12, run.state(12), {"position": 12}, run.layout, fixture.OPTIMIZER)
        checkpoints._local.close()
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard_limit))
        try:
            for step in (14, 16):
                checkpoints.save(
                    step, run.state(step), {"position": step}, run.layout, fixture.OPTIMIZER
                )
            checkpoints._local.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft_limit, hard_limit))
    output = capsys.readouterr().out
    assert output.count("warning: no local checkpoint in ") == 1, output
    assert "File too large; training continues" in output
    assert [path.parent.name for path in run.directories] == ["12"], "no remains"
    run.require(12)
    shutil.rmtree(tmp_path / "local")
    (tmp_path / "local").write_text("a file", encoding="utf-8")
    run.save(12)
    assert "Not a directory; training continues" in capsys.readouterr().out
    run.require(10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local_every": 5}, "checkpoint.local_every=5 needs checkpoint.local"),
        ({"local": "/dev/shm"}, "checkpoint.local=/dev/shm is unused"),
        (
            {"local_copies": 1},
            (
                "checkpoint.local_copies=1 copies local checkpoints; set checkpoint.local and "
                "checkpoint.local_every"
            ),
        ),
        ({"local_copies": -1}, "checkpoint.local_copies=-1 must be at least 0"),
        ({"local": "gs://a", "local_every": 5}, "checkpoint.local=gs://a must be a directory"),
        (
            {"local": "/dev/shm", "local_every": 20},
            (
                "checkpoint.local_every=20 is a multiple of checkpoint.every=10, and those steps "
                "are saved to the output; set it below 10"
            ),
        ),
    ],
)
def test_a_tier_that_could_not_work_is_refused(changes: dict[str, object], message: str) -> None:
    config = dataclasses.replace(
        fixture.CONFIG, checkpoint=dataclasses.replace(CheckpointConfig(every=10), **changes)
    )
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rules", ["hsdp", pytest.param("distributed+hsdp", marks=pytest.mark.exhaustive)]
)
def test_two_processes_resume_from_their_own_disks_or_not_at_all(
    rules: str, tmp_path: Path
) -> None:
    """Each node has a directory. Killed at step 9, the run resumes from 8, or from 5 if a disk is
    lost, and ends with the same bits."""
    data = corpus(tmp_path)
    settings = {
        "checkpoint__local": tmp_path / "disk",
        "checkpoint__local_every": 2,
        "train__steps": 10,
        "rules": rules,
    }
    with Job(
        tmp_path / "faults", arguments(data, tmp_path / "straight", train__steps=10, rules=rules)
    ) as job:
        assert job.ended() == 0, job.log
    wanted = certificates(job.log)[10]
    with Job(
        tmp_path / "faults", arguments(data, tmp_path / "run", **settings), MESH_LM_PACE="0.3"
    ) as job:
        job.fault(1, 9, "kill")
        assert job.ended() == 0, job.log
    assert (
        "step 8 is on the local disks of all processes" in job.log
        and "resumed at step 8 " in job.log
    ), job.log
    assert certificates(job.log)[10] == wanted, job.log
    places = sorted(path.name for path in (tmp_path / "disk").glob("*/8/*"))
    assert places == ["0-of-2", "1-of-2"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "10")
    (run,) = (tmp_path / "disk").iterdir()
    shutil.rmtree(run / "8" / "1-of-2")
    shutil.rmtree(run / "6" / "0-of-2")
    with Job(tmp_path / "faults", arguments(data, tmp_path / "run", **settings)) as job:
        assert job.ended() == 0, job.log
    assert (
        "local checkpoints are not used: no step is on the local disks of all processes" in job.log
    ), job.log
    assert "resumed at step 5 " in job.log, job.log
    assert certificates(job.log)[10] == wanted, job.log
