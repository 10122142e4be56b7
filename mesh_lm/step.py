"""One optimizer step: gradients from the microbatch engine (`mesh_lm.pipeline.engine`), one update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from mesh_lm.blueprint import Blueprint, Params
from mesh_lm.health import recent
from mesh_lm.model import Batch
from mesh_lm.optimizer import AdamW, decayed
from mesh_lm.pipeline.engine import region

State = dict[str, Any]
"""{"step", "skipped": int32 scalars, "recent": float32 [2, 3] (`mesh_lm.health.recent`), "params", "mu", "nu": dicts by parameter name}:
what a checkpoint holds."""

Step = Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]


_STEPS = 0x73746570  # "step": no model has so many parameters


def train_step(blueprint: Blueprint, optimizer: AdamW, seed: int, outlier: float = 0.0) -> Step:
    """(state, batch) -> (state, metrics). A step with sick numbers changes nothing but the counters: one whose loss or gradient is not
    finite or, where `outlier` is not 0, whose loss or log gradient norm is so many standard deviations above what they were of late."""

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        key = step_key(seed, state["step"])
        (sums, _), grads = region(blueprint, batch)(state["params"], dict(batch), key)
        with jax.named_scope("optimizer"):
            grads = blueprint.constrain(grads, "gradients")
            norm = optax.global_norm(grads)
            now = recent.measured(sums["loss"] / sums["weight"], norm)
            good = jnp.isfinite(now).all() & jnp.isfinite(sums["objective"])
            if outlier:
                good &= ~recent.is_outlier(state["recent"], now, outlier)
            # The update runs where the moments live, so that ZeRO gathers each new weight once.
            params = blueprint.constrain(state["params"], "optimizer")
            moments = {"mu": state["mu"], "nu": state["nu"]}
            new = optimizer.update(
                grads, norm, moments, params, state["step"], state["step"] - state["skipped"], decayed=decayed(blueprint.axes)
            )
            new, old = (*new, recent.updated(state["recent"], now)), (params, moments, state["recent"])
            new_params, new_moments, lately = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
        counters = {"step": state["step"] + 1, "skipped": state["skipped"] + ~good, "recent": lately}
        after = {**counters, "params": new_params, **new_moments}
        means = {name: value / sums["weight"] for name, value in sums.items() if name not in ("weight", "objective")}
        rate = optimizer.learning_rate(state["step"])
        return after, {**means, "grad_norm": norm, "learning_rate": rate, "skipped": after["skipped"], "labels": sums["weight"]}

    shardings = state_shardings(blueprint)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def step_key(seed: int, step: jax.Array | int) -> jax.Array:
    """The key of a step's dropout. Initialisation folds each parameter's number into the seed's key, so steps fold a tag in first."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _STEPS), step)


def state_shardings(blueprint: Blueprint) -> State:
    """Where each leaf of the state lives."""
    everywhere = jax.NamedSharding(blueprint.shard.mesh, PartitionSpec())
    params, moments = blueprint.shardings("params"), blueprint.shardings("optimizer")
    counters = dict.fromkeys(("step", "skipped", "recent"), everywhere)
    return {**counters, "params": params, "mu": moments, "nu": moments}


def abstract_state(blueprint: Blueprint, optimizer: AdamW) -> State:
    """Shapes, dtypes and shardings of the state; no memory is touched."""
    shapes = jax.eval_shape(lambda params: _begin(optimizer, params), blueprint.in_memory)
    return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, state_shardings(blueprint))


def init_state(blueprint: Blueprint, optimizer: AdamW, seed: int) -> State:
    """The state at step 0, each part made on the device that holds it."""
    if blueprint.identity:
        return jax.jit(lambda: _begin(optimizer, blueprint.init(jax.random.key(seed))), out_shardings=state_shardings(blueprint))()
    params = jax.jit(lambda: blueprint.init(jax.random.key(seed)), out_shardings=blueprint.canonical_shardings("params"))()
    return fresh_state(blueprint, optimizer, params)


def fresh_state(blueprint: Blueprint, optimizer: AdamW, params: Params) -> State:
    """The state at step 0 of a run that starts from these weights, layers in model order, which it takes over."""
    params = blueprint.by_stage(params, "params")
    return jax.jit(lambda params: _begin(optimizer, params), donate_argnums=0, out_shardings=state_shardings(blueprint))(params)


def fresh_recent() -> np.ndarray:
    """The state's "recent" before any step, and that of a checkpoint without one (format 1): float32 zeros [2, 3]."""
    return recent.fresh()


def _begin(optimizer: AdamW, params: Params) -> State:
    return {"step": jnp.int32(0), "skipped": jnp.int32(0), "recent": fresh_recent(), "params": params, **optimizer.init(params)}
