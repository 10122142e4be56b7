"""Checkpoints are independent of the pipeline: every division into stages restores what another
saved, bit for bit."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from support import GPT, host_batch, on_devices, shard_on

from mesh_lm.checkpoint import Checkpoints, SavedCheckpoint, find
from mesh_lm.checkpoint.reader import DamagedCheckpoint
from mesh_lm.commands import checkpoint as checkpoint_command
from mesh_lm.config import OptimizerConfig, PipelineConfig, TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.inference.trained import weights
from mesh_lm.optim import Adafactor, AdamW8, Optimizer, Rule, make_rule
from mesh_lm.parallel import relayout
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, abstract_state
from mesh_lm.state.disk_form import to_disk
from mesh_lm.state.initial import fresh_state, init_state
from mesh_lm.training.step import Step, train_step

COMPILE_BUDGET = 160

MODEL = dataclasses.replace(GPT, n_layers=8, biases=False, norm="rmsnorm")
OPTIMIZER = Optimizer(OptimizerConfig(warmup_steps=0), 10)
MICROBATCHES, STEPS = 4, 2
Runs = Callable[[str], tuple[Path, dict[str, np.ndarray], list[float]]]

PLACES: dict[str, tuple[str, dict[str, int], PipelineConfig]] = {
    "interleaved": ("fsdp", {"pipeline": 4, "fsdp": 2}, PipelineConfig(chunks=2)),
    "uneven": (
        "megatron+zero1",
        {"pipeline": 2, "data": 2, "tensor": 2},
        PipelineConfig(layers=(3, 5)),
    ),
    "one stage": ("hsdp+megatron", {"data": 2, "fsdp": 2, "tensor": 2}, PipelineConfig()),
}


@functools.cache
def layout_at(place: str) -> ModelLayout:
    rules, mesh, pipeline = PLACES[place]
    return ModelLayout.of(MODEL, shard_on(rules, **mesh), pipeline)


def config_at(output: Path, place: str) -> TrainConfig:
    return TrainConfig(
        model=MODEL,
        output=str(output),
        rules=layout_at(place).shard.rules,
        pipeline=PLACES[place][2],
    )


def in_model_order(state: State, layout: ModelLayout) -> dict[str, np.ndarray]:
    """Every leaf on the host in model order, without the code under test. Padding rows must be
    0."""
    stages, out = layout.stacks["blocks"], {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
        x, name = np.array(leaf), path[-1].key
        if name in layout.stacked:
            assert not x[stages.layer_of_row() < 0].any()
            x = x[stages.row_of_layer()]
        out[jax.tree_util.keystr(path)] = x
    return out


@functools.cache
def step_at(place: str) -> Step:
    return train_step(layout_at(place), OPTIMIZER, seed=0)


def trained(state: State, place: str, first: int, steps: int) -> tuple[State, list[float]]:
    losses = []
    for n in range(first, first + steps):
        state, metrics = step_at(place)(
            state, on_devices(host_batch(MICROBATCHES, seed=n), layout_at(place))
        )
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """For a layout: the output of a run with a checkpoint after one step, its state, and the losses
    of later steps."""

    @functools.cache
    def run(place: str) -> tuple[Path, dict[str, np.ndarray], list[float]]:
        layout, output = layout_at(place), tmp_path_factory.mktemp(place)
        state, _ = trained(init_state(layout, OPTIMIZER, seed=0), place, 0, 1)
        before = in_model_order(state, layout)
        with Checkpoints(config_at(output, place)) as checkpoints:
            state = checkpoints.save(1, state, {"position": 16}, layout, OPTIMIZER)
            after = in_model_order(state, layout)
            # The write continues while steps reuse the memory.
            state, losses = trained(state, place, 1, STEPS)
        assert before.keys() == after.keys() and all(
            before[name].tobytes() == after[name].tobytes() for name in before
        )
        return output, before, losses

    return run


def saved_in(output: Path) -> SavedCheckpoint:
    saved = find(output)
    assert saved is not None
    return saved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "to"), [(place, to) for place in ("interleaved", "uneven") for to in PLACES]
)
def test_a_run_goes_on_in_other_stages(runs: Runs, place: str, to: str) -> None:
    output, wanted, losses = runs(place)
    layout = layout_at(to)
    state = saved_in(output).resumed(layout, OPTIMIZER)
    described = abstract_state(layout, OPTIMIZER)
    for leaf, like in zip(jax.tree.leaves(state), jax.tree.leaves(described), strict=True):
        assert (leaf.shape, leaf.dtype) == (
            like.shape,
            like.dtype,
        ) and leaf.sharding.is_equivalent_to(like.sharding, leaf.ndim)
    found = in_model_order(state, layout)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if found[name].tobytes() != wanted[name].tobytes()] == []
    assert np.any(found["['mu']['blocks.mlp.up.weight']"]) and int(found["['step']"]) == 1
    assert trained(state, to, 1, STEPS)[1] == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize(
    ("rule", "slot"),
    [(Adafactor(), "v_row"), (AdamW8(block_size=16), "mu8")],
    ids=["adafactor", "adamw8"],
)
def test_what_any_optimizer_keeps_goes_with_its_layers(
    rule: Rule, slot: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adafactor's slots have only some dimensions of their parameters, and those of AdamW8 have
    levels of one byte beside the scales of their blocks."""
    optimizer, random = Optimizer(OptimizerConfig(rule), 10), np.random.default_rng(0)
    layout, other = layout_at("interleaved"), layout_at("one stage")
    described = abstract_state(layout, optimizer)
    state = jax.tree.map(
        lambda x: jax.device_put(
            np.abs(10 * random.normal(size=x.shape)).astype(x.dtype), x.sharding
        ),
        described,
    )
    wanted = in_model_order(state, layout)
    with Checkpoints(config_at(tmp_path, "interleaved")) as checkpoints:
        state = checkpoints.save(1, state, {"position": 16}, layout, optimizer)
    for place, found in ((layout, state), (other, saved_in(tmp_path).resumed(other, optimizer))):
        assert all(
            x.tobytes() == wanted[name].tobytes()
            for name, x in in_model_order(found, place).items()
        )
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(
        lambda x: x.sharding, described
    )
    assert {name for name in wanted if slot in name} >= {
        f"['{slot}']['blocks.mlp.up.weight']",
        f"['{slot}']['embedding']",
    }
    assert (
        checkpoint_command.main(["verify", str(tmp_path)]) == 0
        and "1: whole" in capsys.readouterr().out
    )


