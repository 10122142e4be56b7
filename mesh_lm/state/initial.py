"""The state at step 0, created on the devices that hold it, from a seed or from given weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mesh_lm.optim import Optimizer
from mesh_lm.parallel.layout import ModelLayout, Params
from mesh_lm.state import State, counters, parts, placement, state_shardings
from mesh_lm.state.diloco import WEIGHTS, n_islands
from mesh_lm.state.disk_form import entries, with_used


def init_state(layout: ModelLayout, optimizer: Optimizer, seed: int) -> State:
    """Returns the state at step 0, bit-identical on any mesh."""
    if layout.is_contiguous and not layout.flat.vectors:
        on_host, on_device = _by_memory(state_shardings(layout, optimizer))

        def create() -> State:
            state = _with_zeros(layout, optimizer, layout.init(jax.random.key(seed)))
            return {name: state[name] for name in on_device}

        state = jax.jit(create, out_shardings=on_device)()
        return state | _host_zeros(layout, optimizer, on_host)

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
    for name, part in parts(layout, optimizer).items():
        if part.on_host and name in state:
            state[name] = {key: placement.moved_to_host(x) for key, x in state[name].items()}

    shardings = state_shardings(layout, optimizer)
    n = n_islands(layout, optimizer)
    if n:
        stack = jax.jit(lambda params: _stacked(params, n), out_shardings=shardings[WEIGHTS])
        state[WEIGHTS] = stack(state["params"])
    absent = {name: sharding for name, sharding in shardings.items() if name not in state}
    on_host, missing = _by_memory(absent)

    def create() -> State:
        zeros = _zeros(layout, optimizer)
        return {name: zeros[name] for name in missing}

    state |= jax.jit(create, out_shardings=missing)()
    return state | _host_zeros(layout, optimizer, on_host)


def _by_memory(shardings: State) -> tuple[State, State]:
    """Returns the shardings of the parts (on the hosts, on the devices)."""
    on_host: State = {}
    on_device: State = {}
    for name, part in shardings.items():
        kinds = {sharding.memory_kind for sharding in jax.tree.leaves(part)}
        (on_host if placement.HOST in kinds else on_device)[name] = part
    return on_host, on_device


def _host_zeros(layout: ModelLayout, optimizer: Optimizer, shardings: State) -> State:
    """Returns zeros in the hosts' memory. No device holds them at any time, because all of them may
    be more than its memory.
    """
    declared = parts(layout, optimizer)
    state: State = {}
    for part, part_shardings in shardings.items():
        state[part] = {}
        for name, sharding in part_shardings.items():
            leaf = declared[part].leaves[name]
            local = np.zeros(sharding.shard_shape(leaf.shape), leaf.dtype)
            state[part][name] = jax.make_array_from_callback(
                leaf.shape, sharding, lambda index, local=local: local
            )
    return state


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
