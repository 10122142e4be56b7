"""Buffers: updated from a step's sums, equal on any mesh, saved in checkpoints, and unchanged by a
skipped step."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path

import experts_toy
import jax
import numpy as np
import pytest
from balanced_toy import MODEL, RATE, BalancedConfig
from experts_toy import EXPERTS, rules
from flat_layout import on_disk
from support import host_batch, on_devices, shard_on

from mesh_lm.checkpoint import Checkpoints, find
from mesh_lm.config import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    PipelineConfig,
    TrainConfig,
)
from mesh_lm.errors import ConfigError
from mesh_lm.inference.trained import weights
from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, abstract_state
from mesh_lm.state.initial import init_state
from mesh_lm.training.step import Step, train_step

COMPILE_BUDGET = 330

PLACES: dict[str, tuple[str, dict[str, int], PipelineConfig]] = {
    "one device": ("ddp", {}, PipelineConfig()),
    "stages": ("ddp", {"pipeline": 2, "data": 2}, PipelineConfig(layers=(4, 2))),
    "residuals": (
        "zero2",
        {"pipeline": 2, "data": 2},
        PipelineConfig(layers=(3, 3), stash="residuals"),
    ),
    "tensor": ("megatron_sp", {"tensor": 2}, PipelineConfig()),
    "flat stages": (
        "distributed",
        {"pipeline": 2, "data": 2},
        PipelineConfig(chunks=2, layers=(1, 2, 2, 1)),
    ),
    "flat": ("distributed+megatron", {"data": 3, "tensor": 2}, PipelineConfig()),
}
OPTIMIZER = Optimizer(OptimizerConfig(learning_rate=1e-2, warmup_steps=0), 10)


@functools.cache
def layout_at(place: str) -> ModelLayout:
    strategy, mesh, pipeline = PLACES[place]
    return ModelLayout.of(MODEL, shard_on(rules(strategy), **mesh), pipeline)


@functools.cache
def step_at(place: str) -> Step:
    return train_step(layout_at(place), OPTIMIZER, seed=0)


def batch_at(place: str, number: int) -> dict[str, jax.Array]:
    """Returns 12 sequences in two microbatches, which both two and three replicas divide."""
    parts, whole = 2, host_batch(1, seed=number)
    cut = {
        name: x[0, :12].reshape(parts, -1, *x.shape[2:])
        for name, x in whole.items()
        if name != "indices"
    }
    return on_devices(
        cut | {"indices": np.broadcast_to(whole["indices"], (parts, *whole["indices"].shape[1:]))},
        layout_at(place),
    )


def trained(state: State, place: str, *numbers: int) -> tuple[State, list[float]]:
    losses = []
    for number in numbers:
        state, metrics = step_at(place)(state, batch_at(place, number))
        losses.append(float(metrics["loss"]))
    return state, losses


def canonical(state: State, place: str) -> dict[str, np.ndarray]:
    return on_disk(layout_at(place), state)


def config_at(output: Path, place: str, **changes: object) -> TrainConfig:
    strategy, _, pipeline = PLACES[place]
    return dataclasses.replace(
        TrainConfig(model=MODEL, output=str(output), rules=rules(strategy), pipeline=pipeline),
        **changes,
    )


@functools.cache
def alone() -> tuple[dict[str, np.ndarray], list[float]]:
    """Returns the state after two steps on one device, and the losses of four steps; the last one
    repeats the first batch."""
    state, losses = trained(
        init_state(layout_at("one device"), OPTIMIZER, seed=0), "one device", 0, 1
    )
    held = canonical(state, "one device")
    return held, losses + trained(state, "one device", 2, 0)[1]


@pytest.mark.slow
def test_a_bias_follows_the_loads() -> None:
    """The bias follows its formula from the loads in a step's sums; it has no gradient and no
    optimizer slots."""
    layout, (held, losses) = layout_at("one device"), alone()
    assert layout.buffers == {"moe.bias", "seen"}
    state = abstract_state(layout, OPTIMIZER)
    assert state["buffers"].keys() == layout.buffers and not layout.buffers & (
        state["params"].keys() | state["mu"].keys()
    )
    bias = held["buffers/moe.bias"]
    assert (
        bias.shape == (4, EXPERTS)
        and set(np.unique(np.round(bias / RATE))) <= {-2, -1, 0, 1, 2}
        and np.unique(bias).size > 2
    )
    labels = sum(host_batch(1, seed=number)["weights"][0, :12].sum() for number in (0, 1))
    np.testing.assert_array_equal(held["buffers/seen"], np.full(2, labels))
    assert losses[3] < losses[0] - 0.01


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("tensor", marks=pytest.mark.slow),
        *(
            pytest.param(place, marks=pytest.mark.exhaustive)
            for place in ("stages", "residuals", "flat", "flat stages")
        ),
    ],
)
def test_buffers_are_one_devices_on_any_mesh(place: str) -> None:
    """Loads are integers and the bias uses their signs, so bits are equal; padded rows of stages
    are ignored."""
    held, losses = alone()
    state, found = trained(init_state(layout_at(place), OPTIMIZER, seed=0), place, 0, 1)
    np.testing.assert_allclose(found, losses[:2], rtol=2e-6)
    mine = canonical(state, place)
    for name in ("buffers/moe.bias", "buffers/seen"):
        assert mine[name].tobytes() == held[name].tobytes(), name
    padding = layout_at(place).stacks["moe"].layer_of_row() < 0
    assert not np.asarray(state["buffers"]["moe.bias"])[padding].any()


@pytest.mark.parametrize(
    ("place", "to"),
    [
        pytest.param("stages", "tensor", marks=pytest.mark.exhaustive),
        pytest.param("stages", "flat stages", marks=pytest.mark.exhaustive),
        pytest.param("flat stages", "one device", marks=pytest.mark.exhaustive),
        pytest.param("flat stages", "flat", marks=pytest.mark.slow),
    ],
)
def test_buffers_resume_bit_for_bit(place: str, to: str, tmp_path: Path) -> None:
    """Restored onto another mesh and sharded, the run continues as on one device."""
    state, _ = trained(init_state(layout_at(place), OPTIMIZER, seed=0), place, 0, 1)
    wanted = canonical(state, place)
    with Checkpoints(config_at(tmp_path, place)) as checkpoints:
        state = checkpoints.save(2, state, {"position": 24}, layout_at(place), OPTIMIZER)
        assert same(canonical(state, place), wanted)
    with Checkpoints(config_at(tmp_path, to)) as checkpoints:
        saved, state = checkpoints.restore(layout_at(to), OPTIMIZER)
    assert (
        saved is not None
        and state is not None
        and saved.metadata["parts"]["buffers"]
        == {
            "moe.bias": [4, EXPERTS, "float32"],
            "seen": [2, "float32"],
        }
    )
    described = abstract_state(layout_at(to), OPTIMIZER)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(described), strict=True):
        assert (leaf.shape, leaf.dtype) == (
            like.shape,
            like.dtype,
        ) and leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    assert same(canonical(state, to), wanted)
    np.testing.assert_allclose(trained(state, to, 2, 0)[1], alone()[1][2:], rtol=1e-5)
    found = weights(tmp_path, layout_at(to))()
    assert all(
        np.asarray(found[name]).tobytes() == wanted[f"buffers/{name}"].tobytes()
        for name in ("moe.bias", "seen")
    )


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].tobytes() == other[name].tobytes() for name in one
    )


@pytest.mark.slow
@pytest.mark.parametrize("place", ["tensor", "flat stages"])
def test_local_checkpoints_keep_buffers(place: str, tmp_path: Path) -> None:
    policy = CheckpointConfig(every=10, local=str(tmp_path / "disk"), local_every=2)
    config = config_at(tmp_path / "run", place, checkpoint=policy)
    state, _ = trained(init_state(layout_at(place), OPTIMIZER, seed=0), place, 0, 1)
    wanted = {
        jax.tree_util.keystr(path): np.asarray(x)
        for path, x in jax.tree_util.tree_flatten_with_path(state)[0]
    }
    with Checkpoints(config) as checkpoints:
        assert checkpoints.due(2)
        checkpoints.save(2, state, {"position": 24}, layout_at(place), OPTIMIZER)
    with Checkpoints(config) as checkpoints:
        saved, state = checkpoints.restore(layout_at(place), OPTIMIZER)
    assert saved is not None and saved.directory.name != "checkpoints"
    assert same(
        {
            jax.tree_util.keystr(path): np.asarray(x)
            for path, x in jax.tree_util.tree_flatten_with_path(state)[0]
        },
        wanted,
    )


@pytest.mark.parametrize("place", ["tensor", pytest.param("flat stages", marks=pytest.mark.slow)])
def test_a_skipped_step_leaves_buffers_alone(place: str) -> None:
    state, _ = trained(init_state(layout_at(place), OPTIMIZER, seed=0), place, 0)
    before, batch = canonical(state, place), batch_at(place, 1)
    state, metrics = step_at(place)(
        state, batch | {"weights": batch["weights"] * np.float32(np.nan)}
    )
    after = canonical(state, place)
    assert metrics["skipped"] == 1 and {
        name for name in after if after[name].tobytes() != before[name].tobytes()
    } == {"step", "skipped"}


# What is refused.


def test_a_model_that_does_not_say_how_its_buffers_change() -> None:
    class Silent(BalancedConfig):
        updated = ModelConfig.updated

    config = Silent(
        **{field.name: getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)}
    )
    message = (
        "Silent.updated is missing: it makes the next values of the model's buffers moe.bias, seen "
        "(mesh_lm.config.ModelConfig)"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        train_step(ModelLayout.of(config, shard_on(rules("ddp"))), OPTIMIZER, seed=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda buffers: {"seen": buffers["seen"]},
            "Odd.updated returns no 'moe.bias', which is a buffer of the model",
        ),
        (
            lambda buffers: buffers | {"bias": buffers["seen"]},
            "Odd.updated returns 'bias', which is not a buffer of the model",
        ),
        (
            lambda buffers: buffers | {"seen": buffers["seen"].sum()},
            "Odd.updated returns 'seen' as float32 (), but the model has it as float32 (2,)",
        ),
        (
            lambda buffers: buffers | {"seen": buffers["seen"].astype("bfloat16")},
            "Odd.updated returns 'seen' as bfloat16 (2,), but the model has it as float32 (2,)",
        ),
    ],
    ids=["one less", "one more", "another shape", "another dtype"],
)
def test_an_update_that_returns_other_buffers(change, message: str) -> None:
    class Odd(BalancedConfig):
        def updated(self, buffers, sums):
            return change(buffers)

    config = Odd(**{field.name: getattr(MODEL, field.name) for field in dataclasses.fields(MODEL)})
    layout = ModelLayout.of(config, shard_on(rules("ddp")))
    step = train_step(layout, OPTIMIZER, seed=0)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        jax.eval_shape(step, abstract_state(layout, OPTIMIZER), host_batch(2))


def test_a_checkpoint_with_another_buffer_is_another_model(tmp_path: Path) -> None:
    """One clear error; no checkpoint is renamed."""
    place = "one device"
    with Checkpoints(config_at(tmp_path, place)) as checkpoints:
        checkpoints.save(
            1,
            init_state(layout_at(place), OPTIMIZER, seed=0),
            {"position": 12},
            layout_at(place),
            OPTIMIZER,
        )
    plain, layout = experts_toy.MODEL, ModelLayout.of(experts_toy.MODEL, shard_on(rules("ddp")))
    before = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    with (
        Checkpoints(config_at(tmp_path, place, model=plain)) as checkpoints,
        pytest.raises(ConfigError) as caught,
    ):
        checkpoints.restore(layout, OPTIMIZER)
    assert str(caught.value) == (
        f"{tmp_path}/checkpoints/1 is a checkpoint of another model\n"
        "  - moe.bias: [4, 4, 'float32'] in the checkpoint, absent in this config\n"
        "  - seen: [2, 'float32'] in the checkpoint, absent in this config\n"
        "use the config of that model, or a new output directory"
    )
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == before == ["1"]
    saved = find(tmp_path)
    assert saved is not None
    with pytest.raises(ConfigError, match="is a checkpoint of another model"):
        saved.params(layout)
