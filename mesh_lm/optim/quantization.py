"""Arrays of one byte an element: linear levels, and a float32 scale for each block of the last
dimension.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

SHORTEST_BLOCK = 16
"""The least elements that share a scale: with 8 of them an array takes 1.5 bytes an element."""
LEVELS = 127
"""The largest level of an int8."""
ROOT_LEVELS = 255
"""The largest level of a uint8."""


def quantized(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns (int8 levels, float32 scales of the blocks), rounded to nearest."""
    levels, scale = _scaled(x, block, LEVELS)
    return _joined(jnp.round(levels), LEVELS, x.shape).astype(jnp.int8), scale


def quantized_root(x: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Returns (uint8 levels, float32 scales of the blocks) of an array without negative elements,
    rounded to nearest, but to 1 where nearest is 0.
    """
    levels, scale = _scaled(x, block, ROOT_LEVELS)
    # A root of 0 beside a first moment that is not would let the next step divide by almost
    # nothing. Rounding up everywhere prevents that, too, but makes all denominators too large. On
    # texts held out from 300 steps of a model with 2 layers of width 64, mean of four seeds in
    # nats per token: AdamW 2.604, nearest 2.610, nearest with this floor 2.609, up 2.641.
    rounded = _joined(jnp.maximum(jnp.round(levels), 1), ROOT_LEVELS, x.shape)
    return jnp.where(x > 0, rounded, 0).astype(jnp.uint8), scale


def dequantized(levels: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the float32 values that levels and the scales of their blocks stand for."""
    blocks = levels.reshape(*scale.shape, -1).astype(jnp.float32)
    return (blocks * scale[..., None]).reshape(levels.shape)


def _scaled(x: jax.Array, block: int, n_levels: int) -> tuple[jax.Array, jax.Array]:
    """Returns (x by blocks, in units of its scale, [..., blocks, block]; the scales)."""
    blocks = x.reshape(*x.shape[:-1], -1, block)
    scale = jnp.abs(blocks).max(-1) / n_levels
    # A scale of 0 is that of zeros, or of values that are too small for a scale.
    divisor = jnp.where(scale > 0, scale, 1)
    return blocks / divisor[..., None], scale


def _joined(levels: jax.Array, n_levels: int, shape: tuple[int, ...]) -> jax.Array:
    # A scale that is subnormal is imprecise: without the limit its largest value would overflow.
    return jnp.clip(levels, -n_levels, n_levels).reshape(shape)
