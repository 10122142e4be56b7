"""What a step's loss and gradient norm have been of late, so that a step can tell whether it is an outlier. After Levanter's SkipStep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

MEMORY, ENOUGH = 100, 50
"""Steps over which means and variances forget (they are plain averages until then), and steps before anything counts as an outlier."""


def initial() -> np.ndarray:
    """float32 [2, 3], of the loss and of the log gradient norm each: steps seen, mean, variance. Nothing seen yet: zeros."""
    return np.zeros((2, 3), np.float32)


def observe(loss: jax.Array, norm: jax.Array) -> jax.Array:
    """float32 [2] of a step: its mean loss in nats per label, and the log of its gradient norm."""
    return jnp.stack([loss, jnp.log(jnp.maximum(norm, 1e-30))])


def is_outlier(recent: jax.Array, now: jax.Array, deviations: float) -> jax.Array:
    """Whether loss or gradient norm (`now`, from `step_statistics`) is more than `deviations` above its mean. bool []; False for NaN."""
    seen, mean, variance = recent.T
    return jnp.any((seen >= ENOUGH) & (now - mean > deviations * jnp.sqrt(variance)))


def update(recent: jax.Array, now: jax.Array) -> jax.Array:
    """`recent` after a step whose numbers are good."""
    seen, mean, variance = recent.T
    share = jnp.maximum(1 / (seen + 1), 1 / MEMORY)
    gap = now - mean
    return jnp.stack([seen + 1, mean + share * gap, (1 - share) * (variance + share * gap**2)], axis=-1)
