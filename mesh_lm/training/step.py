"""One optimizer step: gradients by the engine (`mesh_lm.parallel.engine`), then one update."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from mesh_lm.config import ModelConfig
from mesh_lm.errors import ConfigError
from mesh_lm.model import Batch
from mesh_lm.optim import Optimizer, Params
from mesh_lm.optim.contract import Slots
from mesh_lm.parallel import noise_scale
from mesh_lm.parallel.engine import region_with_feedback
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import (
    FEEDBACK,
    MASTER,
    State,
    loss_statistics,
    masters,
    state_shardings,
    weights_of,
)
from mesh_lm.state.diloco import n_islands
from mesh_lm.training import diloco, offload

Metrics = dict[str, jax.Array]
Step = Callable[[State, Batch], tuple[State, Metrics]]

# "step" in ASCII. Initialisation folds the number of each parameter into the seed's key; this tag
# is larger than any of them.
_STEP_TAG = 0x73746570


class Update(NamedTuple):
    """The part of the state that a skipped step leaves as it was."""

    weights: Params
    """Float32: flat vectors, and parameters that are not flat, sharded like the slots."""
    slots: Slots
    """The optimizer's, such as the moments of Adam."""
    buffers: Params
    """Parameters without gradients; empty for most models."""
    recent: jax.Array
    """Float32 [2, 3]: statistics of recent losses and gradient norms
    (`mesh_lm.state.loss_statistics`)."""
    feedback: Params
    """What sums of gradients in int8 have left out (`mesh_lm.parallel.feedback`); empty without
    such sums."""


def train_step(
    layout: ModelLayout,
    optimizer: Optimizer,
    seed: int,
    outlier: float = 0.0,
    *,
    has_noise_scale: bool = False,
) -> jax.stages.Wrapped:
    """Returns the jitted `Step` (state, batch) -> (state, metrics). It donates the state.

    It communicates in this order: the sum of the batch's weights; the weights of layers that are
    gathered (`parallel.zero3`, or `parallel.stage_transfers` in a pipeline); activations between
    stages (`parallel.tick.hop`); sums of gradients (by the same two, then
    `parallel.gradient_reduction`); the norm; new weights (`FlatLayout.compute_params`). What the
    rules shard over fsdp and tensor, XLA moves inside the layers.

    A step whose loss or gradient is not finite changes only the counters. So does one whose loss or
    log gradient norm is more than `outlier` standard deviations above its recent mean, unless
    `outlier` is 0. Raises ConfigError if the model has buffers and its config does not define how
    they are updated.

    has_noise_scale: the metrics have the estimates of `mesh_lm.parallel.noise_scale`.
    """
    _require_updatable_buffers(layout, optimizer)
    flat = layout.flat
    gradient_layout = offload.gradient_layout(layout, optimizer)
    weight_specs = masters(layout)
    slot_names = list(optimizer.slots(weight_specs))
    unflattened = [name for name in weight_specs if name not in flat.leaves]
    updates_by_layer = optimizer.updates_by_layer
    region = region_with_feedback
    if has_noise_scale:
        region = partial(region_with_feedback, replica_square=True)

    def step(state: State, batch: Batch) -> tuple[State, Metrics]:
        # 1. Gradients of objective / weight, float32, summed over the global batch.
        key = step_key(seed, state["step"])
        gradients = region(layout, batch, gradient_layout)
        feedback = state.get(FEEDBACK, {})
        params = weights_of(layout, state)
        (sums, layer_sums), grads, new_feedback = gradients(params, dict(batch), key, feedback)

        with jax.named_scope("optimizer"):
            unflattened_grads = {name: grads[name] for name in unflattened}
            grads |= layout.to_optimizer(unflattened_grads, "gradients")
            grad_norm = optax.tree.norm(grads)

            # 2. A step that is not finite, or an outlier, is not accepted.
            observed = loss_statistics.observe(sums["loss"] / sums["weight"], grad_norm)
            accepted = jnp.isfinite(observed).all() & jnp.isfinite(sums["objective"])
            if outlier:
                accepted &= ~loss_statistics.is_outlier(state["recent"], observed, outlier)

            # 3. The update. It uses the moments' sharding, so that ZeRO gathers each new weight
            # once.
            weights = layout.to_optimizer(
                {name: state["params"][name] for name in unflattened}, "optimizer"
            )
            weights |= state.get(MASTER, {})
            slots = {name: state[name] for name in slot_names}
            buffers = state.get("buffers", {})
            old = Update(weights, slots, buffers, state["recent"], feedback)

            n_updates = state["step"] - state["skipped"]
            if updates_by_layer:
                by_layer = offload.update(
                    layout,
                    optimizer,
                    grads,
                    weights,
                    slots,
                    state["params"],
                    grad_norm=grad_norm,
                    step=state["step"],
                    n_updates=n_updates,
                    accepted=accepted,
                )
                # Each layer is selected where it is updated: there is no second copy.
                old = old._replace(weights={}, slots={})
                weights = {}
                slots = {}
            else:
                by_layer = None
                weights, slots = optimizer.update(
                    grads, grad_norm, slots, weights, state["step"], n_updates, leaves=weight_specs
                )
            if buffers:
                buffers = _updated_buffers(layout.config, buffers, {**sums, **layer_sums})
            recent = loss_statistics.update(state["recent"], observed)
            new = Update(weights, slots, buffers, recent, new_feedback)

            update = jax.tree.map(lambda n, o: jnp.where(accepted, n, o), new, old)
            if by_layer is not None:
                update = update._replace(weights=by_layer.weights, slots=by_layer.slots)

            # 4. What the layers read: flat vectors are all-gathered, the others are as they are.
            master = {name: update.weights[name] for name in flat.leaves}
            params = {name: update.weights[name] for name in unflattened}
            params = layout.from_optimizer(params, "optimizer")
            if by_layer is not None:
                params |= by_layer.computed
            else:
                params |= flat.compute_params(master)

        new_state = {
            "step": state["step"] + 1,
            "skipped": state["skipped"] + ~accepted,
            "recent": update.recent,
            "params": params,
            **update.slots,
        }
        # The state has an entry only for what this run uses (`mesh_lm.state.parts`).
        optional = {MASTER: master, "buffers": update.buffers, FEEDBACK: update.feedback}
        new_state |= {name: part for name, part in optional.items() if part}

        metrics = {
            name: x / sums["weight"]
            for name, x in sums.items()
            if name not in ("weight", "objective")
        }
        metrics |= layout.config.metrics({**sums, **_in_model_order(layout, layer_sums)})
        metrics["grad_norm"] = grad_norm
        metrics["learning_rate"] = optimizer.learning_rate(state["step"])
        metrics["skipped"] = new_state["skipped"]
        metrics["labels"] = sums["weight"]
        if has_noise_scale:
            del metrics[noise_scale.REPLICA_SQUARE]
            n_microbatches, n_sequences, _ = batch["tokens"].shape
            estimates = noise_scale.estimates(
                sums[noise_scale.REPLICA_SQUARE],
                grad_norm,
                n_microbatches * n_sequences,
                noise_scale.n_replicas(layout),
            )
            # A step that is not accepted does not count (`mesh_lm.training.noise_scale`).
            metrics |= {name: jnp.where(accepted, x, jnp.nan) for name, x in estimates.items()}
        return new_state, metrics

    run = diloco.on_each_island(step, layout) if n_islands(layout, optimizer) else step
    # The old state is donated, because two would not fit.
    return jax.jit(run, donate_argnums=0, out_shardings=(state_shardings(layout, optimizer), None))


