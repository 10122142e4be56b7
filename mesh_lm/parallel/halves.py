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
    """Returns (output, cache, sums) of a layer; computed at once in generation, and if a device's
    sequences are not even in number.

    A half has half of the sequences of every device, so that none moves between devices.

    Args:
      layer: called once for each half; its sums are added.
      x: [B, S, D] or [S, B, D], as `ctx.tokens` says, like the output.
      ctx: arrays of `batch`, `shared` and the dropout's indices are divided if their first
        dimension is B.
    """
    axis = ctx.tokens.index("batch")
    n_sequences = x.shape[axis]
    n_shards = shard.n_shards(shard.axes_for("batch"))
    if ctx.cache is not None or n_sequences % (2 * n_shards):
        return layer(x, ctx)

    def run_half(number: int) -> tuple[jax.Array, Any, Sums]:
        take = partial(_half, number, n_shards)

        def take_rows(tree: Any) -> Any:
            return jax.tree.map(
                lambda x: take(x) if x.ndim and x.shape[0] == n_sequences else x, tree
            )

        dropout = ctx.dropout
        if dropout:
            dropout = dataclasses.replace(
                dropout, keys=take(dropout.keys), indices=take_rows(dropout.indices)
            )
        half_ctx = dataclasses.replace(
            ctx, batch=take_rows(dict(ctx.batch)), dropout=dropout, shared=take_rows(ctx.shared)
        )
        return layer(shard(take(x, axis), *ctx.residual), half_ctx)

    first, _, first_sums = run_half(0)
    second, _, second_sums = run_half(1)
    # Back to the order of the sequences: each device's first half, then its second.
    blocks = [
        half.reshape(*half.shape[:axis], n_shards, -1, *half.shape[axis + 1 :])
        for half in (first, second)
    ]
    joined = jnp.concatenate(blocks, axis + 1).reshape(x.shape)
    return shard(joined, *ctx.residual), None, jax.tree.map(jnp.add, first_sums, second_sums)


def _half(number: int, n_blocks: int, x: jax.Array, axis: int = 0) -> jax.Array:
    """Returns the first or second half of each of `n_blocks` equal blocks of a dimension."""
    blocks = x.reshape(*x.shape[:axis], n_blocks, 2, -1, *x.shape[axis + 1 :])
    halves = lax.index_in_dim(blocks, number, axis + 1, keepdims=False)
    return halves.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
