"""`python -m mesh_lm.checkpoint` lists, verifies and compares checkpoints, without a mesh, and
without the model's code."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from fixtures import make_checkpoint as fixture
from support import shard_on

from mesh_lm.checkpoint import Checkpoints
from mesh_lm.checkpoint.arrays import StoredArray, StoredArrays
from mesh_lm.checkpoint.listing import CheckpointEntry
from mesh_lm.checkpoint.reader import seal
from mesh_lm.commands.checkpoint import main
from mesh_lm.config import TrainConfig
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state.digest import combined, host_digest

COMPILE_BUDGET = 35
CHANGED = "params/embedding"


def saved(output: Path, config: TrainConfig, steps: tuple[int, ...], **mesh: int) -> Path:
    """Makes a run that saved these steps; each but the first changes two elements of one leaf."""
    config = dataclasses.replace(config, output=str(output))
    layout = ModelLayout.of(config.model, shard_on("fsdp", **mesh))
    state = fixture.filled(fixture.abstract(config, layout.shard))
    with Checkpoints(config) as checkpoints:
        for step in steps:
            checkpoints.save(
                step,
                state,
                {"position": step, "samples": f"{step:016x}"},
                layout,
                fixture.OPTIMIZER,
            )
            leaf = np.array(state["params"]["embedding"])
            leaf[3, 1:3] += [0.5, -2.0]
            params = state["params"] | {
                "embedding": jax.device_put(leaf, state["params"]["embedding"].sharding)
            }
            state = state | {"params": params}
    return output


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("written") / "run", fixture.CONFIG, (1, 2), fsdp=4)


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


def said(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    status = main([str(word) for word in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def files_of(step: Path, name: str) -> dict[str, object]:
    return {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{step}/state/"},
        "path": f"{name.replace('/', '.', 1)}/",
    }


def store(step: Path, name: str, **options: Any) -> ts.TensorStore:
    return ts.open({"driver": "zarr3", "kvstore": files_of(step, name)}, **options).result()


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8, np.bool_, np.int64])
@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((), ()),
        ((7,), (3,)),
        ((5, 6, 3), (2, 6, 2)),
        ((2, 70_000, 3), (1, 40_000, 3)),
        ((0, 4), (1, 4)),
    ],
)
def test_the_digest_of_parts_is_that_of_the_whole(
    dtype: type, shape: tuple[int, ...], part: tuple[int, ...]
) -> None:
    x = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    chunks = {"name": "regular", "configuration": {"chunk_shape": part}}
    there = ts.open(
        {"driver": "zarr3", "kvstore": "memory://", "metadata": {"chunk_grid": chunks}},
        shape=shape,
        dtype=x.dtype,
        create=True,
    ).result()
    there[...] = x
    leaf = StoredArray(Path(), "x", there)
    assert leaf.part == part and all(leaf[box].size <= np.prod(part) for box in leaf.boxes())
    assert leaf.digest() == host_digest(x)


def test_a_run_that_is_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert StoredArrays(run / "checkpoints" / "2")[CHANGED].part == (64, 2), (
        "not read in one piece: sharded over four devices"
    )
    status, out, err = said(capsys, "verify", run)
    line = r"{}: whole; 51 arrays, 28\.06 kB, state [0-9a-f]{{16}}, \d+\.\d s\n"
    assert (status, err) == (0, "") and re.fullmatch(line.format(1) + line.format(2), out), out
    assert said(capsys, "verify", run / "checkpoints" / "1")[1].startswith("1: whole")
    assert re.fullmatch(line.format(2), said(capsys, "verify", run, "--step=2")[1])


def test_verify_needs_no_device_and_no_code_of_the_model(run: Path) -> None:
    """The command works in a process in which JAX would find no device."""
    environment = os.environ | {"JAX_PLATFORMS": "cuda"}
    command = [sys.executable, "-m", "mesh_lm.checkpoint", "verify", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr, done.stdout.count("whole")) == (0, "", 2)


def test_format_1_has_no_digests(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(capsys, "verify", fixture.OUTPUT)
    assert status == 0 and out.startswith(
        "307: no digests (format 1); its arrays can be read; 50 arrays"
    )


def element(step: Path) -> str:
    there = store(step, CHANGED)
    there[5, 5] = 1e-3
    return f"{CHANGED}: digest [0-9a-f]{{16}}, saved as [0-9a-f]{{16}}"


def shape(step: Path) -> str:
    store(step, "mu/embedding", shape=(8, 64), dtype=np.float32, create=True, delete_existing=True)
    return r"mu/embedding: \[8, 64, 'float32'\], saved as \[64, 8, 'float32'\]"


def dtype(step: Path) -> str:
    store(step, CHANGED, shape=(64, 8), dtype=np.int32, create=True, delete_existing=True)
    return rf"{CHANGED}: \[64, 8, 'int32'\], saved as \[64, 8, 'float32'\]"


def part(step: Path) -> str:
    ts.KvStore.open(files_of(step, CHANGED)).result().write("c/0/1", b"nothing").result()
    return f"{CHANGED}: cannot be read: .*"


def missing(step: Path) -> str:
    ts.KvStore.open(files_of(step, "nu/embedding")).result().delete_range(
        ts.KvStore.KeyRange()
    ).result()
    return "nu/embedding: is missing"


def index(step: Path) -> str:
    (step / "state" / "manifest.ocdbt").write_bytes(b"nothing")
    return "the list of its arrays: cannot be read: .*"


def tree(step: Path) -> str:
    described = json.loads((step / "state" / "_METADATA").read_text(encoding="utf-8"))
    described["tree_metadata"] = {
        key: leaf
        for key, leaf in described["tree_metadata"].items()
        if key != "('mu', 'embedding')"
    }
    (step / "state" / "_METADATA").write_text(json.dumps(described), encoding="utf-8")
    return "mu/embedding: is not in the list of arrays"


def description(step: Path) -> str:
    metadata = step / "metadata" / "metadata"
    metadata.write_text(
        metadata.read_text(encoding="utf-8").replace('"seed": 0', '"seed": 1'), encoding="utf-8"
    )
    return r"data/metadata and metadata/metadata are not those that were written \(seal\)"


def unsealed(step: Path) -> str:
    path = step / "metadata" / "metadata"
    metadata = json.loads(path.read_text(encoding="utf-8"))
    del metadata["seal"]
    path.write_text(json.dumps(metadata), encoding="utf-8")
    return r"data/metadata and metadata/metadata are not those that were written \(seal\)"


def undigested(step: Path) -> str:
    """As if a later version had saved an array that it did not digest."""
    data, path = (
        json.loads((step / "data" / "metadata").read_text(encoding="utf-8")),
        step / "metadata" / "metadata",
    )
    metadata = json.loads(path.read_text(encoding="utf-8"))
    del metadata["digests"]["nu/embedding"]
    path.write_text(json.dumps(metadata | {"seal": seal(data, metadata)}), encoding="utf-8")
    return "nu/embedding: was not saved: it has no digest"


@pytest.mark.parametrize(
    "damage", [element, shape, dtype, part, missing, index, tree, description, unsealed, undigested]
)
def test_damage_is_named(run: Path, capsys: pytest.CaptureFixture[str], damage) -> None:
    reason = damage(run / "checkpoints" / "1")
    status, out, err = said(capsys, "verify", run)
    assert (status, err) == (1, "")
    assert re.search(rf"^1: damaged\n(  - .*\n)*?  - {reason}\n", out) and "2: whole" in out, out


def test_one_that_was_put_aside_is_verified_where_it_is_named(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aside = (run / "checkpoints" / "2").rename(run / "checkpoints" / "2.damaged")
    assert (
        said(capsys, "verify", run)[1].startswith("1: whole")
        and "2" not in said(capsys, "verify", run)[1].split(":")[0]
    )
    assert said(capsys, "verify", aside)[1].startswith("2.damaged: whole")
    assert said(capsys, "verify", run, "--step=2.damaged")[1].startswith("2.damaged: whole")
    aside.rename(run / "checkpoints" / "2.damaged-2")
    (run / "checkpoints" / "1").rename(run / "checkpoints" / "1.passed")
    status, _, err = said(capsys, "verify", run)
    assert (status, err) == (
        2,
        "error: no complete checkpoint among 1.passed, 2.damaged-2; name one of them\n",
    )


def test_ls(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The listing reads no array: all are deleted here."""
    steps = run / "checkpoints"
    for name in ("2.damaged", "3", "4.passed", "5.removed"):
        shutil.copytree(steps / "2", steps / name)
    for name in (
        "10.orbax-checkpoint-tmp-1",
        "11.saving-0badcafe.orbax-checkpoint-tmp",
        "0004",
        "\uff14",
    ):
        shutil.copytree(steps / "1", steps / name)
    (steps / "3" / "metadata" / "metadata").unlink()
    for step in steps.iterdir():
        shutil.rmtree(step / "state")
    status, out, _ = said(capsys, "ls", run)
    rows = [re.split(r"  +", line) for line in out.splitlines()]
    assert status == 1 and rows[0] == ["step", "written", "size", "format", "state", "samples"]
    state = json.loads((steps / "2" / "metadata" / "metadata").read_text(encoding="utf-8"))[
        "digests"
    ]
    assert rows[2][3:6] == ["3", combined(state), "0000000000000002"]
    assert {row[0]: row[-1] for row in rows[1:-1]} == {
        "1": "complete by its description",
        "2": "complete by its description; a run tries it first",
        "2.damaged": "set aside: could not be verified",
        "3": "damaged: metadata/metadata is missing: the save, or a copy of it, is not complete",
        "4.passed": "set aside: the run rolled back to an earlier step",
        "5.removed": "being removed",
        "10.orbax-checkpoint-tmp-1": "incomplete: the remains of a save of an earlier version",
        "11.saving-0badcafe.orbax-checkpoint-tmp": "incomplete: a save in progress, or the remains of one",
        "0004": "not the name of a step: a run leaves it alone",
        "\uff14": "not the name of a step: a run leaves it alone",
    }
    shutil.rmtree(steps / "3")
    assert said(capsys, "ls", run)[0] == 0, "what is not a step is not damaged"


