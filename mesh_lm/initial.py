"""The state at step 0, made on the devices that hold it: of a seed, or of weights that are there already."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mesh_lm.blueprint import Blueprint, Params
from mesh_lm.optim import Optimizer
from mesh_lm.state import State, counters, parts, state_shardings
from mesh_lm.stored import entries, with_used


def init_state(blueprint: Blueprint, optimizer: Optimizer, seed: int) -> State:
    """The state at step 0. The bits do not depend on the mesh."""
    if blueprint.identity and not blueprint.flat.vectors:
        where = state_shardings(blueprint, optimizer)

        def begin() -> State:
            return _with_zeros(blueprint, optimizer, blueprint.init(jax.random.key(seed)))

        return jax.jit(begin, out_shardings=where)()
    made = {entry.name: entry.canonical for entry in entries(blueprint, optimizer) if entry.part in ("params", "buffers")}
    where = {name: made[name] for name in blueprint.shapes}
    return fresh_state(blueprint, optimizer, jax.jit(lambda: blueprint.init(jax.random.key(seed)), out_shardings=where)())


def fresh_state(blueprint: Blueprint, optimizer: Optimizer, params: Params) -> State:
    """The state at step 0 of a run that starts from these weights and buffers, layers in model order, which it takes over."""
    held: State = {}
    for entry in entries(blueprint, optimizer):
        if entry.part in ("params", "buffers"):
            (part, name), array = entry.source, params[entry.name]
            if array.sharding != entry.canonical:
                array = jax.jit(lambda x: x, out_shardings=entry.canonical)(array)
                params[entry.name].delete()
            held.setdefault(part, {})
            held[part][name] = entry.held(array, held[part].get(name))
    held = with_used(blueprint, {"params": {}, **held})
    where = state_shardings(blueprint, optimizer)
    rest = {name: sharding for name, sharding in where.items() if name not in held}
    return held | jax.jit(lambda: {name: _zeros(blueprint, optimizer)[name] for name in rest}, out_shardings=rest)()


def _with_zeros(blueprint: Blueprint, optimizer: Optimizer, weights: Params) -> State:
    held = {
        part: {name: weights[name] for name in where}
        for part, where in state_shardings(blueprint, optimizer).items()
        if part in ("params", "buffers")
    }
    return {**_zeros(blueprint, optimizer), **held}


def _zeros(blueprint: Blueprint, optimizer: Optimizer) -> State:
    """Counters and the optimizer's slots."""
    declared = parts(blueprint, optimizer)
    zeros = {part: {n: jnp.zeros(leaf.shape, leaf.dtype) for n, leaf in each.leaves.items()} for part, each in declared.items()}
    return {**{name: jnp.asarray(x) for name, x in counters().items()}, **zeros}
