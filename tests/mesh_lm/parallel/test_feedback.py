"""Steps whose gradients are summed in int8 with error feedback, or in two levels: against one
device, and across checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from support import (
    GPT,
    Outcome,
    assert_same_gradients,
    gradients,
    host_batch,
    on_devices,
    reference,
    shard_on,
)

from mesh_lm.checkpoint import Checkpoints
from mesh_lm.config import OptimizerConfig, PipelineConfig, TrainConfig
from mesh_lm.optim import Optimizer, is_matrix
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import FEEDBACK, State
from mesh_lm.state.initial import init_state
from mesh_lm.training.step import train_step

COMPILE_BUDGET = 120


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("by_node", {"data": 2, "extra": ("node=4",)}),
        pytest.param(
            "by_node+megatron",
            {"data": 2, "tensor": 2, "extra": ("node=2",)},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_two_levels_equal_one_device(rules: str, mesh: dict) -> None:
    _, sums, grads = gradients(GPT, shard_on(rules, **mesh), 2)
    assert sums == pytest.approx(reference(GPT)[1], rel=1e-6)
    assert_same_gradients(grads, reference(GPT)[2])


def relative(found: Outcome, wanted: Outcome, matrices: bool) -> list[float]:
    """Errors relative to the norms of gradients of matrices or of vectors."""
    axes = ModelLayout.of(GPT, shard_on("ddp")).axes
    names = [name for name in wanted[2] if is_matrix(name, axes[name]) is matrices]
    return [
        float(np.linalg.norm(found[2][n] - wanted[2][n]) / np.linalg.norm(wanted[2][n]))
        for n in names
    ]


@pytest.mark.parametrize(
    ("rules", "mesh", "pipeline"),
    [
        pytest.param(
            "hsdp+megatron",
            {"data": 2, "fsdp": 2, "tensor": 2},
            PipelineConfig(),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ddp", {"pipeline": 2, "data": 4}, PipelineConfig(), marks=pytest.mark.exhaustive
        ),
    ],
)
def test_int8_rounds_matrices_alone(rules: str, mesh: dict, pipeline: PipelineConfig) -> None:
    found = gradients(GPT, shard_on(f"{rules}+reduce_int8", **mesh), 2, pipeline=pipeline)
    rounded = relative(found, reference(GPT), True)
    assert all(2e-3 < error < 3e-2 for error in rounded), rounded
    top = max(np.abs(w).max() for w in reference(GPT)[2].values())
    axes = ModelLayout.of(GPT, shard_on("ddp")).axes
    for name, w in reference(GPT)[2].items():
        if not is_matrix(name, axes[name]):
            assert np.abs(found[2][name] - w).max() <= 1e-5 * max(np.abs(w).max(), 1e-3 * top), name


PLACES = {
    "staged": (
        "distributed+reduce_int8",
        {"pipeline": 2, "data": 2},
        PipelineConfig(layers=(1, 2)),
    ),
    "ddp": ("ddp+reduce_int8", {"data": 2}, PipelineConfig()),
    "four": ("ddp+reduce_int8", {"data": 4}, PipelineConfig()),
    "exact": ("ddp", {"data": 2}, PipelineConfig()),
}
SMALL = dataclasses.replace(GPT, n_layers=3)
OPTIMIZER = Optimizer(OptimizerConfig(warmup_steps=0), 9)


def layout_at(place: str) -> ModelLayout:
    rules, mesh, pipeline = PLACES[place]
    return ModelLayout.of(SMALL, shard_on(rules, **mesh), pipeline)


def bits(tree: State) -> dict[str, bytes]:
    return {
        jax.tree_util.keystr(path): np.asarray(x).tobytes()
        for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def checkpoints(output: Path) -> Checkpoints:
    return Checkpoints(TrainConfig(model=SMALL, output=str(output)))


def restored(output: Path, layout: ModelLayout) -> State:
    with checkpoints(output) as kept:
        _, state = kept.restore(layout, OPTIMIZER)
    assert state is not None
    return state


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("staged", marks=pytest.mark.exhaustive),
        pytest.param("ddp", marks=pytest.mark.slow),
    ],
)
def test_the_error_feedback_of_a_run(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A skipped step keeps it, a checkpoint has it bit for bit, and a run on other replicas starts
    from zero and says so."""
    layout = layout_at(place)
    state, step = init_state(layout, OPTIMIZER, seed=0), train_step(layout, OPTIMIZER, seed=0)
    assert state[FEEDBACK].keys() == {
        name for name, axes in layout.axes.items() if is_matrix(name, axes)
    }
    assert not any(np.asarray(x).any() for x in state[FEEDBACK].values())
    batches = [on_devices(host_batch(2, seed=seed), layout) for seed in range(3)]
    state, _ = step(state, batches[0])
    before = bits(state[FEEDBACK])
    assert all(np.asarray(x).any() for x in state[FEEDBACK].values())
    state, metrics = step(
        state, batches[1] | {"weights": batches[1]["weights"] * np.float32(np.nan)}
    )
    assert metrics["skipped"] == 1 and bits(state[FEEDBACK]) == before
    with checkpoints(tmp_path / "run") as kept:
        state = kept.save(2, state, {"position": 32}, layout, OPTIMIZER, last=True)
    again = restored(tmp_path / "run", layout)
    assert bits(again) == bits(state)
    state, again = step(state, batches[2])[0], step(again, batches[2])[0]
    assert bits(again) == bits(state) and bits(state[FEEDBACK]) != before
    capsys.readouterr()
    four = restored(tmp_path / "run", layout_at("four"))
    assert not any(np.asarray(x).any() for x in four[FEEDBACK].values())
    assert (
        "the error feedback of gradients in int8 starts from zero: the checkpoint has that of "
        "other replicas"
    ) in capsys.readouterr().out
    assert FEEDBACK not in restored(tmp_path / "run", layout_at("exact"))


@pytest.mark.slow
def test_a_run_may_begin_to_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = layout_at("exact")
    with checkpoints(tmp_path / "run") as kept:
        kept.save(
            2, init_state(layout, OPTIMIZER, seed=0), {"position": 32}, layout, OPTIMIZER, last=True
        )
    state = restored(tmp_path / "run", layout_at("ddp"))
    assert (
        FEEDBACK in state and "starts from zero: the checkpoint has none" in capsys.readouterr().out
    )
