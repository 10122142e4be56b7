"""train.py as users run it: on 8 devices, killed and resumed, stopped by SIGTERM, and with bad
input."""

import argparse
import errno
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import covering
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from processes import ended, wait_for

import train
from mesh_lm import distributed
from mesh_lm.errors import ConfigError
from mesh_lm.inference.trained import TrainedModel
from mesh_lm.training import monitor, post_step, session

COMPILE_BUDGET = 700
ROOT = Path(__file__).parents[3]
SHRUNK = {
    "model.n_layers": 2, "model.d_model": 32, "model.n_heads": 4, "model.seq_len": 32,
    "model.vocab_size": 512, "model.dtype": "float32",
    "data.tokenizer_vocab": 512, "train.global_batch": 16, "train.steps": 4, "train.log_every": 1,
    "train.eval_every": 0,
    "train.sample_tokens": 0, "data.max_epochs": 0,
    "optimizer.warmup_steps": 2, "launch.compile_cache": "", "launch.cpu_devices": 0,
    "checkpoint.every": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(inspect.getsource(argparse), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def arguments(text: Path):
    """Returns the command line of a tiny run; keywords change fields, with __ for the dot."""

    def make(output: Path, file: str = "gpt_tiny", **changes: object) -> list[str]:
        fields = SHRUNK | {"data.path": text, "data.cache": text.parent / "cache", "output": output}
        fields |= {name.replace("__", "."): value for name, value in changes.items()}
        return [
            f"--config={ROOT}/configs/{file}.py",
            *(f"--config.{name}={value}" for name, value in fields.items()),
        ]

    return make


def metrics(output: Path) -> list[dict]:
    return [
        json.loads(line)
        for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def losses(output: Path) -> list[float]:
    return [row["loss"] for row in metrics(output) if "loss" in row]


def leaves(output: Path, step: int) -> dict[str, np.ndarray]:
    """Returns every array of a checkpoint, read with Orbax alone."""
    tree = ocp.PyTreeCheckpointer().restore(output.absolute() / "checkpoints" / str(step) / "state")
    return {
        jax.tree_util.keystr(path): np.asarray(x)
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def spawn(
    arguments: list[str], program: tuple[str, ...] = (str(ROOT / "train.py"),)
) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


@pytest.mark.slow
def test_gpt_175b_shrunk_by_overrides_alone(
    arguments, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    shrink = {
        "mesh__pipeline": 2,
        "pipeline__chunks": 1,
        "mesh__tensor": 2,
        "model__vocab_multiple": 16,
        "train__microbatches": 2,
    }
    shrink |= {"train__sample_tokens": 8}
    changes = {
        "train__steps": 12,
        "optimizer__learning_rate": 3e-3,
        "profile__start_step": 5,
        "profile__steps": 2,
    }
    assert train.main(arguments(tmp_path, "gpt_175b", **shrink, **changes)) == 0
    found = losses(tmp_path)
    assert len(found) == 12 and found[-1] < found[0] - 0.05 and abs(found[0] - np.log(512)) < 0.1
    assert [row for row in metrics(tmp_path) if "heldout_bpb" in row][-1]["step"] == 12
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "sample.txt").exists()
    out = capsys.readouterr().out
    assert (
        "rules zero3+megatron_sp" in out
        and "pipeline=2 x data=2 x tensor=2" in out
        and "gzip -9" in out
    )


KILLED = """
import os, signal, sys, time, train
from mesh_lm.training import session
due = session.Checkpoints.due
def die(self, n):
    if n == 6:
        while not (self.directory / "4").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    return due(self, n)
session.Checkpoints.due = die
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_kill_and_resume_is_bitwise(arguments, tmp_path: Path) -> None:
    """8 uninterrupted steps equal 6 steps, kill -9, and those since the last checkpoint: all
    leaves, a router's bias, dropout and data order included, and the loads of the experts."""
    changes = {
        "train__steps": 8,
        "checkpoint__every": 4,
        "model__dropout": 0.1,
        "model__segments": "first:1:dense,second:1:moe",
        "model__experts__number": 4,
        "model__experts__bias": "true",
        "mesh__data": 2,
        "mesh__expert": 2,
        "mesh__tensor": 2,
        "rules": "megatron_sp+zero1+experts_padded",
    }
    resumed_as_uninterrupted(arguments, tmp_path, changes)
    assert any("experts.bias" in name for name in leaves(tmp_path / "killed", 8))
    straight, killed = (
        {row["step"]: row["expert_loads"] for row in metrics(tmp_path / run) if "loss" in row}
        for run in ("straight", "killed")
    )
    assert straight == killed and len(straight) == 8


@pytest.mark.slow
def test_islands_kill_and_resume_is_bitwise(arguments, tmp_path: Path) -> None:
    """The same between two outer steps; the checkpoint is refused on another number of islands."""
    changes = {
        "train__steps": 9,
        "checkpoint__every": 4,
        "model__dropout": 0.1,
        "diloco__outer_steps": 3,
    }
    changes |= {
        "mesh__island": 2,
        "mesh__data": 2,
        "mesh__tensor": 2,
        "rules": "diloco+megatron_sp+zero1",
    }
    resumed_as_uninterrupted(arguments, tmp_path, changes)
    killed, fix = (
        tmp_path / "killed",
        (
            "set diloco.outer_steps=3 and mesh.island=2, or use a new output directory with "
            "init_from="
        ),
    )
    four = {"mesh__island": 4, "mesh__data": 1}
    plain = {
        "diloco__outer_steps": 0,
        "mesh__island": 1,
        "mesh__data": 4,
        "rules": "megatron_sp+zero1",
    }
    for other, was in (four, "4 islands"), (plain, "a run without an outer step"):
        with pytest.raises(
            ConfigError,
            match=f"is a checkpoint of 2 islands, and this config belongs to {was}; {fix}",
        ):
            train.main(arguments(killed, **{**changes, "train__steps": 12, **other}))


OFFLOADED = {
    "fsdp": ("mu,nu", {"rules": "fsdp", "mesh__data": 1, "mesh__fsdp": 8}),
    "distributed": ("mu,nu,master", {"rules": "distributed", "mesh__data": 8}),
    "pipeline": (
        "mu,nu",
        {"rules": "zero1", "mesh__pipeline": 2, "mesh__data": 4, "train__microbatches": 2},
    ),
}
"""Name -> parts of the state that are kept on the host, and the run."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param("fsdp", marks=pytest.mark.exhaustive), "distributed", "pipeline"]
)
def test_a_killed_run_goes_on_with_its_state_elsewhere(
    name: str, arguments, tmp_path: Path
) -> None:
    """A run that is killed with a part of its state in the hosts' memory, and goes on with all of
    it on the devices, or the opposite, has the bits of one that moved it without being killed, and
    the losses of one that never did."""
    parts, run = OFFLOADED[name]
    changes = run | {"train__steps": 8, "checkpoint__every": 4}
    first, then = {"optimizer__offload": parts}, {"optimizer__offload": ""}
    if name == "distributed":
        first, then = then, first
    straight, moved, killed = tmp_path / "straight", tmp_path / "moved", tmp_path / "killed"
    assert train.main(arguments(straight, **changes, **first)) == 0
    shutil.copytree(straight / "checkpoints" / "4", moved / "checkpoints" / "4")
    assert train.main(arguments(moved, **changes, **then)) == 0
    np.testing.assert_allclose(losses(moved), losses(straight)[4:], rtol=1e-6)

    killed_after_step_6(arguments(killed, **changes, **first), killed)
    assert train.main(arguments(killed, **changes, **then)) == 0
    require_equal_state(killed, moved, 8)


def resumed_as_uninterrupted(arguments, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Runs without an interruption, and again killed after step 6 and resumed from step 4; asserts
    that both end in the same state."""
    straight, killed, steps = tmp_path / "straight", tmp_path / "killed", changes["train__steps"]
    assert train.main(arguments(straight, **changes)) == 0
    killed_after_step_6(arguments(killed, **changes), killed)
    assert train.main(arguments(killed, **changes)) == 0
    require_equal_state(killed, straight, steps)
    assert [row["step"] for row in metrics(killed) if "loss" in row] == list(range(1, steps + 1))


def killed_after_step_6(words: list[str], output: Path) -> None:
    """Starts a run, which leaves a checkpoint of step 4."""
    process = spawn(words, ("-c", KILLED))
    out = ended(process)
    assert process.returncode == -signal.SIGKILL, out
    assert [path.name for path in (output / "checkpoints").iterdir()] == ["4"]


def require_equal_state(output: Path, reference: Path, step: int) -> None:
    wanted, found = leaves(reference, step), leaves(output, step)
    assert found.keys() == wanted.keys() and len(wanted) > 20
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.slow
def test_another_mesh_continues_with_the_same_losses(arguments, tmp_path: Path) -> None:
    changes = {"train__steps": 8, "checkpoint__every": 4, "checkpoint__keep": 5}
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert train.main(arguments(whole, **changes, mesh__data=8)) == 0
    shutil.copytree(whole / "checkpoints" / "4", moved / "checkpoints" / "4")
    assert (
        train.main(
            arguments(
                moved,
                **changes,
                mesh__data=2,
                mesh__fsdp=2,
                mesh__tensor=2,
                rules="hsdp+megatron",
                train__microbatches=2,
            )
        )
        == 0
    )
    np.testing.assert_allclose(losses(moved), losses(whole)[4:], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "name", "status"), [(signal.SIGTERM, "SIGTERM", 99), (signal.SIGINT, "Ctrl-C", 130)]
)
def test_a_signal_saves_and_leaves(
    arguments, tmp_path: Path, number: int, name: str, status: int
) -> None:
    process = spawn(arguments(tmp_path, train__steps=100_000))
    wait_for(lambda: (tmp_path / "metrics.jsonl").exists() and len(metrics(tmp_path)) > 2, process)
    process.send_signal(number)
    out = ended(process)
    assert process.returncode == status and "Traceback" not in out, out
    (step,) = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert f"stopped by {name} after step {step}; the same command continues from there" in out
    assert leaves(tmp_path, step)["['step']"] == step


@pytest.mark.slow
def test_a_signal_between_save_and_exit_loses_nothing(
    arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM arrives just after step 2 decided not to save, so step 3 saves."""
    due = session.Checkpoints.due
    monkeypatch.setattr(
        session.Checkpoints,
        "due",
        lambda self, n: (os.kill(os.getpid(), signal.SIGTERM) if n == 2 else None, due(self, n))[1],
    )
    assert train.main(arguments(tmp_path)) == 99
    assert leaves(tmp_path, 3)["['step']"] == 3


@pytest.mark.slow
def test_an_evaluation_that_dies_is_made_up_for(
    arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(post_step, "mean_loss", lambda *args: 1 / 0)
        train.main(arguments(tmp_path, train__steps=2))
    for _ in range(2):
        assert train.main(arguments(tmp_path, train__steps=2)) == 0
        assert [row["step"] for row in metrics(tmp_path) if "heldout_bpb" in row] == [2]


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGTERM, 99), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)],
)
def test_a_signal_during_evaluation_ends_it(
    arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    seen = []

    def mean_loss(step, params, batches):
        for batch in batches:
            seen.append(batch)
            os.kill(os.getpid(), number)
        return 0.0

    monkeypatch.setattr(post_step, "mean_loss", mean_loss)
    assert train.main(arguments(tmp_path, train__eval_every=2)) == status
    assert len(seen) == 1 and leaves(tmp_path, 3)["['step']"] == 3
    assert not [row for row in metrics(tmp_path) if "heldout_bpb" in row]


@pytest.mark.slow
def test_a_signal_during_the_last_evaluation_leaves_it_to_the_next_start(
    arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            post_step,
            "mean_loss",
            lambda step, params, batches: (
                os.kill(os.getpid(), signal.SIGTERM) or len(list(batches))
            ),
        )
        assert train.main(arguments(tmp_path)) == 99
    assert not [row for row in metrics(tmp_path) if "heldout_bpb" in row]
    assert train.main(arguments(tmp_path)) == 0
    assert [row["step"] for row in metrics(tmp_path) if "heldout_bpb" in row] == [4]


@pytest.mark.slow
def test_an_output_below_the_text(
    arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`cd corpus; mesh-lm train --data.path=.`: what the first start has written is not text to the
    second."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(inspect.getsource(json.decoder), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    changes = {"data__path": ".", "data__cache": "cache", "checkpoint__every": 1}
    assert train.main(arguments(Path("run"), **changes, train__steps=1)) == 0
    assert train.main(arguments(Path("run"), **changes, train__steps=2)) == 0
    assert "resumed at step 1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_locale_that_is_not_utf_8(arguments, tmp_path: Path) -> None:
    """In the C locale, where Python would encode as ASCII: the text, the log, the sample and what
    is printed are not."""
    corpus = tmp_path / "naïve.txt"
    corpus.write_text("".join(f"{number} naïve ≈ é\n" for number in range(4000)), encoding="utf-8")
    changes = {
        "data__path": corpus,
        "data__tokenizer": "bytes",
        "train__steps": 2,
        "train__sample_tokens": 32,
        "train__eval_sequences": 2,
    }
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *arguments(tmp_path / "run", **changes)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, env=os.environ | locale,
    )  # fmt: skip
    out = ended(process)
    assert process.returncode == 0, out
    assert "already finished" not in out
    sample = (tmp_path / "run" / "sample.txt").read_text(encoding="utf-8")
    assert not sample.isascii() and "\\u" not in sample, (
        "bytes that are no character are written as U+FFFD"
    )
    path = json.loads((tmp_path / "run" / "config.json").read_text(encoding="utf-8"))["data"][
        "path"
    ]
    assert os.fsencode(path) == os.fsencode(corpus)
    assert (tmp_path / "run" / "log.txt").read_bytes().decode()


def test_bad_steps_are_noticed_however_often_is_evaluated(arguments, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step 2 skipped, .*health.skip_limit=1"):
        train.main(
            arguments(
                tmp_path,
                train__steps=6,
                train__eval_every=1,
                optimizer__learning_rate=1e30,
                health__skip_limit=1,
            )
        )


def test_a_disk_that_is_full_at_the_very_end(
    arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*about: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "loss.png")

    monkeypatch.setattr(monitor, "loss_curve", full)
    assert train.main(arguments(tmp_path, train__steps=1)) == 0
    assert "warning: loss.png cannot be written: No space left on device" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_that_starts_from_another(arguments, tmp_path: Path) -> None:
    """A run starts from another's weights, only with the same tokenizer, which it keeps for later
    users."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert train.main(arguments(first)) == 0
    still = {
        "optimizer__learning_rate": 0,
        "checkpoint__every": 0,
        "train__steps": 1,
        "init_from": first,
    }
    assert train.main(arguments(second, **still)) == 0
    wanted, found = leaves(first, 4), leaves(second, 1)
    for name in wanted:
        if "params" in name:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    with pytest.raises(
        ConfigError, match=r"init_from=.* was trained with another tokenizer than this data's"
    ):
        train.main(arguments(tmp_path / "third", **still, data__tokenizer="bytes"))
    with pytest.raises(
        ConfigError, match=r"holds neither checkpoints of a run nor a Hugging Face model"
    ):
        train.main(arguments(tmp_path / "third", **still | {"init_from": tmp_path / "nothing"}))
    with pytest.raises(ConfigError, match=r"bytes is not the tokenizer that .* was trained with"):
        TrainedModel.load(first, tokenizer="bytes")
    assert not (tmp_path / "third").exists()


def test_checkpoints_of_another_run_are_refused(arguments, tmp_path: Path) -> None:
    assert train.main(arguments(tmp_path, train__steps=1)) == 0
    for changes, message in (
        (
            {"model__d_model": 64},
            (
                r"checkpoint of another model\n  - "
                r"blocks.attention.out.bias|blocks.attention.out.weight: \[2, 32, 4, 8, "
                r"'float32'\] in the"
            ),
        ),
        ({"model__tied": "true"}, r"head.* in the checkpoint, absent in this config"),
        (
            {"data__tokenizer_vocab": 400},
            (
                "was trained on corpus corpus-.*: data.tokenizer_vocab was 512, now 400; set it "
                "back, or use a"
            ),
        ),
        (
            {"data__tokenizer": "bytes"},
            (
                "was trained on corpus corpus-.*: data.tokenizer was empty, now bytes; set it "
                "back, or use a new"
            ),
        ),
        (
            {"seed": 1},
            (
                "in sequences of 32, seed 0, this config reads corpus-.*: seed was 0, now 1; set "
                "it back"
            ),
        ),
        ({"checkpoint__resume": "never"}, "already holds step 1, and checkpoint.resume=never"),
    ):
        with pytest.raises(ConfigError, match=message):
            train.main(arguments(tmp_path, train__steps=2, **changes))
    assert train.main(arguments(tmp_path, train__steps=2)) == 0, (
        "a refused run damaged the checkpoint"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__path": "/no/such/text"}, "data.path=/no/such/text"),
        ({"train__global_batch": 4000}, "fewer than train.global_batch=4000"),
        ({"checkpoint__resume": "required"}, "no checkpoint in "),
        (
            {"output": "/proc/no"},
            (
                "output=/proc/no cannot be written: No such file or directory (/proc); set another "
                "output"
            ),
        ),
        (
            {"data__max_epochs": 0.1, "train__steps": 16},
            " tokens, more than data.max_epochs=0.1; give it more text, set train.steps=",
        ),
        (
            {"model__d_mode": 3},
            "--config.model.d_mode: the config has no such field; did you mean --config.model.d_model?",
        ),
    ],
)
def test_bad_input_is_one_clear_error(
    arguments, tmp_path: Path, changes: dict, message: str, capsys: pytest.CaptureFixture
) -> None:
    assert distributed.run(train.main, arguments(**{"output": tmp_path} | changes)) == 1
    out = capsys.readouterr().err
    assert out.startswith("error: ") and message in out and "Traceback" not in out
    assert not tmp_path.exists() or not list(tmp_path.iterdir()), "something half-made is left"


def test_text_that_is_new_is_counted_before_the_state_is_made(
    arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        session, "init_state", lambda *about: pytest.fail("the first compilation came first")
    )
    fields = {
        "data__tokenizer_vocab": 300,
        "data__cache": tmp_path / "cache",
        "data__max_epochs": 4,
        "train__steps": 10_000,
    }
    with pytest.raises(
        ConfigError,
        match=(
            r"cannot start\n  - train.steps=10000 x 512 tokens a step are 5,120,000 from corpus "
            r"corpus-"
        ),
    ):
        train.main(arguments(tmp_path / "run", **fields))


def test_a_run_that_has_begun_is_only_warned(
    arguments, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """One of an older version, for which there was no limit, continues after an update. A start
    before it left a log, and no checkpoint."""
    (tmp_path / "log.txt").write_text("--- an earlier start\n", encoding="utf-8")
    train.main(arguments(tmp_path, train__steps=1, optimizer__warmup_steps=1))
    out = capsys.readouterr().out
    assert "no checkpoint yet: starts at step 0; one is saved at the end" in out
    assert (
        "warning: optimizer.warmup_steps=1 is more than half of train.steps=1: most of the run is "
        "warm-up; set optimizer.warmup_steps=0\n"
    ) in out
    assert train.main(arguments(tmp_path, train__steps=2, data__max_epochs=0.001)) == 0
    out = capsys.readouterr().out
    assert (
        "warning: train.steps=2 x 512 tokens a step are 1,024" in out
        and "more than data.max_epochs=0.001" in out
    )
    assert train.main(arguments(tmp_path, train__steps=2, data__max_epochs=0.001)) == 0
    out = capsys.readouterr().out
    assert "already finished" in out and "max_epochs" not in out.partition("already finished")[2]


def test_attention_that_cannot_serve_is_the_users_mistake(arguments, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"model.attention=mosaic: .*implementation='mosaic' cannot serve this call",
    ):
        train.main(arguments(tmp_path, model__attention="mosaic"))


@pytest.mark.slow
def test_an_error_is_the_status_of_the_process(arguments, tmp_path: Path) -> None:
    process = spawn(arguments(tmp_path, data__path="/no/such/text"))
    out = ended(process)
    assert process.returncode == 1 and "Traceback" not in out
    assert "\nerror: this run cannot start\n  - data.path=/no/such/text" in f"\n{out}"


@pytest.fixture(scope="module")
def losses_alone(arguments, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Returns the losses of a run on one device, in a process of its own."""
    alone = tmp_path_factory.mktemp("alone")
    process = spawn(arguments(alone, launch__cpu_devices=1))
    out = ended(process)
    assert process.returncode == 0, out
    return losses(alone)


PRESETS = [
    ("ddp", {"data": 8}), ("zero1", {"data": 8}), ("zero2", {"data": 8}),
    ("fsdp", {"fsdp": 8, "data": 1}),
    ("hsdp", {"data": 2, "fsdp": 4}), ("megatron", {"data": 4, "tensor": 2}),
    ("megatron_sp", {"data": 4, "tensor": 2}),
    ("fsdp+megatron_sp", {"fsdp": 4, "data": 1, "tensor": 2}),
    ("ring+distributed", {"sequence": 4, "data": 2}),
    ("usp+zero3", {"sequence": 2, "data": 2, "extra": "ulysses=2"}),
]  # fmt: skip


@pytest.mark.parametrize("case", covering.some(PRESETS, [PRESETS[-2]]))
def test_every_preset_by_command_line(
    arguments, tmp_path: Path, losses_alone: list[float], case: tuple[str, dict[str, Any]]
) -> None:
    rules, mesh = case
    assert (
        train.main(
            arguments(
                tmp_path, rules=rules, **{f"mesh__{axis}": size for axis, size in mesh.items()}
            )
        )
        == 0
    )
    np.testing.assert_allclose(losses(tmp_path), losses_alone, rtol=1e-6)
