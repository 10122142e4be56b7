"""DiLoCo (arXiv 2311.08105): islands that train apart, and the outer step that brings them together
every optimizer.outer_steps steps.

An island is a slice of the mesh along `island`. A step is manual over that axis, and so sends
nothing over it: each island makes an ordinary step (`mesh_lm.training.step`) with its own weights,
moments and part of the batch. The outer step is a program of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from mesh_lm.model import Batch
from mesh_lm.optim import Optimizer, outer_update
from mesh_lm.parallel.engine import batch_sharding, leaf_spec
from mesh_lm.parallel.layout import ModelLayout
from mesh_lm.state import State, state_shardings
from mesh_lm.state.islands import MOMENTUM, SHARED, WEIGHTS
from sharding_rules import ISLAND

_COUNTERS = ("step", "skipped")
"""Counters that all islands share."""


def on_each(
    step: Callable[[State, Batch], tuple[State, dict[str, jax.Array]]], layout: ModelLayout
) -> Callable[..., Any]:
    """Returns a function (state of all islands, global batch) -> (state, metrics), in which each
    island makes this step with its own part.

    Nothing is sent from one island to another, the metrics included: a process reads those of its
    own islands' first one. But "skipped" is that of all islands up to the last outer step, so that
    all processes decide the same from it.
    """

    def on_island(
        shared: State, own: State, batch: Batch
    ) -> tuple[State, State, dict[str, jax.Array]]:
        own = jax.tree.map(lambda x: x[0], own)
        good = own["recent"][0, 0].astype(jnp.int32)  # steps that this island did not skip
        plain = {name: x for name, x in own.items() if name != WEIGHTS}
        after, metrics = step(
            {
                **plain,
                "params": own[WEIGHTS],
                "step": shared["step"],
                "skipped": shared["step"] - good,
            },
            batch,
        )
        own = {name: after["params" if name == WEIGHTS else name] for name in own}
        return (
            {"step": after["step"]},
            jax.tree.map(lambda x: x[None], own),
            {**metrics, "skipped": shared["skipped"]},
        )

    def run(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        own = {name: x for name, x in state.items() if name not in (*SHARED, *_COUNTERS)}
        counters = {name: state[name] for name in _COUNTERS}
        spec = layout.shard.restrict(batch_sharding(layout).spec, frozenset({ISLAND}))
        of_batch = {name: leaf_spec(spec, x.shape) for name, x in batch.items()}
        each, same = PartitionSpec(ISLAND), PartitionSpec()
        island = _on_islands(on_island, layout, (same, each, of_batch), (same, each, same))
        counted, own, metrics = island(counters, own, dict(batch))
        return {**state, **counted, **own}, metrics

    return run


def outer_step(layout: ModelLayout, optimizer: Optimizer) -> jax.stages.Wrapped:
    """Returns the jitted outer step, state -> state: the islands average their weights, once, and
    continue from the new anchor.

    It donates the state. It is the only program that sends something over `island`: the fp32
    weights, in one all-reduce. The islands keep their moments.
    """

    def on_island(
        anchor: Any, momentum: Any, weights: Any, recent: jax.Array, step: jax.Array
    ) -> tuple[Any, ...]:
        n = lax.axis_size(ISLAND)
        mean = jax.tree.map(lambda x: lax.psum(x[0], ISLAND) / n, weights)
        anchor, momentum = outer_update(optimizer.config, anchor, momentum, mean)
        skipped = lax.psum(step - recent[0, 0, 0].astype(jnp.int32), ISLAND)
        return anchor, momentum, jax.tree.map(lambda x: x[None], anchor), skipped

    def run(state: State) -> State:
        each, same = PartitionSpec(ISLAND), PartitionSpec()
        outer = _on_islands(
            on_island, layout, (same, same, each, each, same), (same, same, each, same)
        )
        with jax.named_scope("outer_step"):
            anchor, momentum, own, skipped = outer(
                state["params"], state[MOMENTUM], state[WEIGHTS], state["recent"], state["step"]
            )
        return {**state, "params": anchor, MOMENTUM: momentum, WEIGHTS: own, "skipped": skipped}

    return jax.jit(run, donate_argnums=0, out_shardings=state_shardings(layout, optimizer))


def _on_islands(
    f: Callable[..., Any], layout: ModelLayout, in_specs: Any, out_specs: Any
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
