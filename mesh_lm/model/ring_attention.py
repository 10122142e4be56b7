"""Ring attention (Liu et al., arXiv 2310.01889): keys and values travel around a mesh axis, beside
the attention of those received before.

Tokens are in zig-zag order (`sharding_rules.token_order`): of 2 n chunks, the shard i of n has i
and 2 n - 1 - i. At step t it has the keys of the shard j = i - t (mod n). Its last chunk sees the
first chunk of j, all of it. Besides, if j < i, its first chunk sees the first one of j, and
otherwise its last chunk sees the last one of j: two blocks of chunks at each step, on every device.

The backward pass goes around again, and the gradients of the keys travel with them, so a device
holds the keys of two shards at most. These gradients are in fp32 from the kernel's sums to the end,
also while they travel: in bf16 each device would round the sum of all before it, and the error of
dk and dv over 8 devices would be 1.9 times that of one, over 16 devices 2.7 times.

Sizes: B batch, S tokens of one device, N query heads, K kv heads, H head dim, C = S / 2 tokens of a
chunk. Chunks are [2, B, C, ...].
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import attention_gradients, flash_attention, merge


def ring_attention(
    axis: str,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    sinks: jax.Array | None,
    features: Mapping[str, Any],
) -> jax.Array:
    """Causal attention [B, S, N, H] of this device's queries over the keys of all shards along the
    axis. Arguments as of `gather`.
    """
    ring = Ring(axis, lax.axis_size(axis), features)
    # The ids of all tokens are fewer bytes than one shard's keys, and one gather has less latency
    # than a permute at each step.
    ids = None if segment_ids is None else lax.all_gather(_chunks(segment_ids), axis)
    return _whole(_ring(ring, _chunks(q), jnp.stack([_chunks(k), _chunks(v)]), ids, sinks))


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """The steps of a ring, and the blocks of each."""

    axis: str
    size: int
    features: Mapping[str, Any]

    @property
    def place(self) -> jax.Array:
        """The number of this shard."""
        return lax.axis_index(self.axis)

    def steps(self, C: int) -> list[int]:
        """The steps t at which some shard has keys that a query sees. With a window, these are the
        nearest in both directions.
        """
        window = self.features.get("window")
        # chunks from a query to the farthest key
        far = self.size if window is None else (window - 2 + C) // C
        return [t for t in range(self.size) if min(t, self.size - t) <= far]

    def walk(self, C: int, body: Callable[[Any, jax.Array, int, int], Any], carry: Any) -> Any:
        """`carry` after `body(carry, t, came, goes)` for each step t > 0.

        came: how many devices further keys are than at the last step; goes: how many further they
        will be at the next one. came is 0 at the first of these steps, and goes at the last one.
        """
        steps = self.steps(C)
        # before the first of these steps, between them, after the last
        hops = [0, *[b - a for a, b in itertools.pairwise(steps[1:])], 0]
        of_step = [(t, hops[m], hops[m + 1]) for m, t in enumerate(steps[1:])]
        for (came, goes), run in itertools.groupby(of_step, lambda step: step[1:]):
            numbers = jnp.array([t for t, _, _ in run], jnp.int32)
            if len(numbers) == 1:
                carry = body(carry, numbers[0], came, goes)
            else:
                carry = lax.scan(
                    lambda c, t, came=came, goes=goes: (body(c, t, came, goes), None),
                    carry,
                    numbers,
                )[0]
        return carry

    def first_hop(self, C: int) -> int:
        """How far the keys go after step 0."""
        return [*self.steps(C), 0][1]

    def send(self, x: jax.Array, by: int) -> jax.Array:
        """The array of the device `by` places before this one."""
        if by % self.size == 0:
            return x
        return lax.ppermute(x, self.axis, [(i, (i + by) % self.size) for i in range(self.size)])

    def blocks(self, t: jax.Array | int) -> Iterator[Block]:
        """The blocks of step t."""
        i = self.place
        j = (i - t) % self.size
        yield Block(1, 0, j, 2 * self.size - 1 - i - j)
        if not (isinstance(t, int) and t == 0):  # where `diagonal` has these
            which = jnp.where(j < i, 0, 1)
            yield Block(which, which, j, jnp.abs(i - j))

    def kernel(self, block: Block, C: int, ids: jax.Array | None) -> dict[str, Any]:
        """The arguments of the kernel for a block besides its matrices."""
        given: dict[str, Any] = (
            {}
            if ids is None
            else {
                "segment_ids": ids[self.place, block.q],
                "kv_segment_ids": ids[block.shard, block.kv],
            }
        )
        masks = (
            {"causal": False}
            if self.features.get("window") is None
            else {"q_offset": block.distance * C}
        )
        return {**self.features, **given, **masks}

    def diagonal(self, ids: jax.Array | None) -> dict[str, Any]:
        """The same for both chunks of this shard, each with its own keys, [2 B, C, ...]."""
        return {**self.features, **({} if ids is None else {"segment_ids": _flat(ids[self.place])})}


class Block(NamedTuple):
    """A chunk of this shard's queries, and a chunk of the keys of a shard, which all come
    before.
    """

    q: Any
    kv: Any
    shard: Any
    distance: Any
    """Chunks from the keys to the queries."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    ring: Ring, q: jax.Array, kv: jax.Array, ids: jax.Array | None, sinks: jax.Array | None
) -> jax.Array:
    """q: [2, B, C, N, H]. kv: keys and values, [2, 2, B, C, K, H]. ids: of all shards, [n, 2, B,
    C].
    """
    return _forward(ring, q, kv, ids, sinks)[0]