def test_what_a_run_removes_meanwhile_is_no_error(tmp_path: Path) -> None:
    gone = CheckpointEntry(tmp_path / "4")
    assert (gone.nbytes, gone.written, gone.described, gone.complete) == (
        0,
        0.0,
        ("-", "-", "-"),
        False,
    )


def test_diff(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = said(capsys, "diff", run / "checkpoints" / "1", run)
    assert (status, out.splitlines()) == (
        1,
        [
            "data  position: 1 -> 2",
            "data  samples: 0000000000000001 -> 0000000000000002",
            f"{CHANGED}  max |a - b| 2, 2 of 512 elements",
            "1 array differs",
        ],
    )


def test_diff_of_the_same_bits_reads_none_of_them(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Saved by another run on another mesh; the difference in `output` is printed, but does not
    count."""
    other = saved(tmp_path / "other", fixture.CONFIG, (1,), fsdp=2)
    capsys.readouterr()
    for step in (other / "checkpoints" / "1", run / "checkpoints" / "1"):
        shutil.rmtree(step / "state")
    status, out, _ = said(capsys, "diff", run / "checkpoints" / "1", other)
    assert (
        status == 0
        and out.startswith("config  output: ")
        and "\nall arrays have the same bits: state " in out
    )


def test_diff_of_other_parts_other_shapes_and_no_digests(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = dataclasses.replace(fixture.CONFIG.model, d_ff=16, tied=False)
    other = saved(
        tmp_path / "other", dataclasses.replace(fixture.CONFIG, model=model), (1, 2), fsdp=2
    )
    capsys.readouterr()
    status, out, _ = said(capsys, "diff", run / "checkpoints" / "1", other)
    lines = out.splitlines()
    assert status == 1 and "config  model.d_ff: 0 -> 16" in lines
    assert "params/blocks.mlp.up.weight  [2, 8, 32, 'float32'] -> [2, 8, 16, 'float32']" in lines
    assert f"params/head  only in {other}/checkpoints/2" in lines
    assert f"{CHANGED}  max |a - b| 2, 2 of 512 elements" in lines
    status, out, _ = said(capsys, "diff", run / "checkpoints" / "1", fixture.OUTPUT)
    changed = {line.split()[0] for line in out.splitlines() if "|" in line or "only in" in line}
    assert status == 1 and changed == {"recent"}, (
        "the fixture holds the same pattern, and no leaf `recent`"
    )
    assert said(capsys, "diff", fixture.OUTPUT, fixture.OUTPUT)[0] == 0
    assert (
        f"{CHANGED}  max |a - b| 2, 2 of 512 elements"
        in said(capsys, "diff", fixture.OUTPUT, run)[1]
    )


def test_diff_of_a_damaged_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part(run / "checkpoints" / "2")
    status, _, err = said(capsys, "diff", run / "checkpoints" / "1", run)
    assert status == 1 and re.match(
        rf"error: {run}/checkpoints/2 is damaged\n  - {CHANGED}: cannot be read: ", err
    )


def test_mistakes_are_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    for argv, message in (
        (["verify", tmp_path / "none"], "none: no such directory"),
        (["ls", tmp_path / "gpt2"], "gpt2 is a Hugging Face model, not a run"),
        (["diff", run, tmp_path / "empty"], "no checkpoint in .*/empty/checkpoints"),
        (["ls", tmp_path], "holds no checkpoints; name a run's output"),
        (["verify", run, "--step=9"], "--step=9: there is no such checkpoint; there are 1, 2"),
        (["list", run], "needs one of its commands: ls, verify, diff, not list"),
        ([], "needs one of its commands: ls, verify, diff, not nothing"),
    ):
        status, out, err = said(capsys, *argv)
        assert (
            (status, out, err.count("\n")) == (2, "", 1)
            and err.startswith("error: ")
            and re.search(re.escape(message).replace(r"\.\*", ".*"), err)
        ), err
