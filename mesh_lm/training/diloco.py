"""DiLoCo (Douillard et al., arXiv 2311.08105): islands that train apart, and the outer step that
brings them together every diloco.outer_steps steps.

An island is a slice of the mesh along `island`. A step is manual over that axis, and so sends
nothing over it: each island makes an ordinary step (`mesh_lm.training.step`) with its own weights,
moments and part of the batch. The outer step is a program of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from mesh_lm.config import DilocoConfig
from mesh_lm.model import Batch
from mesh_lm.optim import Optimizer, Params
from mesh_lm.parallel.engine import batch_sharding, leaf_spec
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, state_shardings
from mesh_lm.state.diloco import MOMENTUM, SHARED, WEIGHTS
from sharding_rules import ISLAND

_COUNTERS = ("step", "skipped")
"""Counters that all islands share."""
_REPLICATED = PartitionSpec()
_PER_ISLAND = PartitionSpec(ISLAND)
"""The spec of arrays with the islands as leading dimension."""

Metrics = dict[str, jax.Array]


def on_each_island(
    step: Callable[[State, Batch], tuple[State, Metrics]], layout: ModelLayout
) -> Callable[[State, Batch], tuple[State, Metrics]]:
    """Returns a function (state of all islands, global batch) -> (state, metrics), in which each
    island makes this step with its own part.

    Nothing is sent from one island to another, the metrics included: a process reads those of the
    first of its own islands. But "skipped" counts the steps of all islands up to the last outer
    step, so that all processes decide the same from it.
    """

    def on_island(
        counters: State, island_state: State, batch: Batch
    ) -> tuple[State, State, Metrics]:
        # A squeeze, which leaves arrays where they are, in the hosts' memory too.
        island_state = jax.tree.map(lambda x: lax.squeeze(x, (0,)), island_state)
        # recent[0, 0] counts the steps that this island did not skip.
        n_updates = island_state["recent"][0, 0].astype(jnp.int32)
        state = {name: x for name, x in island_state.items() if name != WEIGHTS}
        state["params"] = island_state[WEIGHTS]
        state["step"] = counters["step"]
        state["skipped"] = counters["step"] - n_updates

        new_state, metrics = step(state, batch)

        new_island_state = {
            name: new_state["params" if name == WEIGHTS else name] for name in island_state
        }
        new_island_state = jax.tree.map(lambda x: lax.expand_dims(x, (0,)), new_island_state)
        metrics = {**metrics, "skipped": counters["skipped"]}
        return {"step": new_state["step"]}, new_island_state, metrics

    def run(state: State, batch: Batch) -> tuple[State, Metrics]:
        island_state = {name: x for name, x in state.items() if name not in (*SHARED, *_COUNTERS)}
        counters = {name: state[name] for name in _COUNTERS}
        leaf = layout.shard.restrict(batch_sharding(layout).spec, frozenset({ISLAND}))
        batch_specs = {name: leaf_spec(leaf, x.shape) for name, x in batch.items()}
        island_step = _on_islands(
            on_island,
            layout,
            in_specs=(_REPLICATED, _PER_ISLAND, batch_specs),
            out_specs=(_REPLICATED, _PER_ISLAND, _REPLICATED),
        )
        new_counters, island_state, metrics = island_step(counters, island_state, dict(batch))
        return {**state, **new_counters, **island_state}, metrics

    return run


def outer_step(layout: ModelLayout, optimizer: Optimizer) -> jax.stages.Wrapped:
    """Returns the jitted outer step, state -> state: the islands average their weights, once, and
    continue from the new anchor.

    It donates the state. It is the only program that sends something over `island`: the fp32
    weights, in one all-reduce. The islands keep their moments.
    """

    def on_island(
        anchor: Params, momentum: Params, weights: Params, recent: jax.Array, step: jax.Array
    ) -> tuple[Params, Params, Params, jax.Array]:
        # The all-reduce over islands. Nothing hides it, but it comes once in outer_steps steps.
        n_islands = lax.axis_size(ISLAND)
        mean = jax.tree.map(lambda x: lax.psum(x[0], ISLAND) / n_islands, weights)
        anchor, momentum = outer_update(optimizer.diloco, anchor, momentum, mean)
        # From here on all islands know how many steps were skipped, an integer in each.
        skipped = lax.psum(step - recent[0, 0, 0].astype(jnp.int32), ISLAND)
        return anchor, momentum, jax.tree.map(lambda x: x[None], anchor), skipped

    def run(state: State) -> State:
        outer = _on_islands(
            on_island,
            layout,
            in_specs=(_REPLICATED, _REPLICATED, _PER_ISLAND, _PER_ISLAND, _REPLICATED),
            out_specs=(_REPLICATED, _REPLICATED, _PER_ISLAND, _REPLICATED),
        )
        with jax.named_scope("outer_step"):
            anchor, momentum, weights, skipped = outer(
                state["params"], state[MOMENTUM], state[WEIGHTS], state["recent"], state["step"]
            )
        return {**state, "params": anchor, MOMENTUM: momentum, WEIGHTS: weights, "skipped": skipped}

    # The old state is donated: an outer step needs no second copy of the weights.
    return jax.jit(run, donate_argnums=0, out_shardings=state_shardings(layout, optimizer))


def outer_update(
    config: DilocoConfig, anchor: Params, momentum: Params, mean: Params
) -> tuple[Params, Params]:
    """Returns (the new anchor, the new momentum) of SGD with Nesterov momentum on the mean change
    of the islands' weights.

    anchor: the weights from which all islands started. mean: the mean of the islands' weights after
    their steps. The outer gradient is anchor - mean, and the anchor moves by minus the learning
    rate times (gradient + decay * momentum), as PyTorch's Nesterov SGD does.
    """
    gradient = jax.tree.map(lambda a, m: a - m, anchor, mean)
    rule = optax.trace(config.outer_momentum, nesterov=True)
    moves, state = rule.update(cast(Any, gradient), optax.TraceState(cast(Any, momentum)))
    anchor = jax.tree.map(lambda a, move: a - config.outer_learning_rate * move, anchor, moves)
    return anchor, cast(Params, cast(optax.TraceState, state).trace)


def _on_islands(
    f: Callable[..., Any], layout: ModelLayout, *, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Returns a function that calls f on each island's arrays, which XLA shards over the other mesh
    axes.
    """
    return jax.shard_map(
        f,
        mesh=layout.shard.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names={ISLAND},
        check_vma=False,
    )
