"""Checkpoints do not depend on flat optimizer vectors: any run reads them bit for bit, older
formats too."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fixtures import make_checkpoint as fixture
from flat_layout import on_disk
from processes import PATIENCE, ROOT, environment
from support import shard_on

from mesh_lm.checkpoint import Checkpoints, find
from mesh_lm.commands.checkpoint import main
from mesh_lm.config import CheckpointConfig, OptimizerConfig, TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.network.wire import free_port
from mesh_lm.optim import Optimizer, make_rule
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import COUNTERS, MASTER, State, abstract_state
from mesh_lm.state.disk_form import without_used
from mesh_lm.state.initial import init_state
from mesh_lm.training.replicas import differing
from sharding_rules import preset

COMPILE_BUDGET = 250
HALF = dataclasses.replace(fixture.CONFIG.model, dtype="bfloat16")
"""A config whose layers use a copy of the weights in another dtype."""

PLACES: dict[str, tuple[str, dict[str, int]]] = {
    "one device": ("ddp", {}),
    "three replicas": ("distributed", {"data": 3}),
    "zero2": ("zero2+megatron", {"data": 4, "tensor": 2}),
    "tensor": ("distributed+megatron", {"data": 2, "tensor": 2}),
    "three that gather": ("zero3", {"data": 3}),
}


def layout_at(place: str) -> ModelLayout:
    rules, mesh = PLACES[place]
    return ModelLayout.of(HALF, shard_on(rules, **mesh))


def config_at(output: Path, **changes: Any) -> TrainConfig:
    return dataclasses.replace(fixture.CONFIG, model=HALF, output=str(output), **changes)


def restored(output: Path, layout: ModelLayout, **changes: Any) -> State:
    with Checkpoints(config_at(output, **changes)) as checkpoints:
        _, state = checkpoints.restore(layout, fixture.OPTIMIZER)
    assert state is not None
    return state


def bits(state: State) -> dict[str, bytes]:
    return {
        jax.tree_util.keystr(path): np.asarray(x).tobytes()
        for path, x in jax.tree_util.tree_flatten_with_path(state)[0]
    }


def patterned(name: str, like: np.ndarray, form: int) -> np.ndarray:
    """Returns the fixture's values of a leaf on disk."""
    part, slash, leaf = name.partition("/")
    if name == "recent" and form == 1:
        return np.zeros_like(like)
    return fixture.pattern(
        f"['{part}']['{leaf}']" if slash else f"['{name}']", like.shape, like.dtype
    )


@pytest.mark.parametrize("form", fixture.FORMATS)
@pytest.mark.parametrize(
    "place",
    [pytest.param(place, marks=pytest.mark.slow if place == "zero2" else ()) for place in PLACES],
)
def test_older_formats_resume(place: str, form: int, tmp_path: Path) -> None:
    """Restores weights, moments and counters, flat or not, and the layers' copy of the weights."""
    shutil.copytree(fixture.FORMATS[form], tmp_path / "run")
    layout = layout_at(place)
    state = restored(tmp_path / "run", layout)
    assert bool(MASTER in state) == place.startswith(("three", "tensor"))
    found = on_disk(layout, state)
    assert {name.partition("/")[0] for name in found} == {"params", "mu", "nu", *COUNTERS} and len(
        found
    ) == 51
    for name, x in found.items():
        assert x.tobytes() == patterned(name, x, form).tobytes(), name
    described = abstract_state(layout, fixture.OPTIMIZER)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(described), strict=True):
        assert (leaf.shape, leaf.dtype) == (
            like.shape,
            like.dtype,
        ) and leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    for name in layout.flat.names - layout.flat.gathered_names:
        kept = np.asarray(found[f"params/{name}"])
        assert (
            np.asarray(state["params"][name]).tobytes()
            == kept.astype(layout.flat.compute_dtypes[name]).tobytes()
        ), name


