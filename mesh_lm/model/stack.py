"""The trainer's side of a model: the scan over the layers of a segment, and embed -> segments -> loss, in which no sum can be lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from mesh_lm.errors import ConfigError
from mesh_lm.model.contract import Batch, Context, Model, Sums
from mesh_lm.model.dropout import Dropout
from mesh_lm.model.remat import remat
from mesh_lm.segments import Segment


def forward(
    bind: Callable[[Any], Model], segments: Sequence[Segment], params: Any, batch: Batch, dropout: Dropout | None = None,
    scale: jax.Array | float = 1.0,
) -> tuple[jax.Array, Sums]:  # fmt: skip
    """(objective * scale, sums) of one microbatch. Arrays among the sums have a segment's layers in front: "moe/load" [L, E].

    Args:
      bind: makes the module of its parameters.
      segments: of the model, in order.
    """
    model, total, first = bind(params), {}, 0
    ctx = Context(batch, dropout, model.prepare(batch))
    x = model.embed(batch, dropout)
    for segment in segments:
        x, _, sums = fold(model, segment, x, ctx, first)
        total, first = added(total, sums), first + segment.n_layers
    total = added(total, loss_sums(model, x, batch, dropout))
    return total["objective"] * scale, total


def loss_sums(model: Model, x: jax.Array, batch: Batch, dropout: Dropout | None) -> Sums:
    """What the model's loss returns. Raises ConfigError for arrays, which layers alone may return."""
    sums = model.loss(x, batch, dropout)
    if arrays := [name for name, value in sums.items() if value.ndim]:
        raise ConfigError(f"{type(model).__name__}.loss returns {arrays[0]!r} {sums[arrays[0]].shape}; its sums are scalars")
    return sums


def hidden_states(
    model: Model, segments: Sequence[Segment], batch: Batch, cache: Any = None, start: int | jax.Array = 0
) -> tuple[jax.Array, Any]:
    """(activations after the last layer, cache) without dropout, as text is generated and scored. cache, start: as in `Context`.

    Nothing is learnt from such a batch: where it has no weights, they are 0.
    """
    batch = {"weights": jnp.zeros(batch["tokens"].shape, jnp.float32), **batch}
    x, first, ctx = model.embed(batch, None), 0, Context(batch, None, model.prepare(batch), cache=cache, start=start)
    for segment in segments:
        x, cache, _ = fold(model, segment, x, dataclasses.replace(ctx, cache=cache), first)
        first += segment.n_layers
    return x, cache


def added(a: Sums, b: Sums) -> Sums:
    """Entry by entry; what one of them lacks counts as zero."""
    return {name: a[name] + b[name] if name in a and name in b else (a | b)[name] for name in (a | b)}


@jax.named_scope("layers")
def fold(
    model: Model, segment: Segment, x: jax.Array, ctx: Context, first: int | jax.Array = 0, skip: int | jax.Array = 0,
    count: jax.Array | None = None,
) -> tuple[jax.Array, Any, Sums]:  # fmt: skip
    """(x, cache, sums) after the layers of a segment whose parameters the model holds, one after another.

    Args:
      x: [B, S, D], sharded like the residual stream.
      first: number, in the whole model, of the first of the layers.
      skip, count: rows [skip, skip + count) of the stacked parameters are the layers; all others are passed over. count=None: all are.
    """
    graph, stacked = nnx.split(getattr(model, segment.name))
    n, period = jax.tree.leaves(stacked)[0].shape[0], segment.period
    rows = stacked if period == 1 else jax.tree.map(lambda w: w.reshape(n // period, period, *w.shape[1:]), stacked)

    # Weights are indexed inside the layer: picked outside, they would become residuals, a copy of the model. The conditional lies inside
    # what remat repeats for the same reason.
    def layer(x: jax.Array, cache: Any, weights: Any, row: jax.Array, i: int) -> tuple[jax.Array, Any, Sums]:
        weights = weights if period == 1 else jax.tree.map(lambda w: w[i], weights)
        here = dataclasses.replace(ctx, number=first + (row + i - skip), place=i, cache=cache)
        if count is None:
            return nnx.merge(graph, weights)(x, here)

        def run() -> tuple[jax.Array, Any, Sums]:
            return pinned(*nnx.merge(graph, weights)(x, here))

        def idle() -> tuple[jax.Array, Any, Sums]:
            return pinned(x, cache, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(run)[2]))

        return lax.cond((row + i >= skip) & (row + i < skip + count), run, idle)

    def pinned(x: jax.Array, cache: Any, sums: Sums) -> tuple[jax.Array, Any, Sums]:  # branches must agree on the sharding
        return model.shard(x, "batch", "seq_resid", "embed"), cache, sums

    def step(carry: tuple[jax.Array, Any], scanned: tuple[Any, jax.Array]) -> tuple[tuple[jax.Array, Any], Sums]:
        (x, cache), (weights, row), found = carry, scanned, []
        for i in range(period):
            x, cache, sums = remat(segment.remat)(partial(layer, i=i))(x, cache, weights, row)
            found.append(sums)
        like = {name: jnp.zeros_like(value) for sums in found for name, value in sums.items()}
        return (x, cache), {name: jnp.stack([sums.get(name, zero) for sums in found]) for name, zero in like.items()}

    (x, cache), found = lax.scan(step, (x, ctx.cache), (rows, jnp.arange(0, n, period)))
    scalars = {name: each.sum() for name, each in found.items() if each.ndim == 2}
    arrays = {f"{segment.name}/{name}": each.reshape(n, *each.shape[2:]) for name, each in found.items() if each.ndim > 2}
    return x, cache, scalars | arrays
