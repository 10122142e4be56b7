"""A layer in two halves of its sequences: they are independent, so XLA runs the collectives of one
beside the matmuls of the other.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.model.contract import Context, Layer, Sums
from sharding_rules import Shard


def in_halves(
    layer: Layer, shard: Shard, x: jax.Array, ctx: Context
) -> tuple[jax.Array, Any, Sums]:
    """(output, cache, sums) of a layer; computed at once in generation, and if a device's sequences
    are not even in number.

    A half has half of the sequences of every device, so that none moves between devices.

    Args:
      layer: called once for each half; its sums are added. x: [B, S, D] or [S, B, D], as
      `ctx.tokens` says, like the output. ctx: of `batch`, `shared` and the dropout's indices, those
      arrays are divided whose first dimension is B.
    """
    axis = ctx.tokens.index("batch")
    rows, ways = x.shape[axis], shard.n_shards(shard.axes_for("batch"))
    if ctx.cache is not None or rows % (2 * ways):
        return layer(x, ctx)
    halves = []
    for number in range(2):
        take = partial(_half, number, ways)
        of_rows = partial(
            jax.tree.map,
            lambda leaf, take=take: take(leaf) if leaf.ndim and leaf.shape[0] == rows else leaf,
        )
        dropout = ctx.dropout and dataclasses.replace(
            ctx.dropout, keys=take(ctx.dropout.keys), indices=of_rows(ctx.dropout.indices)
        )
        own = dataclasses.replace(
            ctx, batch=of_rows(dict(ctx.batch)), dropout=dropout, shared=of_rows(ctx.shared)
        )
        halves.append(layer(shard(take(x, axis), *ctx.residual), own))
    (y, _, sums), (z, _, more) = halves
    both = [a.reshape(*a.shape[:axis], ways, -1, *a.shape[axis + 1 :]) for a in (y, z)]
    joined = jnp.concatenate(both, axis + 1).reshape(x.shape)
    return shard(joined, *ctx.residual), None, jax.tree.map(jnp.add, sums, more)


def _half(number: int, ways: int, x: jax.Array, axis: int = 0) -> jax.Array:
    """The first or second half of each of `ways` equal blocks of a dimension."""
    blocks = x.reshape(*x.shape[:axis], ways, 2, -1, *x.shape[axis + 1 :])
    return lax.index_in_dim(blocks, number, axis + 1, keepdims=False).reshape(
        *x.shape[:axis], -1, *x.shape[axis + 1 :]
    )
