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
    """Returns causal attention [B, S, N, H] of this device's queries over the keys of all shards
    along the axis. Arguments as of `gather`.
    """
    ring = Ring(axis, lax.axis_size(axis), features)
    # The ids of all tokens are fewer bytes than one shard's keys, and one gather has less latency
    # than a permute at each step.
    ids = None if segment_ids is None else lax.all_gather(_chunks(segment_ids), axis)
    kv = jnp.stack([_chunks(k), _chunks(v)])
    return _whole(_ring(ring, _chunks(q), kv, ids, sinks))


@dataclasses.dataclass(frozen=True, eq=False)
class Ring:
    """The steps of a ring, and the blocks of each."""

    axis: str
    size: int
    features: Mapping[str, Any]

    @property
    def shard_number(self) -> jax.Array:
        """The number of this shard."""
        return lax.axis_index(self.axis)

    def steps(self, C: int) -> list[int]:
        """Returns the steps t at which some shard has keys that a query sees. With a window, these
        are the nearest in both directions.
        """
        window = self.features.get("window")
        if window is None:
            return list(range(self.size))
        chunks_to_farthest_key = (window - 2 + C) // C
        return [t for t in range(self.size) if min(t, self.size - t) <= chunks_to_farthest_key]

    def walk(self, C: int, body: Callable[[Any, jax.Array, int, int], Any], carry: Any) -> Any:
        """Returns `carry` after `body(carry, t, last_hop, next_hop)` for each step t > 0.

        last_hop: how many devices further keys are than at the last step; next_hop: how many
        further they will be at the next one. The first is 0 at the first of these steps, the second
        at the last one.
        """
        steps = self.steps(C)[1:]
        hops = [0, *(b - a for a, b in itertools.pairwise(steps)), 0]
        walk = [(t, hops[m], hops[m + 1]) for m, t in enumerate(steps)]
        # Steps with the same hops are one loop.
        for (last_hop, next_hop), run in itertools.groupby(walk, lambda step: step[1:]):
            numbers = jnp.array([t for t, _, _ in run], jnp.int32)
            if len(numbers) == 1:
                carry = body(carry, numbers[0], last_hop, next_hop)
                continue

            def step(
                carry: Any, t: jax.Array, last_hop: int = last_hop, next_hop: int = next_hop
            ) -> tuple[Any, None]:
                return body(carry, t, last_hop, next_hop), None

            carry, _ = lax.scan(step, carry, numbers)
        return carry

    def first_hop(self, C: int) -> int:
        """Returns how far the keys go after step 0."""
        steps = self.steps(C)
        return steps[1] if len(steps) > 1 else 0

    def send(self, x: jax.Array, distance: int) -> jax.Array:
        """Returns the array of the device `distance` places before this one."""
        if distance % self.size == 0:
            return x
        pairs = [(i, (i + distance) % self.size) for i in range(self.size)]
        return lax.ppermute(x, self.axis, pairs)

    def blocks(self, t: jax.Array | int) -> Iterator[Block]:
        """Yields the blocks of step t. At step 0, `diagonal` has the others."""
        i = self.shard_number
        j = (i - t) % self.size
        yield Block(1, 0, j, 2 * self.size - 1 - i - j)
        is_first = isinstance(t, int) and t == 0
        if not is_first:
            chunk = jnp.where(j < i, 0, 1)
            yield Block(chunk, chunk, j, jnp.abs(i - j))

    def kernel(self, block: Block, C: int, ids: jax.Array | None) -> dict[str, Any]:
        """Returns the arguments of the kernel for a block besides its matrices."""
        arguments = dict(self.features)
        if ids is not None:
            arguments["segment_ids"] = ids[self.shard_number, block.q]
            arguments["kv_segment_ids"] = ids[block.shard, block.kv]
        if self.features.get("window") is None:
            arguments["causal"] = False
        else:
            arguments["q_offset"] = block.distance * C
        return arguments

    def diagonal(self, ids: jax.Array | None) -> dict[str, Any]:
        """Returns the same for both chunks of this shard, each with its own keys, [2 B, C, ...]."""
        arguments = dict(self.features)
        if ids is not None:
            arguments["segment_ids"] = _flat(ids[self.shard_number])
        return arguments


class Block(NamedTuple):
    """A chunk of this shard's queries, and a chunk of the keys of a shard, which all come
    before.
    """

    q: Any
    """The number of the chunk of queries, 0 or 1."""
    kv: Any
    """The number of the chunk of keys, 0 or 1."""
    shard: Any
    """The shard of the keys."""
    distance: Any
    """Chunks from the keys to the queries."""


class Residuals(NamedTuple):
    """The arrays that the backward pass of a ring reads."""

    q: jax.Array
    """[2, B, C, N, H]."""
    kv: jax.Array
    """This shard's keys and values, [2, 2, B, C, K, H]."""
    ids: jax.Array | None
    """Segment ids of all shards, [n, 2, B, C]."""
    sinks: jax.Array | None
    y: jax.Array
    lse: jax.Array


# A custom VJP: the backward pass goes around the ring once more (see above).
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    ring: Ring, q: jax.Array, kv: jax.Array, ids: jax.Array | None, sinks: jax.Array | None
) -> jax.Array:
    """Returns attention [2, B, C, N, H]. The arguments are those of `Residuals`."""
    return _forward(ring, q, kv, ids, sinks)[0]


