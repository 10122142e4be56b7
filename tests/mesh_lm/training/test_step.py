"""The update: Optimizer compared with optax, schedules with their formulas, non-finite steps, and
the sharding of the state."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import GPT, host_batch, on_devices, shard_on

from mesh_lm.config import OptimizerConfig, PipelineConfig
from mesh_lm.optim import ArraySpec, Optimizer, decayed
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import abstract_state
from mesh_lm.state.initial import init_state
from mesh_lm.training import step as step_module
from mesh_lm.training.step import step_key, train_step

COMPILE_BUDGET = 90


def rates(**fields: Any) -> np.ndarray:
    """Returns the learning rates of 100 steps."""
    optimizer = Optimizer(
        OptimizerConfig(learning_rate=2.0, **({"warmup_steps": 10} | fields)), 100
    )
    return np.asarray(jax.jit(jax.vmap(optimizer.learning_rate))(np.arange(100)))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_schedules(schedule: str) -> None:
    """The first of 10 warm-up steps has a tenth of the peak, the tenth the full peak, and the last
    step final_fraction of it."""
    at = rates(schedule=schedule, final_fraction=0.25, decay_fraction=0.3)
    np.testing.assert_allclose(at[:10], [2.0 * (n + 1) / 10 for n in range(10)], rtol=1e-6)
    assert at[99] == pytest.approx(2.0 if schedule == "constant" else 0.5)
    assert all(a >= b - 1e-6 for a, b in itertools.pairwise(at[9:]))
    middle = {
        "cosine": 0.5 + 1.5 * (1 + math.cos(math.pi * 45 / 90)) / 2,
        "linear": 2.0 - 1.5 * 45 / 90,
        "wsd": 2.0,
        "constant": 2.0,
    }
    assert at[54] == pytest.approx(middle[schedule], rel=1e-6)
    if schedule == "wsd":
        assert at[69] == pytest.approx(2.0) and at[70] < 2.0


def test_a_decay_longer_than_the_run_still_ends_at_its_end() -> None:
    assert rates(schedule="wsd", final_fraction=0.25, decay_fraction=1.0)[99] == pytest.approx(0.5)


def test_no_warm_up_starts_at_the_peak() -> None:
    assert rates(warmup_steps=0, schedule="constant")[0] == 2.0


def test_no_step_draws_what_initialisation_drew() -> None:
    """A parameter's key is the seed's with its number folded in; a step's is the seed's with a tag
    and the step folded in."""
    seed, tag = jax.random.key(5), 0x73746570
    steps = [step_key(5, n) for n in range(64)]
    rngs = nnx.Rngs(params=jax.random.key(5))
    parameters = [rngs.params() for _ in range(64)]
    bits = [jax.random.key_data(key).tobytes() for key in (*parameters, *steps)]
    assert bits == [
        *(jax.random.key_data(jax.random.fold_in(seed, n)).tobytes() for n in range(64)),
        *(
            jax.random.key_data(jax.random.fold_in(jax.random.fold_in(seed, tag), n)).tobytes()
            for n in range(64)
        ),
    ]
    assert len(set(bits)) == 128


def test_a_step_draws_from_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def halves(key: jax.Array) -> jax.Array:  # float32 holds 16 bits of each word
        return jnp.stack(
            [jax.random.key_data(key) >> 16, jax.random.key_data(key) & 0xFFFF]
        ).astype(jnp.float32)

    def told(params, batch, key, feedback):
        sums = {
            "loss": jnp.float32(1),
            "objective": jnp.float32(1),
            "weight": jnp.float32(1),
            "key": halves(key),
        }
        return (sums, {}), params, feedback

    monkeypatch.setattr(step_module, "region_with_feedback", lambda layout, batch, flat: told)
    layout, optimizer = ModelLayout.of(GPT, shard_on("ddp")), Optimizer(OptimizerConfig(), 10)
    state, step = init_state(layout, optimizer, 5), train_step(layout, optimizer, 5)
    for number in range(2):
        state, metrics = step(state, on_devices(host_batch(1), layout))
        np.testing.assert_array_equal(metrics["key"], halves(step_key(5, number)))


def test_equals_optax() -> None:
    """Three updates against optax's own chain of clipping, Adam, decay and schedule; the second
    gradient is too small to be clipped."""
    config = OptimizerConfig(
        learning_rate=0.1, warmup_steps=0, schedule="constant", weight_decay=0.3, clip_norm=0.5
    )
    random = np.random.default_rng(0)
    params = {
        "a.weight": random.normal(size=(3, 4)).astype(np.float32),
        "a.bias": np.ones((2, 4), np.float32),
        "b": np.ones(3, np.float32),
    }
    chain = optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(
            0.1,
            b1=0.9,
            b2=0.95,
            eps=1e-8,
            weight_decay=0.3,
            mask={"a.weight": True, "a.bias": False, "b": False},
        ),
    )
    ours: Any = params
    theirs: Any = params
    optimizer, state = Optimizer(config, 3), chain.init(params)
    leaves = {"a.weight": ("embed", "mlp"), "a.bias": ("heads", "head_dim"), "b": ("norm",)}
    leaves = {
        name: ArraySpec(params[name].shape, jnp.float32, axes) for name, axes in leaves.items()
    }
    moments = {slot: jax.tree.map(jnp.zeros_like, params) for slot in optimizer.slots(leaves)}
    for step, size in enumerate((1, 0.01, 3)):
        grads = {
            name: size * random.normal(size=p.shape).astype(np.float32)
            for name, p in params.items()
        }
        updates, state = jax.jit(chain.update)(grads, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        update = jax.jit(functools.partial(optimizer.update, leaves=leaves))
        ours, moments = update(
            grads, optax.tree.norm(grads), moments, ours, jnp.int32(step), jnp.int32(step)
        )
    for name in params:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-6, err_msg=name)


def test_what_decays() -> None:
    leaves = ModelLayout.of(
        dataclasses.replace(GPT, tied=False, sinks=True), shard_on("ddp")
    ).leaves
    kept = set(leaves) - decayed(leaves)
    assert (
        kept == {name for name in leaves if name.endswith(("bias", "scale", "sinks"))}
        and len(kept) == 11
    )
    own = {
        "blocks.decay": ("layers", "norm"),
        "decay": ("norm",),
        "blocks.mix": ("layers", "embed", "mlp"),
        "mix.scale": ("embed", "mlp"),
    }
    assert decayed(
        {name: ArraySpec((2,) * len(axes), jnp.float32, axes) for name, axes in own.items()}
    ) == {"blocks.mix"}


@functools.cache
def trainer(rules: str, **mesh: int):
    """Returns the layout, a step, and a function that makes an initial state."""
    layout = ModelLayout.of(GPT, shard_on(rules, **mesh))
    optimizer = Optimizer(OptimizerConfig(learning_rate=0.01, warmup_steps=2), 4)
    return (
        layout,
        train_step(layout, optimizer, seed=0),
        functools.partial(init_state, layout, optimizer, seed=0),
    )


def run_steps(
    rules: str, mesh: dict[str, int], poison: int | None = None
) -> tuple[list[dict[str, float]], dict]:
    layout, step, fresh = trainer(rules, **mesh)
    state, seen = fresh(), []
    for n in range(4):
        batch = host_batch(2, seed=n)
        if n == poison:
            batch["weights"] = batch["weights"] * np.float32(np.nan)
        state, metrics = step(state, on_devices(batch, layout))
        seen.append({name: float(x) for name, x in metrics.items()})
    return seen, state


@pytest.mark.slow
def test_losses_over_steps_do_not_depend_on_the_mesh() -> None:
    """Compares losses instead of leaves: a K bias has no gradient, and Adam amplifies its noise."""
    alone, _ = run_steps("ddp", {})
    for rules, mesh in (
        ("zero2", {"data": 8}),
        ("hsdp+megatron_sp", {"data": 2, "fsdp": 2, "tensor": 2}),
    ):
        found, _ = run_steps(rules, mesh)
        np.testing.assert_allclose(
            [m["loss"] for m in found], [m["loss"] for m in alone], rtol=2e-6
        )
        np.testing.assert_allclose(
            [m["grad_norm"] for m in found], [m["grad_norm"] for m in alone], rtol=1e-5
        )


@pytest.mark.slow
def test_a_step_that_is_not_finite_changes_nothing_but_the_counters() -> None:
    clean, _ = run_steps("zero2", {"data": 8})
    seen, state = run_steps("zero2", {"data": 8}, poison=1)
    assert [m["skipped"] for m in seen] == [0, 1, 1, 1] and int(state["step"]) == 4
    assert seen[0] == clean[0] and math.isnan(seen[1]["loss"]) and math.isfinite(seen[3]["loss"])
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state))
    losses = [m["loss"] for m in seen if math.isfinite(m["loss"])]
    np.testing.assert_allclose(state["recent"][0], [3, np.mean(losses), np.var(losses)], rtol=1e-4)


@pytest.mark.slow
def test_every_step_has_masks_of_its_own() -> None:
    """With the same weights and samples only the step's number differs, and with it the dropout
    masks."""
    layout, step, fresh = trainer("zero2", data=8)
    losses = []
    for number in (0, 1, 0):
        state = fresh()
        state["step"] = jax.device_put(np.int32(number), state["step"].sharding)
        losses.append(float(step(state, on_devices(host_batch(2), layout))[1]["loss"]))
    assert losses[0] == losses[2] != losses[1]


def test_outliers_count_unless_asked_for() -> None:
    """The statistics make any step an outlier, but the default step only updates them."""
    layout, step, fresh = trainer("zero2", data=8)
    lately = np.array([[1000, -100, 1]] * 2, np.float32)
    state = fresh()
    state["recent"] = jax.device_put(lately, state["recent"].sharding)
    state, metrics = step(state, on_devices(host_batch(2), layout))
    assert metrics["skipped"] == 0 and state["recent"][0, 0] == 1001


def test_the_state_lives_where_the_rules_say() -> None:
    layout = ModelLayout.of(GPT, shard_on("zero1+fsdp", data=4, fsdp=2))
    state = abstract_state(layout, Optimizer(OptimizerConfig(), 1))
    name = "blocks.mlp.up.weight"
    assert state["params"][name].sharding.spec == jax.P("pipeline", "fsdp", None)
    assert (
        state["mu"][name].sharding.spec
        == state["nu"][name].sharding.spec
        == jax.P("pipeline", ("fsdp", "data"), None)
    )
    assert state["mu"][name].sharding.shard_shape(state["mu"][name].shape) == (2, 32 // 8, 128)


def test_metrics_of_layers_are_in_model_order_without_padding() -> None:
    """The stages hold layers 0, 3 and 1, 2, 4, so that one row of the first is padding."""
    model = dataclasses.replace(GPT, n_layers=5)
    shard = shard_on("ddp", pipeline=2)
    layout = ModelLayout.of(model, shard, PipelineConfig(chunks=2, layers=(1, 2, 1, 1)))
    layers = layout.stacks["blocks"].layer_of_row()
    assert layers.tolist() == [0, 3, -1, 1, 2, 4]
    by_stage = jax.NamedSharding(shard.mesh, jax.P("pipeline"))
    loads = jax.device_put(layers[:, None] * np.ones(3, np.float32), by_stage)
    ordered = jax.jit(functools.partial(step_module._in_model_order, layout))(
        {"blocks/load": loads}
    )
    assert ordered["blocks/load"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert ordered["blocks/load"].is_fully_replicated
