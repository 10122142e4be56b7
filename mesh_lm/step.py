"""One optimizer step: gradients from the microbatch engine (`mesh_lm.pipeline.engine`), one update."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from mesh_lm.blueprint import Blueprint
from mesh_lm.health import recent
from mesh_lm.model import Batch
from mesh_lm.optim import Optimizer
from mesh_lm.pipeline.engine import region
from mesh_lm.state import State, parts, state_shardings

Step = Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]


_STEPS = 0x73746570  # "step": no model has so many parameters


def train_step(blueprint: Blueprint, optimizer: Optimizer, seed: int, outlier: float = 0.0) -> Step:
    """(state, batch) -> (state, metrics). A step with sick numbers changes nothing but the counters: one whose loss or gradient is not
    finite or, where `outlier` is not 0, whose loss or log gradient norm is so many standard deviations above what they were of late."""
    slots = [name for name in parts(blueprint, optimizer) if name != "params"]

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
            params, held = blueprint.constrain(state["params"], "optimizer"), {slot: state[slot] for slot in slots}
            count = state["step"] - state["skipped"]
            new = optimizer.update(grads, norm, held, params, state["step"], count, leaves=blueprint.leaves)
            new, old = (*new, recent.updated(state["recent"], now)), (params, held, state["recent"])
            new_params, new_slots, lately = jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)
        counters = {"step": state["step"] + 1, "skipped": state["skipped"] + ~good, "recent": lately}
        after = {**counters, "params": new_params, **new_slots}
        means = {name: value / sums["weight"] for name, value in sums.items() if name not in ("weight", "objective")}
        rate = optimizer.learning_rate(state["step"])
        return after, {**means, "grad_norm": norm, "learning_rate": rate, "skipped": after["skipped"], "labels": sums["weight"]}

    return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings(blueprint, optimizer), None))


def step_key(seed: int, step: jax.Array | int) -> jax.Array:
    """The key of a step's dropout. Initialisation folds each parameter's number into the seed's key, so steps fold a tag in first."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _STEPS), step)