def _forward(
    ring: Ring, q: jax.Array, kv: jax.Array, ids: jax.Array | None, sinks: jax.Array | None
) -> tuple[jax.Array, Residuals]:
    _, B, C, *_ = q.shape

    def add(
        total: tuple[jax.Array, jax.Array], kv: jax.Array, block: Block
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (y, lse) with the keys of one more block."""
        k, v = kv[:, block.kv]
        part = flash_attention(q[block.q], k, v, return_lse=True, **ring.kernel(block, C, ids))
        y, lse = merge(total[0][block.q], total[1][block.q], *part)
        return _put(total[0], block.q, y), _put(total[1], block.q, lse)

    def step(carry: Any, t: jax.Array, last_hop: int, next_hop: int) -> Any:
        total, kv = carry
        next_kv = ring.send(kv, next_hop)
        for block in ring.blocks(t):
            total = add(total, kv, block)
        return total, next_kv

    # Step 0, this shard's own keys, beside the first hop.
    next_kv = ring.send(kv, ring.first_hop(C))
    k, v = map(_flat, kv)
    y, lse = flash_attention(_flat(q), k, v, sinks=sinks, return_lse=True, **ring.diagonal(ids))
    total = y.reshape(2, B, C, *y.shape[2:]).astype(_sum_type(q)), lse.reshape(2, B, C, -1)
    for block in ring.blocks(0):
        total = add(total, kv, block)
    (y, lse), _ = ring.walk(C, step, (total, next_kv))
    # remat=save_names and save_attention save both, so that the backward pass does not go around
    # for them once more.
    y = checkpoint_name(y.astype(q.dtype), "attention_out")
    lse = checkpoint_name(lse, "attention_lse")
    return y, Residuals(q, kv, ids, sinks, y, lse)


def _backward(ring: Ring, residuals: Residuals, dy: jax.Array) -> tuple[Any, ...]:
    q, shard_kv, ids, sinks, y, lse = residuals
    C = q.shape[2]

    def add(
        dq: jax.Array, d_kv: jax.Array, kv: jax.Array, block: Block
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients with those of one more block."""
        chunk = block.q
        k, v = kv[:, block.kv]
        block_dq, dk, dv, _ = attention_gradients(
            q[chunk],
            k,
            v,
            y[chunk],
            lse[chunk],
            dy[chunk],
            unrounded=True,
            **ring.kernel(block, C, ids),
        )
        dq = _put(dq, chunk, dq[chunk] + block_dq)
        block_d_kv = d_kv[:, block.kv] + jnp.stack([dk, dv])
        return dq, lax.dynamic_update_index_in_dim(d_kv, block_d_kv, block.kv, 1)

    def step(carry: Any, t: jax.Array, last_hop: int, next_hop: int) -> Any:
        dq, kv, d_kv = carry
        next_kv = ring.send(kv, next_hop)
        # The gradients are where the keys were at the last step, and follow them.
        d_kv = ring.send(d_kv, last_hop)
        for block in ring.blocks(t):
            dq, d_kv = add(dq, d_kv, kv, block)
        return dq, next_kv, d_kv

    # The block of this shard's own keys that is not on the diagonal is computed while the first
    # keys travel, and those on it while the gradients of the last ones go back.
    next_kv = ring.send(shard_kv, ring.first_hop(C))
    dtype = _sum_type(q)
    dq = jnp.zeros(q.shape, dtype)
    shard_d_kv = jnp.zeros(shard_kv.shape, dtype)
    for block in ring.blocks(0):
        dq, shard_d_kv = add(dq, shard_d_kv, shard_kv, block)
    dq, _, d_kv = ring.walk(C, step, (dq, next_kv, jnp.zeros(shard_kv.shape, dtype)))
    d_kv = ring.send(d_kv, -ring.steps(C)[-1])
    k, v = map(_flat, shard_kv)
    diagonal_dq, dk, dv, d_sinks = attention_gradients(
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
    d_kv = d_kv + shard_d_kv + jnp.stack([dk, dv]).reshape(shard_kv.shape)
    if sinks is None or d_sinks is None:
        d_sinks = None
    else:
        d_sinks = d_sinks.astype(sinks.dtype)
    dq = (dq + diagonal_dq.reshape(q.shape)).astype(q.dtype)
    return dq, d_kv.astype(shard_kv.dtype), None, d_sinks


_ring.defvjp(_forward, _backward)


def _sum_type(x: jax.Array) -> Any:
    """Returns the type of sums of such arrays: fp32, as the kernels sum; fp64 for fp64."""
    return jnp.promote_types(x.dtype, jnp.float32)


def _chunks(x: jax.Array) -> jax.Array:
    """Returns [B, S, ...] as [2, B, C, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0], 2, -1, *x.shape[2:]), 1, 0)


def _whole(x: jax.Array) -> jax.Array:
    """Returns [2, B, C, ...] as [B, S, ...]."""
    return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _flat(x: jax.Array) -> jax.Array:
    """Returns [2, B, C, ...] as [2 B, C, ...]."""
    return x.reshape(-1, *x.shape[2:])


def _put(x: jax.Array, chunk: Any, new: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), chunk, 0)
