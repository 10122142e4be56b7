"""Attention over sequences that mesh axes shard (context parallelism): the exchange of keys, values
or heads over each axis.

The functions run on local shards: inside `Shard.shard_map`, or where the axes are manual. Tokens
are in the order of `sharding_rules.token_order`: over an axis of n shards with gather or ring, the
shard i has the chunks i and 2 n - 1 - i of 2 n.

Sizes: B batch, S tokens of one device, T tokens of all, N query heads, K kv heads, H head dim, C =
S / 2 tokens of a chunk.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from mesh_lm.model.ring_attention import ring_attention
from pallas_kernels import flash_attention
from sharding_rules.rules import Exchange


def attend(
    exchanges: Sequence[tuple[str, Exchange]],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    sinks: jax.Array | None,
    features: Mapping[str, Any],
) -> jax.Array:
    """Returns causal attention [B, S, N, H] of this device's queries q [B, S, N, H] over the keys k
    and v [B, S, K, H] of all shards.

    exchanges: mesh axes that shard the sequence, outermost first, and how each exchanges.
    segment_ids [B, S], sinks [N] and features as of `flash_attention`.
    """
    if not exchanges:
        return flash_attention(q, k, v, segment_ids=segment_ids, sinks=sinks, **features)
    *outer, (axis, exchange) = exchanges
    if exchange == "ulysses":
        return ulysses(axis, q, k, v, segment_ids, sinks, partial(attend, outer, features=features))
    if exchange == "ring":
        return ring_attention(axis, q, k, v, segment_ids, sinks, features)
    return gather(axis, q, k, v, segment_ids, sinks, features)


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the attention kernel on one device: numbers of queries, keys, heads and kv heads,
    and its masks.
    """

    S: int
    T: int
    N: int
    K: int
    causal: bool = True
    offset: bool = False
    """Whether the queries come after a traced number of keys."""
    lse: bool = False
    """Whether the log-sum-exp is returned."""
    sinks: bool = True
    """Whether the model's sinks take part, if it has any."""


def calls(
    exchanges: Sequence[tuple[int, Exchange]], S: int, N: int, K: int, window: int | None
) -> list[Call]:
    """Returns the kinds of calls that `attend` makes for S tokens and N heads of one device, by the
    size and exchange of each axis.
    """
    if not exchanges:
        return [Call(S, S, N, K)]
    *outer, (n, exchange) = exchanges
    if exchange == "ulysses":
        return calls(outer, S * n, N // n, K * repeats(K, n) // n, window)
    C = S // 2
    if exchange == "gather":
        return [Call(C, n * S, N, K, offset=True)]
    has_window = window is not None
    diagonal = Call(C, C, N, K, lse=True)
    other = Call(C, C, N, K, causal=has_window, offset=has_window, lse=True, sinks=False)
    return [diagonal, other]


def ulysses(
    axis: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    sinks: jax.Array | None,
    inner: Callable[..., jax.Array],
) -> jax.Array:
    """Returns attention by DeepSpeed-Ulysses (arXiv 2309.14509): an all-to-all gives each of n
    devices all tokens of N / n heads, another one gives them back.

    inner: attention of (q, k, v, segment_ids, sinks) over the tokens that one device then has. Kv
    heads that do not divide are repeated first, as few times as possible (`repeats`).
    """
    n = lax.axis_size(axis)
    B, S, N, H = q.shape
    copies = repeats(k.shape[2], n)
    k, v = (_repeated(x, copies) for x in (k, v))
    # One all-to-all for the three: each device's heads side by side.
    device_heads = [x.reshape(B, S, n, -1, H) for x in (q, k, v)]
    q_heads, kv_heads, _ = (x.shape[3] for x in device_heads)
    joined = jnp.concatenate(device_heads, axis=3)
    joined = lax.all_to_all(joined, axis, split_axis=2, concat_axis=1, tiled=True)[:, :, 0]
    q, k, v = jnp.split(joined, (q_heads, q_heads + kv_heads), axis=2)
    # remat=save_names saves these, so that the backward pass exchanges nothing again.
    q = checkpoint_name(q, "q")
    k = checkpoint_name(k, "k")
    v = checkpoint_name(v, "v")
    if segment_ids is not None:
        segment_ids = lax.all_gather(segment_ids, axis, axis=1, tiled=True)
    if sinks is not None:
        sinks = lax.dynamic_slice_in_dim(sinks, lax.axis_index(axis) * (N // n), N // n)
    y = inner(q, k, v, segment_ids, sinks)
    # Back: each device gets all heads of its own tokens.
    y = lax.all_to_all(y, axis, split_axis=1, concat_axis=2, tiled=True)
    return checkpoint_name(y, "attention_out")


def _repeated(kv: jax.Array, copies: int) -> jax.Array:
    """Returns keys or values [B, S, K, H] with each head `copies` times, side by side. The
    gradients of the copies are summed in fp32.
    """
    if copies == 1:
        return kv
    # The transpose of the conversion to fp32 rounds that sum, once. XLA removes both conversions
    # from the forward pass.
    wide = jnp.promote_types(kv.dtype, jnp.float32)
    return jnp.repeat(kv.astype(wide), copies, axis=2).astype(kv.dtype)


def repeats(kv_heads: int, n_devices: int) -> int:
    """Returns how often Ulysses repeats each kv head, so that every device gets as many."""
    return math.lcm(kv_heads, n_devices) // kv_heads


def gather(
    axis: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    sinks: jax.Array | None,
    features: Mapping[str, Any],
) -> jax.Array:
    """Returns attention for which each device gathers all keys and values; the gradients of its
    copies are summed and scattered. All are in memory at once.
    """
    n = lax.axis_size(axis)
    i = lax.axis_index(axis)
    C = q.shape[1] // 2
    # One all-gather for both. Its transpose is the reduce-scatter of their gradients.
    kv = _in_order(lax.all_gather(jnp.concatenate([k, v], axis=2), axis))
    k, v = jnp.split(kv, 2, axis=2)
    kv_segment_ids = None
    if segment_ids is not None:
        kv_segment_ids = _in_order(lax.all_gather(segment_ids, axis))

    def chunk(half: int, number: jax.Array) -> jax.Array:
        """Returns attention of one of this shard's two chunks, the chunk `number` of 2 n."""
        rows = slice(half * C, (half + 1) * C)
        ids: dict[str, Any] = {}
        if segment_ids is not None:
            ids = {"segment_ids": segment_ids[:, rows], "kv_segment_ids": kv_segment_ids}
        return flash_attention(
            q[:, rows], k, v, sinks=sinks, q_offset=number * C, **ids, **features
        )

    return jnp.concatenate([chunk(0, i), chunk(1, 2 * n - 1 - i)], axis=1)


def _in_order(x: jax.Array) -> jax.Array:
    """Returns the gathered shards [n, B, S, ...] as [B, T, ...], tokens in their own order."""
    n, B, S, *trailing_dims = x.shape
    halves = x.reshape(n, B, 2, S // 2, *trailing_dims)
    chunks = jnp.concatenate([halves[:, :, 0], halves[::-1, :, 1]])
    return jnp.moveaxis(chunks, 0, 1).reshape(B, n * S, *trailing_dims)
