"""Chooses the next token from the model's logits. Sizes: B batch, V vocabulary, C candidates."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from mesh_lm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling options, in the order in which they apply."""

    temperature: float = 0.8
    """Divides the logits; 0: greedy, the first of equally likely tokens."""
    top_k: int = 50
    """Only the k likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Only the smallest set of the k likeliest tokens with total probability >= p (Holtzman et al.,
    arXiv 1904.09751); 1: all."""

    def __post_init__(self) -> None:
        """Raises ConfigError with every field that is out of range."""
        problems = []
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            problems.append(
                f"temperature={self.temperature} must be at least 0 (0: always the likeliest token)"
            )
        if self.top_k < 0:
            problems.append(f"top_k={self.top_k} must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p} must be in (0, 1] (1: all tokens)")
        if problems:
            raise ConfigError("; ".join(problems))

    def choose(self, logits_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
        """Returns a token per row, int32 [B], which depends only on the row's logits and key."""
        V = logits_BV.shape[1]
        if self.temperature == 0:
            return jnp.argmax(logits_BV, axis=1).astype(jnp.int32)
        logits_BV = logits_BV / self.temperature
        draw = jax.vmap(jax.random.categorical)
        if self.top_p == 1 and self.top_k in (0, V):
            return draw(keys_B, logits_BV).astype(jnp.int32)

        ranked_BC, ids_BC = lax.top_k(logits_BV, min(self.top_k or V, V))
        p_BC = jax.nn.softmax(ranked_BC, axis=1)
        # The probability of all likelier tokens: 0 for the likeliest, which therefore always
        # remains.
        p_likelier_BC = jnp.cumsum(p_BC, axis=1) - p_BC
        rank_B = draw(keys_B, jnp.where(p_likelier_BC < self.top_p, ranked_BC, -jnp.inf))
        return jnp.take_along_axis(ids_BC, rank_B[:, None], axis=1)[:, 0].astype(jnp.int32)
