"""Running statistics of loss and gradient norm, with which a step detects outliers. After Levanter's SkipStep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

MEMORY, ENOUGH = 100, 50
"""Window of the running means and variances, in steps (plain averages until then), and steps before any outlier is reported."""


def fresh() -> np.ndarray:
    """Returns initial statistics: zeros, float32 [2, 3], with (steps, mean, variance) of the loss and of the log gradient norm."""
    return np.zeros((2, 3), np.float32)


def step_statistics(loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Returns a step's mean loss in nats per label and the log of its gradient norm, float32 [2]."""
    return jnp.stack([loss, jnp.log(jnp.maximum(norm, 1e-30))])


def is_outlier(recent: jax.Array, now: jax.Array, deviations: float) -> jax.Array:
    """Whether loss or gradient norm (`now`, from `step_statistics`) is more than `deviations` above its mean. bool []; False for NaN."""
    seen, mean, variance = recent.T
    return jnp.any((seen >= ENOUGH) & (now - mean > deviations * jnp.sqrt(variance)))


def update(recent: jax.Array, now: jax.Array) -> jax.Array:
    """Returns the statistics updated by a step that is not skipped."""
    seen, mean, variance = recent.T
    share = jnp.maximum(1 / (seen + 1), 1 / MEMORY)
    gap = now - mean
    return jnp.stack([seen + 1, mean + share * gap, (1 - share) * (variance + share * gap**2)], axis=-1)
