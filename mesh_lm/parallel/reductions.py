"""Sums over devices that `lax.psum` does not make: around a ring, in two levels, and in int8 with
error feedback.

All of them run on one device, inside a region that is manual over every mesh axis. n is the number
of devices of a sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sharding_rules import Rules

BLOCK = 256
"""Elements with a scale in common: 1 + 4 / 256 bytes an element are sent."""
_LEVELS = 127


def ring_sum(x: jax.Array, axis: str) -> jax.Array:
    """Returns x summed over a mesh axis by 2 (n - 1) permutes of an n-th of it: 2 (n - 1) / n of
    its bytes, the least that an all-reduce can send.

    A reference for tests: equal to `lax.psum` but for the order of the sums.
    """
    n = lax.axis_size(axis)
    device = lax.axis_index(axis)
    parts = _padded(x.reshape(-1), n).reshape(n, -1)
    ring = [(i, (i + 1) % n) for i in range(n)]
    # Reduce-scatter: part i starts at device i, and each device that it comes to adds its own.
    part = parts[device]
    for step in range(1, n):
        part = lax.ppermute(part, axis, ring) + parts[(device - step) % n]
    # All-gather: the sum of part i is now at device i - 1, and goes around once more.
    parts = parts.at[(device + 1) % n].set(part)
    for step in range(1, n):
        part = lax.ppermute(part, axis, ring)
        parts = parts.at[(device + 1 - step) % n].set(part)
    return parts.reshape(-1)[: x.size].reshape(x.shape)


def sum_dtype(rules: Rules) -> Any:
    """Returns the type in which gradients of matrices are summed over manual axes, other than in
    int8 (`mesh_lm.parallel.feedback`). Those of vectors are always summed in float32.
    """
    return jnp.bfloat16 if rules.reduction == "bfloat16" else jnp.float32


def two_level_sum(x: jax.Array, inner: str, outer: Sequence[str]) -> jax.Array:
    """Returns x summed over the mesh axes `inner` and `outer`: reduce-scattered along `inner`,
    summed along `outer`, gathered along `inner`.

    A device sends 2 (n - 1) / n of the bytes along `inner`, and along `outer` those of its part
    alone: one n-th, for n devices of `inner`.
    """
    # 1. Each device gets the sum of its part over `inner`.
    part = lax.psum_scatter(_padded(x.reshape(-1), lax.axis_size(inner)), inner, tiled=True)
    # 2. Only parts cross nodes.
    if outer:
        part = lax.psum(part, tuple(outer))
    # 3. All parts come together again.
    return _unpadded(lax.all_gather(part, inner, tiled=True), x)


def quantised(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (int8 [..., blocks, BLOCK], float32 scales [..., blocks, 1]) of float32 [..., k]; the
    last block is padded with zeros.

    The scale of a block is its largest absolute value over 127, and each number is rounded to the
    nearest multiple, so that it is wrong by half a scale at most. A block with a number that is not
    finite comes back as NaN.
    """
    n_padding = -x.shape[-1] % BLOCK
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n_padding)])
    blocks = padded.reshape(*x.shape[:-1], -1, BLOCK)
    scale = jnp.abs(blocks).max(-1, keepdims=True) / _LEVELS
    return jnp.round(blocks / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale


def dequantised(q: jax.Array, scale: jax.Array, k: int) -> jax.Array:
    """Returns the inverse of `quantised`, float32 [..., k], up to rounding."""
    return (q * scale).reshape(*q.shape[:-2], -1)[..., :k]


def int8_reduce_scatter(x: jax.Array, axes: Sequence[str]) -> tuple[jax.Array, jax.Array]:
    """Returns (this device's part [k / n] of the sum of x [k] over mesh axes, what rounding has
    left out [k]: x minus what was sent of it).

    Each device sends the others their parts in int8, and sums in float32 what it receives: no sum
    is rounded. k must divide by n.
    """
    parts = x.reshape(lax.axis_size(axes), -1)
    k = parts.shape[-1]
    q, scale = quantised(parts)
    left_out = parts - dequantised(q, scale, k)
    # The barrier keeps the cast before the exchange: XLA would exchange what it is made of.
    q, scale = lax.optimization_barrier((q, scale))
    q = lax.all_to_all(q, axes, 0, 0, tiled=True)
    scale = lax.all_to_all(scale, axes, 0, 0, tiled=True)
    return dequantised(q, scale, k).sum(0), left_out.reshape(-1)


def int8_sum(x: jax.Array, axes: Sequence[str]) -> tuple[jax.Array, jax.Array]:
    """Returns (the sum of x over mesh axes, of any shape; what rounding has left out, of the same
    shape).

    A reduce-scatter, and an all-gather of the sums in int8. Summed over the devices, what is left
    out is exactly the sum of x minus the result: the device that rounds a sum keeps that error
    beside its own.
    """
    n = lax.axis_size(axes)
    device = lax.axis_index(axes)
    part, left_out = int8_reduce_scatter(_padded(x.reshape(-1), n), axes)
    q, scale = quantised(part)
    part_left_out = part - dequantised(q, scale, part.size)
    left_out = left_out.reshape(n, -1).at[device].add(part_left_out)
    # The barrier keeps the cast before the all-gather, as above.
    q, scale = lax.optimization_barrier((q, scale))
    q = lax.all_gather(q, axes)
    scale = lax.all_gather(scale, axes)
    total = dequantised(q, scale, part.size)
    return _unpadded(total, x), _unpadded(left_out, x)


def _padded(x: jax.Array, n: int) -> jax.Array:
    """Returns a vector with zeros at its end, so that its length divides by n."""
    return jnp.pad(x, (0, -x.size % n))


def _unpadded(x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns an array of the shape of `like`, without the padding."""
    return x.reshape(-1)[: like.size].reshape(like.shape)
