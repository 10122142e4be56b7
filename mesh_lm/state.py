"""What a run holds, declared once: from `parts` follow where it lives, how it begins, and what is saved, planned and shown of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mesh_lm.blueprint import Blueprint, Params
from mesh_lm.health import recent
from mesh_lm.optim import Leaf, Optimizer
from sharding_rules.rules import Kind

State = dict[str, Any]
"""{"step", "skipped": int32 scalars, "recent": float32 [2, 3] (`mesh_lm.health.recent`)}, and each of `parts`, a dict by parameter name."""

COUNTERS = ("step", "skipped", "recent")
"""The entries of a state that are no part: small, and the same on every device."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One entry of a state: arrays by the names of parameters."""

    kind: Kind
    """The column of the rules that places them."""
    leaves: dict[str, Leaf]


def parts(blueprint: Blueprint, optimizer: Optimizer) -> dict[str, Part]:
    """Every entry of a run's state but the counters: params, and the optimizer's slots."""
    leaves = blueprint.leaves
    slots = {slot: Part("optimizer", each) for slot, each in optimizer.slots(leaves).items()}
    return {"params": Part("params", leaves), **slots}


def state_shardings(blueprint: Blueprint, optimizer: Optimizer) -> State:
    """Where each leaf of the state lives."""
    everywhere = jax.NamedSharding(blueprint.shard.mesh, PartitionSpec())
    found: State = dict.fromkeys(COUNTERS, everywhere)
    for name, part in parts(blueprint, optimizer).items():
        found[name] = {n: blueprint.shard.sharding(part.kind, leaf.axes, leaf.shape, n) for n, leaf in part.leaves.items()}
    return found


def abstract_state(blueprint: Blueprint, optimizer: Optimizer) -> State:
    """Shapes, dtypes and shardings of the state; no memory is touched."""
    shapes = jax.eval_shape(lambda params: _begin(blueprint, optimizer, params), blueprint.in_memory)
    where = state_shardings(blueprint, optimizer)
    return jax.tree.map(lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where), shapes, where)


def init_state(blueprint: Blueprint, optimizer: Optimizer, seed: int) -> State:
    """The state at step 0, each part made on the device that holds it."""
    if blueprint.identity:
        where = state_shardings(blueprint, optimizer)
        return jax.jit(lambda: _begin(blueprint, optimizer, blueprint.init(jax.random.key(seed))), out_shardings=where)()
    params = jax.jit(lambda: blueprint.init(jax.random.key(seed)), out_shardings=blueprint.canonical_shardings("params"))()
    return fresh_state(blueprint, optimizer, params)


def fresh_state(blueprint: Blueprint, optimizer: Optimizer, params: Params) -> State:
    """The state at step 0 of a run that starts from these weights, layers in model order, which it takes over."""
    params, where = blueprint.by_stage(params, "params"), state_shardings(blueprint, optimizer)
    return jax.jit(lambda params: _begin(blueprint, optimizer, params), donate_argnums=0, out_shardings=where)(params)


def fresh_recent() -> np.ndarray:
    """The state's "recent" before any step, and that of a checkpoint without one (format 1): float32 zeros [2, 3]."""
    return recent.fresh()


def _begin(blueprint: Blueprint, optimizer: Optimizer, params: Params) -> State:
    slots = optimizer.slots(blueprint.leaves)
    zeros = {slot: {n: jnp.zeros(leaf.shape, leaf.dtype) for n, leaf in each.items()} for slot, each in slots.items()}
    return {"step": jnp.int32(0), "skipped": jnp.int32(0), "recent": fresh_recent(), "params": params, **zeros}
