"""Ring attention (Liu et al., arXiv 2310.01889): keys and values travel around a mesh axis, beside the attention of those received before.

Tokens are in zig-zag order (`sharding_rules.token_order`): of 2 n chunks, the shard i of n has i and 2 n - 1 - i. At step t it has the
keys of the shard j = i - t (mod n). Its last chunk sees the first chunk of j, all of it. Besides, if j < i, its first chunk sees the first
one of j, and otherwise its last chunk sees the last one of j: two blocks of chunks at each step, on every device.

The backward pass goes around again, and the gradients of the keys travel with them, so a device holds the keys of two shards at most.

Sizes: B batch, S tokens of one device, N query heads, K kv heads, H head dim, C = S / 2 tokens of a chunk. Chunks are [2, B, C, ...].
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import Features, attention_gradients, flash_attention, merge


class Keys(NamedTuple):
    """What travels: the keys, values and segment ids of a shard, in chunks."""

    k: jax.Array
    v: jax.Array
    ids: jax.Array | None


def ring_attention(
    axis: str, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, sinks: jax.Array | None, features: Features
) -> jax.Array:
    """Causal attention [B, S, N, H] of this device's queries over the keys of all shards along the axis. Arguments as of `gather`."""
    ring = Ring(axis, lax.axis_size(axis), features.get("window"), features)
    ids = None if segment_ids is None else _chunks(segment_ids)
    return _whole(_ring(ring, _chunks(q), _chunks(k), _chunks(v), ids, sinks))


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """The steps of a ring, and the blocks of each."""

    axis: str
    size: int
    window: int | None
    features: Features

    def steps(self, C: int) -> list[int]:
        """The steps t at which some shard has keys that a query sees. With a window, these are the nearest in both directions."""
        far = self.size if self.window is None else (self.window - 2 + C) // C  # chunks from a query to the farthest key
        return [t for t in range(self.size) if min(t, self.size - t) <= far]

    def walk(self, C: int, body: Callable[[Any, jax.Array, int, int], Any], carry: Any) -> Any:
        """`carry` after `body(carry, t, before, after)` for each step t but 0. before, after: devices that keys have come since the last
        step, and will go to the next one; 0: there is none.
        """
        steps = self.steps(C)
        before = [b - a for a, b in itertools.pairwise(steps)]
        of_step = list(zip(steps[1:], [0, *before[1:]], [*before[1:], 0], strict=True))
        for (came, goes), run in itertools.groupby(of_step, lambda step: step[1:]):
            numbers = jnp.array([t for t, _, _ in run], jnp.int32)
            if len(numbers) == 1:
                carry = body(carry, numbers[0], came, goes)
            else:
                carry = lax.scan(lambda c, t, came=came, goes=goes: (body(c, t, came, goes), None), carry, numbers)[0]
        return carry

    def send(self, tree: Any, by: int) -> Any:
        """The tree of the device `by` places before this one."""
        if by % self.size == 0:
            return tree
        return lax.ppermute(tree, self.axis, [(i, (i + by) % self.size) for i in range(self.size)])

    def blocks(self, t: jax.Array | int, C: int) -> Iterator[tuple[Any, Any, Any]]:
        """(chunk of this shard's queries, chunk of the keys, tokens from the one's start to the other's) of step t > 0."""
        i = lax.axis_index(self.axis)
        j = (i - t) % self.size
        yield 1, 0, (2 * self.size - 1 - i - j) * C
        which = jnp.where(j < i, 0, 1)
        yield which, which, jnp.abs(i - j) * C

    def kernel(self, offset: Any, q_ids: jax.Array | None, keys: Keys) -> dict[str, Any]:
        """The arguments of the kernel for queries that come after all of these keys."""
        ids = {} if q_ids is None else {"segment_ids": q_ids, "kv_segment_ids": keys.ids}
        return {**self.features, **ids, **({"causal": False} if self.window is None else {"q_offset": offset})}

    def diagonal(self, q_ids: jax.Array | None) -> dict[str, Any]:
        """The arguments of the kernel for both of this shard's chunks, each with its own keys, [2 B, C, ...]."""
        return {**self.features, **({} if q_ids is None else {"segment_ids": _flat(q_ids)})}


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None, sinks: jax.Array | None) -> jax.Array:
    return _forward(ring, q, k, v, ids, sinks)[0]


