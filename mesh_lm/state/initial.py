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
        where = state_shardings(layout, optimizer)

        def create() -> State:
            return _with_zeros(layout, optimizer, layout.init(jax.random.key(seed)))

        return jax.jit(create, out_shardings=where)()
    canonical = {
        entry.name: entry.canonical
        for entry in entries(layout, optimizer)
        if entry.part in ("params", "buffers")
    }
    where = {name: canonical[name] for name in layout.shapes}
    return fresh_state(
        layout, optimizer, jax.jit(lambda: layout.init(jax.random.key(seed)), out_shardings=where)()
    )


def fresh_state(layout: ModelLayout, optimizer: Optimizer, params: Params) -> State:
    """Returns the state at step 0 for these weights and buffers, layers in model order. Donates
    `params`.
    """
    held: State = {}
    for entry in entries(layout, optimizer):
        if entry.part in ("params", "buffers"):
            (part, name), array = entry.source, params[entry.name]
            if array.sharding != entry.canonical:
                array = jax.jit(lambda x: x, out_shardings=entry.canonical)(array)
                params[entry.name].delete()
            held.setdefault(part, {})
            held[part][name] = entry.held(array, held[part].get(name))
    held = with_used(layout, {"params": {}, **held})
    where = state_shardings(layout, optimizer)
    if n := n_islands(layout, optimizer):
        held[WEIGHTS] = jax.jit(lambda params: _stacked(params, n), out_shardings=where[WEIGHTS])(
            held["params"]
        )
    rest = {name: sharding for name, sharding in where.items() if name not in held}
    return (
        held
        | jax.jit(
            lambda: {name: _zeros(layout, optimizer)[name] for name in rest}, out_shardings=rest
        )()
    )


def _with_zeros(layout: ModelLayout, optimizer: Optimizer, weights: Params) -> State:
    held = {
        part: {name: weights[name] for name in where}
        for part, where in state_shardings(layout, optimizer).items()
        if part in ("params", "buffers")
    }
    if n := n_islands(layout, optimizer):
        held[WEIGHTS] = _stacked(held["params"], n)
    return {**_zeros(layout, optimizer), **held}


def _stacked(params: Params, n: int) -> Params:
    """Returns the weights of n islands, which all start from these."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), params)


def _zeros(layout: ModelLayout, optimizer: Optimizer) -> State:
    """Returns counters, and zeros for all other entries of the state."""
    declared = parts(layout, optimizer)
    zeros = {
        part: {n: jnp.zeros(leaf.shape, leaf.dtype) for n, leaf in each.leaves.items()}
        for part, each in declared.items()
    }
    return {
        **{name: jnp.asarray(x) for name, x in counters(n_islands(layout, optimizer)).items()},
        **zeros,
    }
