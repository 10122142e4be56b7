"""The engine equals one device in loss and every gradient, for any schedule and mesh. A covering
array is fast; the product exhaustive."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pipeline_toy import SEQUENCE, ToyConfig
from support import (
    GPT,
    LLAMA,
    assert_same_gradients,
    by_stage,
    gradients,
    host_batch,
    on_devices,
    reference,
    shard_on,
)

from mesh_lm.config import ModelConfig, PipelineConfig
from mesh_lm.errors import ConfigError
from mesh_lm.parallel import engine
from mesh_lm.parallel import tick as ring
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.schedules.custom import write_csv
from mesh_lm.schedules.schedule import make_schedule as named
from sharding_rules import Rules

COMPILE_BUDGET = 260

_SMALL = {"n_layers": 8, "d_model": 16, "n_heads": 2}
MODELS: dict[str, ModelConfig] = {
    # Dropout, biases, embedding and head in one table.
    "tied": dataclasses.replace(GPT, **_SMALL),
    "untied": dataclasses.replace(LLAMA, **_SMALL, n_kv_heads=2, window=(), remat="none"),
    # Sequences sharded over a mesh axis, an auxiliary loss.
    "unrolled": dataclasses.replace(GPT, **_SMALL | {"n_layers": 4}, unroll=True),
    "toy": ToyConfig(),
}
AXES: dict[str, Rules | str] = {
    "data": "zero1",
    "fsdp": "fsdp",
    "tensor": "megatron_sp",
    "sequence": SEQUENCE,
    "data+fsdp": "hsdp",
    "data+tensor": "zero2+megatron_sp",
    "data+sequence": SEQUENCE,
    "fsdp+tensor": "fsdp+megatron",
    "data+fsdp+tensor": "hsdp+megatron_sp",
}
"""Mesh axes of two devices each, besides the pipeline, and the rules that shard over them."""

CASES = [
    ("1f1b", 4, 1, 8, "data", "tied", "input"),
    ("1f1b", 4, 2, 4, "tensor", "untied", "residuals"),
    ("1f1b", 2, 2, 8, "sequence", "toy", "input"),
    ("1f1b", 2, 1, 4, "data+fsdp", "unrolled", "residuals"),
    ("1f1b", 2, 2, 4, "fsdp", "tied", "input"),
    ("1f1b", 1, 1, 4, "data+fsdp+tensor", "unrolled", "input"),
    ("1f1b", 1, 1, 8, "sequence", "toy", "input"),
    ("gpipe", 4, 1, 4, "fsdp", "tied", "residuals"),
    ("gpipe", 2, 2, 8, "data+tensor", "untied", "input"),
    ("gpipe", 4, 2, 4, "sequence", "toy", "residuals"),
    ("classic_1f1b", 4, 1, 8, "tensor", "tied", "input"),
    ("classic_1f1b", 2, 1, 4, "data+sequence", "toy", "input"),
    ("classic_1f1b", 2, 1, 8, "fsdp+tensor", "untied", "residuals"),
]
"""Schedule, stages, chunks, microbatches, axes: any two values occur together in some row. Then
model and stash."""
FAST = [CASES[row] for row in (2, 6, 8, 9, 11)]
"""Each schedule, with one stage and several; the other rows take ten seconds each."""
FULL = [CASES[row] for row in (1, 4, 7, 10)]
"""Pairs of values that test_features.py has as well, in rows of its covering array."""

LEVELS = {
    "schedule": ("1f1b", "gpipe", "classic_1f1b"), "P": (1, 2, 4), "V": (1, 2), "M": (4, 8),
    "axis": ("data", "fsdp", "tensor", "sequence"),
}  # fmt: skip


def possible(schedule: str, P: int, V: int) -> bool:
    """Combinations that exist: one stage needs no schedule, and classic 1F1B has one chunk."""
    return (P > 1 or (schedule, V) == ("1f1b", 1)) and (V == 1 or schedule != "classic_1f1b")


def product() -> list[tuple[str, int, int, int, str, str, str]]:
    """The combinations that CASES lacks, with alternating models and stashes."""
    rows = [row for row in itertools.product(*LEVELS.values()) if possible(*row[:3])]
    models = {"sequence": ("toy", "toy")}
    found = [
        (*row, models.get(row[4], ("tied", "untied"))[n % 2], ("input", "residuals")[n // 2 % 2])
        for n, row in enumerate(rows)
    ]
    return [row for row in found if row not in CASES]


def test_every_pair_is_covered() -> None:
    covered = {
        pair
        for schedule, P, V, M, axes, *_ in CASES
        for axis in axes.split("+")
        for pair in itertools.combinations(zip(LEVELS, (schedule, P, V, M, axis), strict=True), 2)
    }
    wanted = {
        pair
        for row in itertools.product(*LEVELS.values())
        if possible(*row[:3])
        for pair in itertools.combinations(zip(LEVELS, row, strict=True), 2)
    }
    assert covered >= wanted and len(CASES) <= 24


@pytest.mark.parametrize(
    ("schedule", "P", "V", "M", "axes", "model", "stash"),
    [
        *(
            pytest.param(
                *row,
                marks=()
                if row in FAST
                else pytest.mark.exhaustive
                if row in FULL
                else pytest.mark.slow,
            )
            for row in CASES
        ),
        *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in product()),
    ],
)
def test_equals_one_device(
    schedule: str, P: int, V: int, M: int, axes: str, model: str, stash: str
) -> None:
    pipeline = PipelineConfig(schedule, V, stash=stash)  # pyright: ignore[reportArgumentType]
    assert_equal(
        MODELS[model], AXES[axes], {"pipeline": P, **dict.fromkeys(axes.split("+"), 2)}, M, pipeline
    )


@pytest.mark.slow
def test_unequal_stages_equal_one_device() -> None:
    """Window patterns of two layers, and separate documents."""
    model = dataclasses.replace(MODELS["untied"], n_layers=10, window=(4, 0), remat="save_names")
    pipeline = PipelineConfig(chunks=2, layers=(2, 4, 2, 2))
    assert_equal(model, "megatron", {"pipeline": 2, "tensor": 2}, 4, pipeline, separate=True)


@pytest.mark.slow
def test_unequal_stages_with_fsdp_and_dropout_equal_one_device() -> None:
    """FSDP shards the residual stream, with or without padding; dropout masks depend on the layer's
    number in the model."""
    assert_equal(
        MODELS["tied"],
        "fsdp+megatron_sp",
        {"pipeline": 2, "fsdp": 2, "tensor": 2},
        4,
        PipelineConfig(layers=(5, 3)),
    )


@pytest.mark.slow
@pytest.mark.parametrize("stash", ["input", "residuals"])
def test_idle_slots_cannot_poison_gradients(stash: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle slots read the stashes' scratch slots; here these are infinite from the start, and so is
    what is computed from them."""
    stash_of = ring.stash
    monkeypatch.setattr(
        ring, "stash", lambda slots, like: jax.tree.map(_infinite, stash_of(slots, like))
    )
    assert_equal(
        MODELS["untied"],
        "megatron_sp",
        {"pipeline": 2, "tensor": 2},
        4,
        PipelineConfig(chunks=2, stash=stash),
    )


