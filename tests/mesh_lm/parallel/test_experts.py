"""A mixture of experts on any mesh: sums, loads, gradients and steps equal those of one device,
however tokens are routed and exchanged."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import covering
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import Row
from experts_model import EXPERTS, MODEL
from support import (
    Outcome,
    assert_same_gradients,
    gradients,
    host_batch,
    initial,
    on_devices,
    shard_on,
)

from mesh_lm.checkpoint import Checkpoints
from mesh_lm.config import OptimizerConfig, PipelineConfig, TrainConfig
from mesh_lm.errors import ConfigError
from mesh_lm.model import DecoderConfig, SegmentConfig, moe
from mesh_lm.optim import AdamW, Optimizer
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State
from mesh_lm.state.initial import fresh_state, init_state
from mesh_lm.training.step import train_step
from sharding_rules import Rules, preset

COMPILE_BUDGET = 450

MIXED = dataclasses.replace(
    MODEL,
    n_layers=3,
    segments=(SegmentConfig("dense", 1), SegmentConfig("moe", 2, "moe")),
    experts=dataclasses.replace(EXPERTS, score="softmax", groups=1, active_groups=1),
)
"""A dense layer before the ones with experts, and another router."""

PARTNERS: dict[str, tuple[str, dict[str, int]]] = {
    "alone": ("ddp", {}),
    "data": ("ddp", {"data": 2}),
    "fsdp": ("fsdp", {"fsdp": 2}),
    "tensor": ("megatron", {"tensor": 2}),
    "sp": ("megatron_sp", {"tensor": 2}),
    "pipeline": ("ddp", {"pipeline": 2}),
    "ring": ("ring", {"sequence": 2}),
    "ulysses": ("ulysses", {"sequence": 2}),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "ways": (2, 4, 8),
    "exchange": ("gather", "padded", "worst"),
    "partner": tuple(PARTNERS),
    "remat": ("none", "full", "save_attention", "save_names"),
    "halves": (False, True),
    "stash": ("input", "residuals"),
    "routing": ("learned", "zipf", "one"),
}
"""ways: devices that share the experts. worst: padded, with buffers for the worst routing."""


CONSTRAINTS = (
    (("ways", "partner"), lambda ways, partner: ways < 8 or partner == "alone"),
    (("partner", "stash"), lambda partner, stash: stash == "input" or partner == "pipeline"),
    # A device has 16 / (ways * replicas * microbatches) sequences, and halves need two.
    (("ways", "partner", "halves"), lambda ways, partner, halves: not halves or ways < 8),
    (
        ("partner", "halves", "ways"),
        lambda partner, halves, ways: not halves or ways == 2 or partner != "pipeline",
    ),
)
ROWS = covering.array(FACTORS, CONSTRAINTS)[0]
N_FAST = 5
N_CI = 13
"""The first rows cover the most pairs: so many are in the fast tier, and so many in CI. Pipelines,
whose programs take the longest to compile, are only in CI."""


def _marks(number: int, row: Row) -> list[Any]:
    if number < N_FAST and row["partner"] != "pipeline":
        return []
    return [pytest.mark.slow if number < N_CI else pytest.mark.exhaustive]


def skewed(params: dict[str, np.ndarray], routing: str) -> dict[str, np.ndarray]:
    """Parameters whose routers' biases send tokens to experts 0, 1, ... in proportion to about 1 /
    n^1.2 (zipf), or all to the same ones (one)."""
    if routing == "learned":
        return params
    name = next(name for name in params if name.endswith("experts.bias"))
    n_experts = params[name].shape[-1]
    if routing == "one":
        bias = -2.0 * np.arange(n_experts)
    else:
        bias = -0.12 * 1.2 * np.log(1 + np.arange(n_experts))
    return params | {name: np.broadcast_to(bias, params[name].shape).astype(np.float32)}


@functools.cache
def one_device(model: DecoderConfig, routing: str) -> Outcome:
    """The results on one device, of exchanges that have nothing to do there."""
    params = skewed(initial(ModelLayout.of(model, shard_on("ddp"))), routing)
    return gradients(model, shard_on("ddp"), params=params)


def assert_equal(found: Outcome, wanted: Outcome) -> None:
    """Asserts equal gradients and sums, and loads that are equal as integers."""
    assert_same_gradients(found[2], wanted[2])
    for name, value in wanted[1].items():
        if name.endswith("load"):
            np.testing.assert_array_equal(found[1][name], value)
        else:
            assert found[1][name] == pytest.approx(value, rel=1e-5), name


def _microbatches(row: Row) -> int:
    if row["partner"] != "pipeline":
        return 1
    return 2 if row["halves"] or row["ways"] == 4 else 4


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            marks=_marks(number, row),
            id="-".join(f"{value}" for value in row.values()),
        )
        for number, row in enumerate(ROWS)
    ],
)
def test_equals_one_device(row: Row) -> None:
    name, mesh = PARTNERS[row["partner"]]
    exchange = "gather" if row["exchange"] == "gather" else "padded"
    factor = 0.0 if row["exchange"] == "worst" else 1.25
    model = dataclasses.replace(
        MODEL,
        remat=row["remat"],
        batch_halves=row["halves"],
        experts=dataclasses.replace(EXPERTS, factor=factor),
    )
    wanted = one_device(MODEL, row["routing"])
    shard = shard_on(f"experts_{exchange}+{name}", expert=row["ways"], **mesh)
    pipeline = PipelineConfig(stash=row["stash"])
    found = gradients(model, shard, _microbatches(row), pipeline=pipeline, params=wanted[0])
    assert_equal(found, wanted)


def folded(base: str, experts: tuple[str, ...], **exchange: Any) -> Rules:
    """A preset with the experts on these mesh axes."""
    rows = {"experts": experts, "expert_mlp": None}
    rules = preset(base)
    columns = {
        kind: rows
        for kind in ("params", "activations", "gradients", "optimizer")
        if getattr(rules, kind) is not None
    }
    return rules.replace("folded", exchange=exchange, **columns)


@pytest.mark.parametrize(
    ("rules", "mesh", "microbatches", "routing"),
    [
        # Over the replicas, without an axis of their own.
        pytest.param(
            folded("ddp", ("data",), data="padded"),
            {"data": 4},
            2,
            "learned",
            marks=pytest.mark.exhaustive,
        ),
        # Tensor parallelism for attention, expert parallelism for experts.
        pytest.param(
            folded("experts_gather+megatron_sp", ("expert", "tensor"), tensor="gather"),
            {"data": 2, "expert": 2, "tensor": 2},
            1,
            "zipf",
            marks=pytest.mark.slow,
        ),
        # Two exchanges: a token is sent to a group of devices once, and gathered in the group.
        (
            folded("experts_padded+megatron_sp", ("expert", "tensor"), tensor="gather"),
            {"expert": 4, "tensor": 2},
            1,
            "zipf",
        ),
        # The other way round.
        pytest.param(
            folded("experts_gather+ring", ("expert", "sequence"), sequence="padded"),
            {"expert": 2, "sequence": 2},
            1,
            "one",
            marks=pytest.mark.exhaustive,
        ),
        # Experts over fsdp, too, whose other matrices it shards along embed.
        pytest.param(
            preset("experts_padded+fsdp").replace(
                "experts over fsdp",
                params={"experts": ("expert", "fsdp"), "blocks/embed": None},
                activations={"experts": ("expert", "fsdp")},
                exchange={"fsdp": "padded"},
            ),
            {"fsdp": 2, "expert": 2},
            1,
            "learned",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            preset("experts_padded+hsdp+megatron_sp"),
            {"pipeline": 2, "fsdp": 2, "expert": 2},
            4,
            "zipf",
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Rules) else None,
)
def test_experts_on_other_axes(
    rules: Rules, mesh: dict[str, int], microbatches: int, routing: str
) -> None:
    wanted = one_device(MODEL, routing)
    found = gradients(MODEL, shard_on(rules, **mesh), microbatches, params=wanted[0])
    assert_equal(found, wanted)


@pytest.mark.slow
def test_uneven_stages_with_a_dense_layer() -> None:
    """The first stage has the dense layer and one with experts."""
    wanted = one_device(MIXED, "learned")
    shard = shard_on("experts_padded", pipeline=2, expert=2, data=2)
    pipeline = PipelineConfig(layers=(2, 1))
    found = gradients(MIXED, shard, 4, pipeline=pipeline, params=wanted[0])
    assert_equal(found, wanted)


def ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: Any,
) -> jax.Array:
    """`jax.lax.ragged_all_to_all`, which XLA does not have for CPUs, by its definition."""
    sent = [
        jax.lax.all_gather(x, axis_name)
        for x in (operand, input_offsets, send_sizes, output_offsets)
    ]
    operands, inputs, sizes, outputs = sent
    me = jax.lax.axis_index(axis_name)
    place = jnp.arange(len(output))
    for sender in range(len(operands)):
        number = place - outputs[sender, me]
        is_sent = (number >= 0) & (number < sizes[sender, me])
        row = jnp.clip(inputs[sender, me] + number, 0, operands.shape[1] - 1)
        rows = operands[sender][row]
        output = jnp.where(is_sent.reshape(-1, *[1] * (rows.ndim - 1)), rows, output)
    return output


@pytest.mark.parametrize("routing", ["learned", pytest.param("one", marks=pytest.mark.slow)])
def test_a_ragged_exchange(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = shard_on(
        preset("experts_padded").replace("ragged", exchange={"expert": "ragged"}), expert=4
    )
    wanted = one_device(MODEL, routing)
    with pytest.raises(ConfigError, match="XLA has no ragged all-to-all for CPUs"):
        gradients(MODEL, shard, params=wanted[0])
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged_all_to_all)
    monkeypatch.setattr(moe, "require_platform", lambda hops, platform: None)
    assert_equal(gradients(MODEL, shard, params=wanted[0]), wanted)


@pytest.mark.slow
def test_bfloat16_has_the_loss_of_one_device() -> None:
    """A few tokens whose best scores are nearly equal choose otherwise on another mesh."""
    model = dataclasses.replace(MODEL, dtype="bfloat16", init_std=0.05)
    wanted = one_device(model, "learned")
    found = gradients(model, shard_on("experts_padded", expert=4), params=wanted[0])
    assert found[1]["loss"] == pytest.approx(wanted[1]["loss"], rel=1e-3)
    moved = np.abs(found[1]["blocks/load"] - wanted[1]["blocks/load"]).sum() / 2
    assert moved <= 0.01 * wanted[1]["blocks/load"].sum()


OPTIMIZER = Optimizer(
    OptimizerConfig(
        AdamW(eps=1.0), learning_rate=1e-2, warmup_steps=0, schedule="constant", clip_norm=1e9
    ),
    10,
)


def fresh(layout: ModelLayout) -> State:
    """The state of seed 0, from the parameters of one device."""
    params = initial(ModelLayout.of(MODEL, shard_on("ddp")))
    everywhere = jax.NamedSharding(layout.shard.mesh, jax.P())
    weights = {name: jax.device_put(x, everywhere) for name, x in params.items()}
    return fresh_state(layout, OPTIMIZER, weights)


def trained(
    layout: ModelLayout, state: State, *seeds: int
) -> tuple[State, list[float], list[float]]:
    """Returns the state after a step for each seed of a batch, the losses, and the loads of the
    busiest experts."""
    step = train_step(layout, OPTIMIZER, seed=0)
    losses, loads = [], []
    for seed in seeds:
        state, metrics = step(state, on_devices(host_batch(1, seed), layout))
        losses.append(float(metrics["loss"]))
        loads.append(float(metrics["expert_load"]))
        assert {"expert_idle", "expert_loads", "balance", "router_z"} <= metrics.keys()
    return state, losses, loads


@functools.cache
def steps_on_one_device() -> tuple[list[float], list[float], np.ndarray]:
    layout = ModelLayout.of(MODEL, shard_on("ddp"))
    state, losses, loads = trained(layout, fresh(layout), 0, 1, 2, 3)
    return losses, loads, np.asarray(state["buffers"]["blocks.experts.bias"])


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        pytest.param(
            "experts_padded+distributed", {"data": 2, "expert": 2}, marks=pytest.mark.slow
        ),
        pytest.param("experts_gather+zero3", {"data": 2, "expert": 2}, marks=pytest.mark.slow),
        pytest.param(
            "experts_padded+zero2", {"data": 2, "expert": 2}, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            folded("distributed", ("data",), data="padded"),
            {"data": 4},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Rules) else str(value),
)
def test_steps_equal_one_device(rules: Rules | str, mesh: dict[str, int]) -> None:
    """The bias after a step is the same number: it is made of integers."""
    layout = ModelLayout.of(MODEL, shard_on(rules, **mesh))
    state, losses, loads = trained(layout, fresh(layout), 0, 1, 2, 3)
    wanted_losses, wanted_loads, wanted_bias = steps_on_one_device()
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-6)
    assert loads == wanted_loads
    bias = np.asarray(state["buffers"]["blocks.experts.bias"])
    np.testing.assert_array_equal(bias, wanted_bias)
    assert np.abs(bias).max() > 0.01


@pytest.mark.slow
def test_resumes_on_another_mesh_with_the_same_bias_and_loads(tmp_path: Path) -> None:
    """Saved with flat vectors and experts on two devices, restored with another exchange and
    experts on four."""
    before = ModelLayout.of(MODEL, shard_on("experts_padded+distributed", data=2, expert=2))
    after = ModelLayout.of(MODEL, shard_on("experts_gather+zero2", data=2, expert=4))

    def config(layout: ModelLayout) -> TrainConfig:
        return TrainConfig(model=MODEL, output=str(tmp_path), rules=layout.shard.rules)

    state, losses, loads = trained(before, fresh(before), 0, 1)
    saved_bias = np.asarray(state["buffers"]["blocks.experts.bias"])
    with Checkpoints(config(before)) as checkpoints:
        checkpoints.save(2, state, {"position": 32}, before, OPTIMIZER)
    with Checkpoints(config(after)) as checkpoints:
        _, restored = checkpoints.restore(after, OPTIMIZER)
    assert restored is not None
    bias = np.asarray(restored["buffers"]["blocks.experts.bias"])
    assert bias.tobytes() == saved_bias.tobytes()
    state, more_losses, more_loads = trained(after, restored, 2, 3)
    wanted_losses, wanted_loads, wanted_bias = steps_on_one_device()
    np.testing.assert_allclose(losses + more_losses, wanted_losses, rtol=1e-6)
    assert loads + more_loads == wanted_loads
    bias = np.asarray(state["buffers"]["blocks.experts.bias"])
    assert bias.tobytes() == wanted_bias.tobytes()


@pytest.mark.slow
def test_the_loads_of_a_pipeline_are_those_of_one_device() -> None:
    """In model order, though the stages hold other layers, and one of them a row of padding."""
    model = dataclasses.replace(MODEL, n_layers=5)
    found = []
    for rules, mesh, microbatches in (("ddp", {}, 1), ("zero3", {"pipeline": 2, "data": 2}, 4)):
        pipeline = PipelineConfig(chunks=2, layers=(1, 2, 1, 1))
        layout = ModelLayout.of(model, shard_on(rules, **mesh), pipeline)
        state = init_state(layout, OPTIMIZER, 0)
        batch = on_devices(host_batch(microbatches), layout)
        metrics = train_step(layout, OPTIMIZER, seed=0)(state, batch)[1]
        found.append(np.asarray(metrics["expert_loads"]))
    assert found[0].shape == (5, EXPERTS.number)
    np.testing.assert_array_equal(*found)
