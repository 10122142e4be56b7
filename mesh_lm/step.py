"""One optimizer step: gradients over microbatches, one reduction, one update.

`value_and_grad(params, batch, key) -> (sums, grads)` is the contract of the microbatch engine. It is manual over {pipeline, data,
sequence, expert} and leaves {fsdp, tensor} to XLA: what is not sharded over a manual axis is reduced over it exactly once per step, in
fp32, after the last microbatch. Left to XLA, data-parallel gradients are all-reduced in bf16 at every layer of every microbatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from mesh_lm.blueprint import Blueprint, Params
from mesh_lm.model import Batch, Sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.optimizer import AdamW
from sharding_rules import axes_of

MANUAL = frozenset({"pipeline", "data", "sequence", "expert"})

State = dict[str, Any]
"""{"step", "skipped": int32 scalars, "params", "mu", "nu": dicts by parameter name}: what a checkpoint holds."""

Step = Callable[[State, Batch], tuple[State, dict[str, jax.Array]]]


def batch_sharding(blueprint: Blueprint) -> jax.NamedSharding:
    """Of the leaves [M, B, S] of a global batch: M microbatches of B sequences. Leaves with fewer dimensions use its leading part."""
    return blueprint.shard.sharding("activations", (None, "batch", "seq"))


def value_and_grad(blueprint: Blueprint) -> Callable[[Params, Batch, jax.Array], tuple[Sums, Params]]:
    """(params, batch of [M, B, S] leaves, the step's key) -> (sums over the global batch, gradients of objective / weight)."""

    def local(params: Params, batch: Batch, key: jax.Array) -> tuple[Sums, Params]:
        weight = _psum(batch["weights"].sum(), MANUAL, blueprint)

        def objective(params: Params, microbatch: Batch) -> tuple[jax.Array, Sums]:
            sums = blueprint.bind(params)(microbatch, Dropout.of(key, microbatch["sample_ids"]))
            return sums["objective"] / weight, sums

        def microbatch(params: Params, one: Batch) -> tuple[Sums, Params]:
            (_, sums), grads = jax.value_and_grad(objective, has_aux=True)(params, one)
            return sums, blueprint.constrain(grads, "params")

        sums, grads = _accumulate(lambda one: microbatch(params, one), batch)
        return _psum(sums, MANUAL, blueprint), {name: _psum(g, MANUAL - held[name], blueprint) for name, g in grads.items()}

    specs = {name: blueprint.shard.only(s.spec, MANUAL) for name, s in blueprint.shardings("params").items()}
    held = {name: {a for entry in spec for a in axes_of(entry)} for name, spec in specs.items()}
    return _manual(local, blueprint, specs, (PartitionSpec(), specs))


def evaluate(blueprint: Blueprint) -> Callable[[Params, Batch], Sums]:
    """(params, batch of [M, B, S] leaves) -> sums over the batch, without dropout and without gradients."""

    def local(params: Params, batch: Batch, key: jax.Array) -> Sums:
        return _psum(_accumulate(lambda one: blueprint.bind(params)(one, None), batch), MANUAL, blueprint)

    specs = {name: blueprint.shard.only(s.spec, MANUAL) for name, s in blueprint.shardings("params").items()}
    run = _manual(local, blueprint, specs, PartitionSpec())
    return lambda params, batch: run(params, batch, jax.random.key(0))


def train_step(blueprint: Blueprint, optimizer: AdamW, seed: int) -> Step:
    """(state, batch) -> (state, metrics). A step whose loss or gradient is not finite changes nothing but the counters."""
    gradients = value_and_grad(blueprint)

    def step(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), state["step"])
        sums, grads = gradients(state["params"], batch, key)
        with jax.named_scope("optimizer"):
            grads = blueprint.constrain(grads, "gradients")
            norm = optax.global_norm(grads)
            finite = jnp.isfinite(norm) & jnp.isfinite(sums["objective"])
            # The update runs where the moments live, so that ZeRO gathers each new weight once.
            params = blueprint.constrain(state["params"], "optimizer")
            moments = {"mu": state["mu"], "nu": state["nu"]}
            new = optimizer.update(grads, norm, moments, params, state["step"], state["step"] - state["skipped"])
            new_params, new_moments = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, moments))
        after = {"step": state["step"] + 1, "skipped": state["skipped"] + ~finite, "params": new_params, **new_moments}
        means = {name: value / sums["weight"] for name, value in sums.items() if name not in ("weight", "objective")}
        rate = optimizer.learning_rate(state["step"])
        return after, {**means, "grad_norm": norm, "learning_rate": rate, "skipped": after["skipped"], "labels": sums["weight"]}

    shardings = state_shardings(blueprint)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def state_shardings(blueprint: Blueprint) -> State:
    """Where each leaf of the state lives."""
    everywhere = jax.NamedSharding(blueprint.shard.mesh, PartitionSpec())
    moments = blueprint.shardings("optimizer")
    return {"step": everywhere, "skipped": everywhere, "params": blueprint.shardings("params"), "mu": moments, "nu": moments}