@pytest.mark.parametrize(
    ("form", "said"),
    [
        (1, "307: no digests (format 1); its arrays can be read; 50 arrays"),
        (2, "307: whole; 51 arrays"),
    ],
)
def test_older_formats_are_verified(
    form: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(fixture.FORMATS[form])]) == 0
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.slow
def test_a_state_goes_from_place_to_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each run saves what the previous one saved: names, shapes, dtypes and digests, from format 2
    on."""
    shutil.copytree(fixture.FORMATS[2], tmp_path / "0")
    before = find(tmp_path / "0")
    assert before is not None and before.digests
    for number, place in enumerate(PLACES):
        layout = layout_at(place)
        state = restored(tmp_path / str(number), layout)
        held = bits(state)
        with Checkpoints(config_at(tmp_path / str(number + 1))) as checkpoints:
            state = checkpoints.save(fixture.STEP, state, fixture.DATA, layout, fixture.OPTIMIZER)
            assert bits(state) == held, "a save gives the state back"
        after = find(tmp_path / str(number + 1))
        assert (
            after is not None and after.digests == before.digests and after.metadata["format"] == 3
        )
        assert after.metadata["parts"] == dict.fromkeys(
            ("params", "mu", "nu"), before.metadata["parameters"]
        )
        assert main(["verify", str(tmp_path / str(number + 1))]) == 0
        assert main(["diff", str(tmp_path / "0"), str(tmp_path / str(number + 1))]) == 0, (
            capsys.readouterr().out
        )


# The local tier.


def test_vectors_of_other_matrices_are_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two layouts of the same shapes: one shards heads and MLP over tensor, the other embed.
    Digests alone would not reveal it."""
    model = dataclasses.replace(HALF, positions="rotary", norm="rmsnorm", biases=False)
    whole = preset("distributed+megatron")
    rules = {
        name: whole.replace(params=rows, optimizer=rows)
        for name, rows in (("wide", {}), ("long", BY_EMBED))
    }
    wide, long = (
        ModelLayout.of(model, shard_on(each, data=2, tensor=2)) for each in rules.values()
    )

    def shapes(layout: ModelLayout) -> list[Any]:
        kept = without_used(layout, abstract_state(layout, fixture.OPTIMIZER))
        return sorted((x.shape, str(x.sharding.spec)) for x in jax.tree.leaves(kept))

    assert shapes(wide) == shapes(long)
    policy = CheckpointConfig(every=10, local=str(tmp_path / "disk"), local_every=2)
    config = dataclasses.replace(
        fixture.CONFIG, model=model, output=str(tmp_path / "run"), checkpoint=policy
    )
    with Checkpoints(config) as checkpoints:
        checkpoints.save(
            2, init_state(wide, fixture.OPTIMIZER, seed=0), {"position": 2}, wide, fixture.OPTIMIZER
        )
    with Checkpoints(config) as checkpoints:
        assert checkpoints.restore(long, fixture.OPTIMIZER) == (None, None)
    assert (
        "step 2 on process 0: it was saved by a run with different flat vectors\n"
        in capsys.readouterr().out
    )


BY_EMBED = {"embed": "tensor", "heads": None, "kv_heads": None, "mlp": None, "vocab": None}


# Copies.


def test_the_layers_copies_are_compared() -> None:
    """Each of four devices holds the layers' weights, in pairs of replicas; shards of a vector are
    on one device each."""
    layout = layout_at("tensor")
    state = init_state(layout, fixture.OPTIMIZER, seed=0)
    assert differing(state) == []
    name = "blocks.mlp.up.weight"
    x, (row, column) = state["params"][name], (1, 3)
    blocks = [np.array(shard.data) for shard in x.addressable_shards]
    blocks[2].view(np.uint16)[0, row, column] ^= 1
    arrays = [
        jax.device_put(block, shard.device)
        for block, shard in zip(blocks, x.addressable_shards, strict=True)
    ]
    state["params"][name] = jax.make_array_from_single_device_arrays(x.shape, x.sharding, arrays)
    (line,) = differing(state)
    assert re.fullmatch(
        (
            rf"params/{name}: device \d .*, device \d .* hold different bits, and no majority "
            r"shows "
            r"which are right"
        ),
        line,
    )