def step_key(seed: int, step: jax.Array | int) -> jax.Array:
    """Returns the key of a step's dropout, which is not that of any parameter's initial values."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _STEP_TAG), step)


def _in_model_order(layout: ModelLayout, layer_sums: Params) -> Params:
    """Returns the layers' arrays with a row for each layer, without a pipeline's padding, complete
    on every device.
    """
    ordered = {}
    for name, x in layer_sums.items():
        # All-gathered over the stages: the first process writes what becomes of it.
        complete = layout.shard.constrain(x, "activations", (None,) * x.ndim)
        stack = layout.stack_of(name)
        ordered[name] = complete if stack.is_contiguous else complete[stack.row_of_layer()]
    return ordered


def _require_updatable_buffers(layout: ModelLayout, optimizer: Optimizer) -> None:
    """Raises ConfigError if the model has buffers that a step cannot update."""
    if not layout.buffers:
        return
    names = ", ".join(sorted(layout.buffers))
    if type(layout.config).updated is ModelConfig.updated:
        raise ConfigError(
            f"{type(layout.config).__name__}.updated is missing: it makes the next values of the "
            f"model's buffers {names} (mesh_lm.config.ModelConfig)"
        )
    if n_islands(layout, optimizer):
        raise ConfigError(
            f"diloco.outer_steps={optimizer.diloco.outer_steps}: the model has buffers "
            f"({names}), which islands cannot average; set diloco.outer_steps=0"
        )


def _updated_buffers(config: ModelConfig, buffers: Params, sums: Params) -> Params:
    """Returns the buffers after a step. Raises ConfigError if their names, shapes or types
    change.
    """
    updated = config.updated(buffers, sums)
    function = f"{type(config).__name__}.updated"
    for name in sorted({*buffers, *updated}):
        if name not in updated:
            raise ConfigError(f"{function} returns no {name!r}, which is a buffer of the model")
        if name not in buffers:
            raise ConfigError(f"{function} returns {name!r}, which is not a buffer of the model")
        old = f"{buffers[name].dtype} {buffers[name].shape}"
        new = f"{updated[name].dtype} {updated[name].shape}"
        if new != old:
            raise ConfigError(
                f"{function} returns {name!r} as {new}, but the model has it as {old}"
            )
    return updated