def abstract_state(blueprint: Blueprint, optimizer: AdamW) -> State:
    """Shapes, dtypes and shardings of the state; no memory is touched."""
    shapes = jax.eval_shape(lambda: _initial(blueprint, optimizer, 0))
    return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, state_shardings(blueprint))


def init_state(blueprint: Blueprint, optimizer: AdamW, seed: int) -> State:
    """The state at step 0, each part made on the device that holds it."""
    return jax.jit(lambda: _initial(blueprint, optimizer, seed), out_shardings=state_shardings(blueprint))()


def fresh_state(blueprint: Blueprint, optimizer: AdamW, params: Params) -> State:
    """The state at step 0 of a run that starts from these weights, which it takes over."""
    return jax.jit(lambda params: _begin(optimizer, params), donate_argnums=0, out_shardings=state_shardings(blueprint))(params)


def _initial(blueprint: Blueprint, optimizer: AdamW, seed: int) -> State:
    return _begin(optimizer, blueprint.init(jax.random.key(seed)))


def _begin(optimizer: AdamW, params: Params) -> State:
    return {"step": jnp.int32(0), "skipped": jnp.int32(0), "params": params, **optimizer.init(params)}


def _accumulate(f: Callable[[Batch], Any], batch: Batch) -> Any:
    """Sum of f over the leading dimension of the batch's leaves, in the results' own types."""
    batch = dict(batch)
    one = jax.tree.map(lambda x: x[0], batch)
    if len(batch["tokens"]) == 1:
        return f(one)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(f, one))
    return lax.scan(lambda total, one: (jax.tree.map(jnp.add, total, f(one)), None), zeros, batch)[0]


def _psum(tree: Any, axes: frozenset[str] | set[str], blueprint: Blueprint) -> Any:
    over = tuple(a for a in blueprint.shard.mesh.axis_names if a in axes and blueprint.shard.mesh.shape[a] > 1)
    return lax.psum(tree, over) if over else tree


def _manual(f: Callable, blueprint: Blueprint, params_specs: Mapping[str, PartitionSpec], out_specs: Any) -> Callable:
    """f(params, batch, key) with its arrays local along the manual axes."""
    shard = blueprint.shard
    leaf = shard.only(batch_sharding(blueprint).spec, MANUAL)

    def run(params: Params, batch: Batch, key: jax.Array) -> Any:
        batch_specs = {name: PartitionSpec(*leaf[: x.ndim]) for name, x in batch.items()}
        in_specs = (dict(params_specs), batch_specs, PartitionSpec())
        return jax.shard_map(f, mesh=shard.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=MANUAL, check_vma=False)(
            params, dict(batch), key
        )  # fmt: skip

    return run
