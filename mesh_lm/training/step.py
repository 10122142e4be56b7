"""One optimizer step: gradients from the microbatch engine (`mesh_lm.parallel.engine`), one
update.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from mesh_lm.config import ModelConfig
from mesh_lm.errors import ConfigError
from mesh_lm.model import Batch
from mesh_lm.optim import Optimizer, Params
from mesh_lm.parallel.engine import region_with_feedback
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import (
    FEEDBACK,
    MASTER,
    State,
    loss_statistics,
    masters,
    parts,
    state_shardings,
    weights_of,
)
from mesh_lm.state.islands import MOMENTUM, WEIGHTS, n_islands
from mesh_lm.training import islands

Step = Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]


# "step": larger than the number of any parameter, which initialisation passes to fold_in with the
# same key
_STEPS = 0x73746570


def train_step(
    layout: ModelLayout, optimizer: Optimizer, seed: int, outlier: float = 0.0
) -> jax.stages.Wrapped:
    """Returns the jitted `Step` (state, batch) -> (state, metrics). It donates the state.

    A step whose loss or gradient is not finite changes only the counters. So does one whose loss or
    log gradient norm is more than `outlier` standard deviations above its recent mean, unless
    `outlier` is 0. Raises ConfigError if the model has buffers and its config does not define how
    they are updated.
    """
    if layout.buffers and type(layout.config).updated is ModelConfig.updated:
        which = (
            f"it makes the next values of the model's buffers {', '.join(sorted(layout.buffers))}"
        )
        raise ConfigError(
            f"{type(layout.config).__name__}.updated is missing: {which} "
            "(mesh_lm.config.ModelConfig)"
        )
    if layout.buffers and n_islands(layout, optimizer):
        which = (
            f"the model has buffers ({', '.join(sorted(layout.buffers))}), which islands cannot "
            "average"
        )
        raise ConfigError(
            f"optimizer.outer_steps={optimizer.config.outer_steps}: {which}; set "
            "optimizer.outer_steps=0"
        )
    declared, flat, leaves = parts(layout, optimizer), layout.flat, masters(layout)
    slots = [
        part
        for part in declared
        if part not in ("params", MASTER, "buffers", FEEDBACK, WEIGHTS, MOMENTUM)
    ]
    plain = [name for name in leaves if name not in flat.leaves]

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        key = step_key(seed, state["step"])
        run, left_before = region_with_feedback(layout, batch, flat), state.get(FEEDBACK, {})
        (sums, arrays), grads, left_out = run(
            weights_of(layout, state), dict(batch), key, left_before
        )
        with jax.named_scope("optimizer"):
            grads |= layout.constrain({name: grads[name] for name in plain}, "gradients")
            norm = optax.tree.norm(grads)
            now = loss_statistics.observe(sums["loss"] / sums["weight"], norm)
            good = jnp.isfinite(now).all() & jnp.isfinite(sums["objective"])
            if outlier:
                good &= ~loss_statistics.is_outlier(state["recent"], now, outlier)
            # The update uses the moments' sharding, so that ZeRO gathers each new weight once.
            held = layout.constrain(
                {name: state["params"][name] for name in plain}, "optimizer"
            ) | state.get(MASTER, {})
            old = (
                held,
                {slot: state[slot] for slot in slots},
                state.get("buffers", {}),
                state["recent"],
                left_before,
            )
            count = state["step"] - state["skipped"]
            new = optimizer.update(grads, norm, old[1], held, state["step"], count, leaves=leaves)
            buffers = _updated(layout.config, old[2], {**sums, **arrays}) if old[2] else {}
            new = *new, buffers, loss_statistics.update(state["recent"], now), left_out
            held, new_slots, buffers, lately, left_out = jax.tree.map(
                lambda a, b: jnp.where(good, a, b), new, old
            )
            master = {name: held[name] for name in flat.leaves}
            params = {name: held[name] for name in plain} | flat.compute_params(master)
        counters = {
            "step": state["step"] + 1,
            "skipped": state["skipped"] + ~good,
            "recent": lately,
        }
        after = {**counters, "params": params, **new_slots}
        after |= ({MASTER: master} if master else {}) | ({"buffers": buffers} if buffers else {})
        after |= {FEEDBACK: left_out} if left_out else {}
        means = {
            name: value / sums["weight"]
            for name, value in sums.items()
            if name not in ("weight", "objective")
        }
        rate = optimizer.learning_rate(state["step"])
        return after, {
            **means,
            "grad_norm": norm,
            "learning_rate": rate,
            "skipped": after["skipped"],
            "labels": sums["weight"],
        }

    run = islands.on_each(step, layout) if n_islands(layout, optimizer) else step
    return jax.jit(run, donate_argnums=0, out_shardings=(state_shardings(layout, optimizer), None))


def _updated(config: ModelConfig, buffers: Params, sums: Params) -> Params:
    """Returns the buffers after a step. Raises ConfigError if their names, shapes or types
    change.
    """
    new, which = config.updated(buffers, sums), f"{type(config).__name__}.updated returns"
    for name in sorted({*buffers, *new}):
        if name not in new:
            raise ConfigError(f"{which} no {name!r}, a buffer of the model")
        if name not in buffers:
            raise ConfigError(f"{which} {name!r}, which is not a buffer of the model")
        now, before = (f"{x.dtype} {x.shape}" for x in (new[name], buffers[name]))
        if now != before:
            raise ConfigError(f"{which} {name!r} as {now}, but the buffer is {before}")
    return new


def step_key(seed: int, step: jax.Array | int) -> jax.Array:
    """Returns the key of a step's dropout. Initialisation folds each parameter's number into the
    seed's key, so a step folds in a tag.
    """
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _STEPS), step)
