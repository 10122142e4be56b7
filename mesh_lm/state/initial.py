"""The state at step 0, created on the devices that hold it, from a seed or from given weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.state import State, counters, parts, state_shardings
from mesh_lm.state.diloco import WEIGHTS, n_islands
from mesh_lm.state.disk_form import entries, with_used


def init_state(layout: ModelLayout, optimizer: Optimizer, seed: int) -> State:
    """Returns the state at step 0, bit-identical on any mesh."""
    if layout.is_contiguous and not layout.flat.vectors:

        def create() -> State:
            return _with_zeros(layout, optimizer, layout.init(jax.random.key(seed)))

        return jax.jit(create, out_shardings=state_shardings(layout, optimizer))()

    shardings = {
        entry.name: entry.canonical
        for entry in entries(layout, optimizer)
        if entry.part in ("params", "buffers")
    }
    init = jax.jit(
        lambda: layout.init(jax.random.key(seed)),
        out_shardings={name: shardings[name] for name in layout.shapes},
    )
    return fresh_state(layout, optimizer, init())


def fresh_state(layout: ModelLayout, optimizer: Optimizer, params: Params) -> State:
    """Returns the state at step 0 for these weights and buffers, layers in model order.

    Donates `params`.
    """
    weights: State = {}
    for entry in entries(layout, optimizer):
        if entry.part not in ("params", "buffers"):
            continue
        array = params[entry.name]
        if array.sharding != entry.canonical:
            array = jax.jit(lambda x: x, out_shardings=entry.canonical)(array)
            params[entry.name].delete()
        part_name, name = entry.source
        part = weights.setdefault(part_name, {})
        part[name] = entry.insert(array, part.get(name))
    state = with_used(layout, {"params": {}, **weights})

    shardings = state_shardings(layout, optimizer)
    n = n_islands(layout, optimizer)
    if n:
        stack = jax.jit(lambda params: _stacked(params, n), out_shardings=shardings[WEIGHTS])
        state[WEIGHTS] = stack(state["params"])
    missing = {name: sharding for name, sharding in shardings.items() if name not in state}

    def create() -> State:
        zeros = _zeros(layout, optimizer)
        return {name: zeros[name] for name in missing}

    return state | jax.jit(create, out_shardings=missing)()


def _with_zeros(layout: ModelLayout, optimizer: Optimizer, weights: Params) -> State:
    state: State = {}
    for part, shardings in state_shardings(layout, optimizer).items():
        if part in ("params", "buffers"):
            state[part] = {name: weights[name] for name in shardings}
    n = n_islands(layout, optimizer)
    if n:
        state[WEIGHTS] = _stacked(state["params"], n)
    return _zeros(layout, optimizer) | state


def _stacked(params: Params, n: int) -> Params:
    """Returns the weights of n islands, which all start from these."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), params)


def _zeros(layout: ModelLayout, optimizer: Optimizer) -> State:
    """Returns counters, and zeros for all other entries of the state."""
    state: State = {}
    for part, declared in parts(layout, optimizer).items():
        state[part] = {
            name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in declared.leaves.items()
        }
    for name, x in counters(n_islands(layout, optimizer)).items():
        state[name] = jnp.asarray(x)
    return state
