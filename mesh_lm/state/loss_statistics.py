"""Running statistics of the loss and the gradient norm, by which a step detects that it is an
outlier. After Levanter's SkipStep.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

MEMORY, ENOUGH = 100, 50
"""The time constant of the running means and variances, in steps (until then they are plain
averages), and the steps before the first outlier can be detected."""


def initial() -> np.ndarray:
    """Returns zeros, float32 [2, 3]: (steps seen, mean, variance) of the loss and of the log
    gradient norm.
    """
    return np.zeros((2, 3), np.float32)


def observe(loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Returns float32 [2]: a step's mean loss in nats per label, and the log of its gradient
    norm.
    """
    return jnp.stack([loss, jnp.log(jnp.maximum(norm, 1e-30))])


def is_outlier(recent: jax.Array, now: jax.Array, deviations: float) -> jax.Array:
    """Returns bool []: whether a value of `now` is more than `deviations` standard deviations above
    its mean; False for NaN.
    """
    seen, mean, variance = recent.T
    return jnp.any((seen >= ENOUGH) & (now - mean > deviations * jnp.sqrt(variance)))


def update(recent: jax.Array, now: jax.Array) -> jax.Array:
    """Returns `recent` updated with the values `now` of a good step."""
    seen, mean, variance = recent.T
    share = jnp.maximum(1 / (seen + 1), 1 / MEMORY)
    gap = now - mean
    return jnp.stack(
        [seen + 1, mean + share * gap, (1 - share) * (variance + share * gap**2)], axis=-1
    )