def _infinite(x: jax.Array) -> jax.Array:
    return x + jnp.inf if jnp.issubdtype(x.dtype, jnp.floating) else x


def test_stages_that_permute_do_so_in_every_tick() -> None:
    """In a branch that idle stages do not take it would deadlock: XLA:CPU waits for all devices."""
    assert_equal(
        ToyConfig(permutes=True), SEQUENCE, {"pipeline": 4, "sequence": 2}, 4, PipelineConfig()
    )


def test_stages_that_permute_in_a_branch_are_refused() -> None:
    shard, pipeline = shard_on(SEQUENCE, pipeline=2, sequence=2), PipelineConfig(layers=(5, 3))
    layout = ModelLayout.of(ToyConfig(permutes=True), shard, pipeline)
    with pytest.raises(ConfigError, match="ToyConfig permutes arrays inside a conditional"):
        jax.eval_shape(
            engine.value_and_grad(layout), layout.memory_shapes, host_batch(4), jax.random.key(0)
        )


@pytest.mark.parametrize(
    ("model", "axes", "V"), [("untied", "data+tensor", 2), ("toy", "sequence", 1)]
)
def test_evaluation_equals_one_device(model: str, axes: str, V: int) -> None:
    def sums(shard, pipeline: PipelineConfig) -> dict[str, float]:
        layout = ModelLayout.of(MODELS[model], shard, pipeline)
        params = by_stage(layout, reference(MODELS[model])[0])
        found = jax.jit(engine.evaluate(layout))(params, on_devices(host_batch(4), layout))
        return {name: float(x) for name, x in found.items()}

    sharded = shard_on(AXES[axes], pipeline=2, **dict.fromkeys(axes.split("+"), 2))
    assert sums(sharded, PipelineConfig(chunks=V)) == pytest.approx(
        sums(shard_on("ddp"), PipelineConfig()), rel=1e-6
    )


def test_a_schedule_of_ones_own(tmp_path) -> None:
    file = str(tmp_path / "mine.csv")
    write_csv(named("gpipe", 2, 4), file)
    shard = shard_on("ddp", pipeline=2)
    tables = [
        engine.training_table(ModelLayout.of(MODELS["tied"], shard, PipelineConfig(schedule)), 4)
        for schedule in (file, "gpipe", "1f1b")
    ]
    mine, gpipe, other = (
        {name: column.tolist() for name, column in table.columns.items()} for table in tables
    )
    assert mine == gpipe != other


def assert_equal(
    model: ModelConfig,
    rules: Rules | str,
    mesh: dict[str, int],
    microbatches: int,
    pipeline: PipelineConfig,
    separate: bool = False,
) -> None:
    if mesh["pipeline"] == 1:
        pipeline = PipelineConfig()
    params, sums, grads = gradients(
        model, shard_on(rules, **mesh), microbatches, separate, pipeline
    )
    wanted_params, wanted_sums, wanted_grads = reference(model, separate)
    for name, value in wanted_params.items():
        np.testing.assert_array_equal(params[name], value, err_msg=f"initial bits of {name}")
    assert sums["weight"] == wanted_sums["weight"]
    assert sums == pytest.approx(wanted_sums, rel=1e-6)
    assert_same_gradients(grads, wanted_grads)