MUON = (
    "mu, nu\nnu/blocks.attention.out.weight: [8, 32, 4, 8, 'float32'] in the checkpoint, absent in "
    "this config"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keeps"),
    [
        ("lion", "mu"),
        ("muon", MUON),
        ("adafactor", "v_row, v_col, v"),
        ("adamw8", "mu, nu, mu8, mu_scale, root8, root_scale"),
    ],
)
def test_another_optimizer_is_refused(runs: Runs, name: str, keeps: str) -> None:
    """It is not treated as damage, which would set the checkpoint aside, and slots of the same name
    are not confused."""
    saved, layout = saved_in(runs("interleaved")[0]), layout_at("one stage")
    # Its default blocks are as long as the model is wide.
    rule = AdamW8(block_size=16) if name == "adamw8" else make_rule(name)
    with pytest.raises(ConfigError) as caught:
        saved.resumed(layout, Optimizer(OptimizerConfig(rule), 10))
    assert not isinstance(caught.value, DamagedCheckpoint) and str(caught.value) == (
        f"{saved.path} is a checkpoint of another optimizer: adamw, which keeps mu, nu; this "
        f"config's keeps {keeps}\n"
        f"set optimizer.rule=adamw, or use a new output directory with init_from={saved.path} to "
        "start from its weights"
    )


@pytest.mark.slow
def test_the_disk_holds_the_model(runs: Runs) -> None:
    """Compares shapes on disk, not those of padded stages: another division is still the same
    model."""
    saved, layout = saved_in(runs("interleaved")[0]), layout_at("one stage")
    assert saved.metadata["parts"]["params"] == {
        name: [*x.shape, str(x.dtype)] for name, x in layout.shapes.items()
    }
    assert layout_at("uneven").memory_shapes["blocks.mlp.up.weight"].shape[0] == 10
    assert any(
        change.startswith("pipeline.")
        for change in saved.changed(config_at(runs("interleaved")[0], "one stage"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("to", ["interleaved", pytest.param("uneven", marks=pytest.mark.slow)])
def test_a_run_begins_from_the_weights_of_another(runs: Runs, to: str) -> None:
    output, wanted, _ = runs("interleaved")
    layout = layout_at(to)
    state = fresh_state(layout, OPTIMIZER, weights(output, layout)())
    found = in_model_order({"params": state["params"]}, layout)
    assert [name for name in found if found[name].tobytes() != wanted[name].tobytes()] == []
    assert not any(x.any() for x in in_model_order({"mu": state["mu"]}, layout).values())


@pytest.mark.slow
def test_saving_takes_one_leaf_more(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_at("interleaved")
    state = saved_in(runs("interleaved")[0]).resumed(layout, OPTIMIZER)

    def live() -> int:
        return sum(x.nbytes for x in jax.live_arrays())

    before, held, converted = live(), [], relayout._converted

    def watched(leaf: jax.Array, program: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def measured(leaf: jax.Array) -> jax.Array:
            moved = program(leaf)
            held.append(live())
            return moved

        return converted(leaf, measured)

    monkeypatch.setattr(relayout, "_converted", watched)
    tree, _ = to_disk(layout, OPTIMIZER, state)
    assert len(held) == 3 * len(layout.stacked)
    assert max(held) == before + max(
        x.nbytes for name, x in tree["params"].items() if name in layout.stacked
    )