def _forward(
    ring: Ring, q: jax.Array, kv: jax.Array, ids: jax.Array | None, sinks: jax.Array | None
) -> tuple[jax.Array, tuple[Any, ...]]:
    (_, B, C, *_), own = q.shape, kv

    def add(
        done: tuple[jax.Array, jax.Array], kv: jax.Array, block: Block
    ) -> tuple[jax.Array, jax.Array]:
        k, v = kv[:, block.kv]
        part = flash_attention(q[block.q], k, v, return_lse=True, **ring.kernel(block, C, ids))
        y, lse = merge(done[0][block.q], done[1][block.q], *part)
        return _put(done[0], block.q, y), _put(done[1], block.q, lse)

    def step(carry: Any, t: jax.Array, came: int, goes: int) -> Any:
        done, kv = carry
        following = ring.send(kv, goes)
        for block in ring.blocks(t):
            done = add(done, kv, block)
        return done, following

    following = ring.send(own, ring.first_hop(C))
    k, v = map(_flat, own)
    y, lse = flash_attention(_flat(q), k, v, sinks=sinks, return_lse=True, **ring.diagonal(ids))
    done = y.reshape(2, B, C, *y.shape[2:]).astype(_sum_type(q)), lse.reshape(2, B, C, -1)
    for block in ring.blocks(0):
        done = add(done, own, block)
    (y, lse), _ = ring.walk(C, step, (done, following))
    y, lse = (
        checkpoint_name(y.astype(q.dtype), "attention_out"),
        checkpoint_name(lse, "attention_lse"),
    )
    return y, (q, kv, ids, sinks, y, lse)


def _backward(ring: Ring, residuals: tuple[Any, ...], dy: jax.Array) -> tuple[Any, ...]:
    q, own, ids, sinks, y, lse = residuals
    C = q.shape[2]

    def add(
        dq: jax.Array, d_kv: jax.Array, kv: jax.Array, block: Block
    ) -> tuple[jax.Array, jax.Array]:
        a, b = block.q, block.kv
        k, v = kv[:, b]
        of_q, *of_kv, _ = attention_gradients(
            q[a], k, v, y[a], lse[a], dy[a], unrounded=True, **ring.kernel(block, C, ids)
        )
        return _put(dq, a, dq[a] + of_q), lax.dynamic_update_index_in_dim(
            d_kv, d_kv[:, b] + jnp.stack(of_kv), b, 1
        )

    def step(carry: Any, t: jax.Array, came: int, goes: int) -> Any:
        dq, kv, d_kv = carry
        following = ring.send(kv, goes)
        d_kv = ring.send(d_kv, came)
        for block in ring.blocks(t):
            dq, d_kv = add(dq, d_kv, kv, block)
        return dq, following, d_kv

    # The block of this shard's own keys that is not on the diagonal is computed while the first
    # keys travel, and those on it while the gradients of the last ones go back.
    following = ring.send(own, ring.first_hop(C))
    wide = _sum_type(q)
    dq, here = jnp.zeros(q.shape, wide), jnp.zeros(own.shape, wide)
    for block in ring.blocks(0):
        dq, here = add(dq, here, own, block)
    dq, _, d_kv = ring.walk(C, step, (dq, following, jnp.zeros(own.shape, wide)))
    d_kv = ring.send(d_kv, -ring.steps(C)[-1])
    k, v = map(_flat, own)
    of_q, *of_kv, d_sinks = attention_gradients(
        _flat(q),
        k,
        v,
        _flat(y),
        _flat(lse),
        _flat(dy),
        sinks=sinks,
        unrounded=True,
        **ring.diagonal(ids),
    )
    d_kv = d_kv + here + jnp.stack(of_kv).reshape(own.shape)
    d_sinks = None if sinks is None or d_sinks is None else d_sinks.astype(sinks.dtype)
    return (dq + of_q.reshape(q.shape)).astype(q.dtype), d_kv.astype(own.dtype), None, d_sinks


_ring.defvjp(_forward, _backward)


def _sum_type(x: jax.Array) -> Any:
    """The type of sums of such arrays: fp32, as the kernels sum; fp64 for fp64."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _chunks(x: jax.Array) -> jax.Array:
    """[B, S, ...] as [2, B, C, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), 1, 0)


def _whole(x: jax.Array) -> jax.Array:
    """[2, B, C, ...] as [B, S, ...]."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _flat(x: jax.Array) -> jax.Array:
    """[2, B, C, ...] as [2 B, C, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _put(x: jax.Array, chunk: Any, new: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), chunk, 0)