# What is refused.

MODEL, OTHER = "is a checkpoint of another model", "is a checkpoint of another optimizer"


@pytest.mark.parametrize("place", ["three replicas", "one device"])
@pytest.mark.parametrize(
    ("changes", "optimizer", "said"),
    [
        (
            {"d_ff": 16},
            "adamw",
            (
                f"{MODEL}\n  - blocks.mlp.down.weight: [2, 8, 32, 'float32'] in the checkpoint, "
                "[2, 8, 16, 'float32'] in"
            ),
        ),
        (
            {"norm": "rmsnorm"},
            "adamw",
            (
                f"{MODEL}\n  - blocks.attention_norm.bias: [2, 8, 'float32'] in the checkpoint, "
                "absent in this"
            ),
        ),
        (
            {},
            "lion",
            (
                f"{OTHER}: adamw, which keeps mu, nu; this config's keeps mu\nset "
                "optimizer.rule=adamw, or use a new output directory with"
            ),
        ),
    ],
)
def test_another_state_is_refused(
    place: str, changes: dict[str, Any], optimizer: str, said: str, tmp_path: Path
) -> None:
    """One error before any array is read, flat or not; nothing is renamed or written."""
    shutil.copytree(fixture.FORMATS[2], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "307" / "state" / "d")  # the arrays
    before = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*"))
    rules, mesh = PLACES[place]
    model = dataclasses.replace(HALF, **changes)
    config = dataclasses.replace(
        config_at(tmp_path / "run", optimizer=OptimizerConfig(make_rule(optimizer))), model=model
    )
    with Checkpoints(config) as checkpoints, pytest.raises(ConfigError) as caught:
        checkpoints.restore(
            ModelLayout.of(model, shard_on(rules, **mesh)), Optimizer(config.optimizer, 9)
        )
    assert str(caught.value).startswith(f"{tmp_path}/run/checkpoints/307 {said}")
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == before


# Two processes.


@pytest.mark.slow
def test_each_process_writes_its_own(tmp_path: Path) -> None:
    """Two processes hold half of each array, flat vectors too; both restore their bits, and so does
    one process on another mesh."""
    port = str(free_port())
    command = [sys.executable, str(Path(__file__).with_name("two_savers.py"))]
    logs = [tmp_path / f"{n}.log" for n in range(2)]
    pair = []
    for n, log in enumerate(logs):
        streams: dict[str, Any] = {
            "text": True,
            "stdout": log.open("w", encoding="utf-8"),
            "stderr": subprocess.STDOUT,
        }
        environ = environment(PYTHONPATH=f"{ROOT}:{ROOT}/tests")
        pair.append(
            subprocess.Popen(
                [*command, str(n), port, str(tmp_path / "run")], env=environ, **streams
            )
        )
    for process in pair:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
        process.kill()
    said = [log.read_text(encoding="utf-8") for log in logs]
    found = [
        json.loads(line.removeprefix("RESULT "))
        for text in said
        for line in text.splitlines()
        if line.startswith("RESULT ")
    ]
    assert len(found) == 2 and all(each["same"] for each in found), "\n".join(said)
    assert found[0]["digests"] == found[1]["digests"]
    for each in found:
        assert 0.4 < each["mine"] / (found[0]["mine"] + found[1]["mine"]) < 0.6, found
    state = tmp_path / "run" / "checkpoints" / "1" / "state"
    written = [
        sum(f.stat().st_size for f in (state / f"ocdbt.process_{n}").rglob("*") if f.is_file())
        for n in range(2)
    ]
    assert 0.3 < written[0] / sum(written) < 0.7, written
    saved = find(tmp_path / "run")
    assert saved is not None and saved.digests == found[0]["digests"]
    alone = ModelLayout.of(
        dataclasses.replace(HALF, **found[0]["model"]), shard_on("distributed", data=3)
    )
    assert MASTER in saved.resumed(alone, fixture.OPTIMIZER), (
        "verified by the digests that both processes computed"
    )
