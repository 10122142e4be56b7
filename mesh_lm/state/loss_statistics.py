"""Running statistics of the loss and the gradient norm, by which a step detects that it is an
outlier. After Levanter's SkipStep.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

MEMORY = 100
"""The time constant of the running means and variances, in steps; until then they are plain
averages."""
ENOUGH = 50
"""Steps before the first outlier can be detected."""


def initial_statistics() -> np.ndarray:
    """Returns "recent" at step 0, also for checkpoints of format 1: zeros, float32 [2, 3].

    Its rows are (steps seen, mean, variance) of the loss and of the log gradient norm.
    """
    return np.zeros((2, 3), np.float32)


def observe(loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Returns float32 [2]: a step's mean loss in nats per label, and the log of its gradient
    norm.
    """
    return jnp.stack([loss, jnp.log(jnp.maximum(norm, 1e-30))])


def is_outlier(recent: jax.Array, observed: jax.Array, deviations: float) -> jax.Array:
    """Returns bool []: whether a value is more than `deviations` standard deviations above its
    mean; False for NaN.
    """
    n_steps, mean, variance = recent.T
    return jnp.any((n_steps >= ENOUGH) & (observed - mean > deviations * jnp.sqrt(variance)))


def update(recent: jax.Array, observed: jax.Array) -> jax.Array:
    """Returns `recent` updated with the values of an accepted step."""
    n_steps, mean, variance = recent.T
    share = jnp.maximum(1 / (n_steps + 1), 1 / MEMORY)
    gap = observed - mean
    return jnp.stack(
        [n_steps + 1, mean + share * gap, (1 - share) * (variance + share * gap**2)], axis=-1
    )