def _forward(
    ring: Ring, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None, sinks: jax.Array | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    (_, B, C, *_), own = q.shape, Keys(k, v, ids)

    def add(done: tuple[jax.Array, jax.Array], keys: Keys, a: Any, b: Any, offset: Any) -> tuple[jax.Array, jax.Array]:
        part = _take(keys, b)
        y = flash_attention(q[a], part.k, part.v, return_lse=True, **ring.kernel(offset, _take(ids, a), part))
        return tuple(_put(x, a, new) for x, new in zip(done, merge(done[0][a], done[1][a], *y), strict=True))  # pyright: ignore[reportReturnType]

    def step(carry: Any, t: jax.Array, came: int, goes: int) -> Any:
        done, keys = carry
        following = ring.send(keys, goes)
        for block in ring.blocks(t, C):
            done = add(done, keys, *block)
        return done, following

    first = ring.send(own, [*ring.steps(C), 0][1])
    y, lse = flash_attention(_flat(q), _flat(k), _flat(v), sinks=sinks, return_lse=True, **ring.diagonal(ids))
    done = y.reshape(2, B, C, *y.shape[2:]).astype(jnp.float32), lse.reshape(2, B, C, -1)
    done = add(done, own, 1, 0, (2 * (ring.size - lax.axis_index(ring.axis)) - 1) * C)
    (y, lse), _ = ring.walk(C, step, (done, first))
    y, lse = checkpoint_name(y.astype(q.dtype), "attention_out"), checkpoint_name(lse, "attention_lse")
    return y, (q, k, v, ids, sinks, y, lse)


def _backward(ring: Ring, residuals: tuple[Any, ...], dy: jax.Array) -> tuple[Any, ...]:
    q, k, v, ids, sinks, y, lse = residuals
    C, own = q.shape[2], Keys(k, v, ids)

    def gradients(keys: Keys, a: Any, b: Any, offset: Any) -> tuple[jax.Array, ...]:
        part = _take(keys, b)
        return attention_gradients(q[a], part.k, part.v, y[a], lse[a], dy[a], **ring.kernel(offset, _take(ids, a), part))[:3]

    def step(carry: Any, t: jax.Array, came: int, goes: int) -> Any:
        dq, keys, d_keys = carry
        following, d_keys = ring.send(keys, goes), ring.send(d_keys, came)
        for a, b, offset in ring.blocks(t, C):
            of_q, *of_keys = gradients(keys, a, b, offset)
            dq = _put(dq, a, dq[a] + of_q)
            d_keys = tuple(_put(d, b, d[b] + new) for d, new in zip(d_keys, of_keys, strict=True))
        return dq, following, d_keys

    steps = ring.steps(C)
    following = ring.send(own, [*steps, 0][1])
    # The block of this shard's own keys that is not on the diagonal is computed while the first keys travel, and those on it while the
    # gradients of the last ones go back.
    of_q, *off_diagonal = gradients(own, 1, 0, (2 * (ring.size - lax.axis_index(ring.axis)) - 1) * C)
    dq = _put(jnp.zeros(q.shape, jnp.float32), 1, of_q.astype(jnp.float32))
    zeros = tuple(jnp.zeros(x.shape, x.dtype) for x in (k, v))
    dq, _, d_keys = ring.walk(C, step, (dq, following, zeros))
    d_keys = ring.send(d_keys, -steps[-1])
    of_q, *diagonal, d_sinks = attention_gradients(*map(_flat, (q, k, v, y, lse, dy)), sinks=sinks, **ring.diagonal(ids))
    if sinks is not None:
        d_sinks = d_sinks.astype(sinks.dtype)
    dq = dq + of_q.reshape(q.shape)
    dk, dv = (
        (d.astype(jnp.float32) + near.reshape(d.shape)).at[0].add(off).astype(d.dtype)
        for d, near, off in zip(d_keys, diagonal, off_diagonal, strict=True)
    )
    return dq.astype(q.dtype), dk, dv, None, d_sinks


_ring.defvjp(_forward, _backward)


def _chunks(x: jax.Array) -> jax.Array:
    """[B, S, ...] as [2, B, C, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), 1, 0)


def _whole(x: jax.Array) -> jax.Array:
    """[2, B, C, ...] as [B, S, ...]."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _flat(x: jax.Array) -> jax.Array:
    """[2, B, C, ...] as [2 B, C, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _take(tree: Any, chunk: Any) -> Any:
    return jax.tree.map(lambda x: x[chunk], tree)


def _put(x: jax.Array, chunk: Any, new: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), chunk, 0)
