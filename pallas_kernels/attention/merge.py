"""Combines attention over disjoint sets of keys (ring attention, arXiv 2310.01889; split keys)."""

import jax
import jax.numpy as jnp
from jax import Array


def merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """The attention of the same queries over the union of two disjoint sets of keys.

    Args: outputs [B, S, N, H] and log-sum-exps [B, S, N], as `flash_attention(...,
    return_lse=True)` returns them. Keep a running output in fp32: the result has the wider dtype of
    the two.

    Returns the output and the log-sum-exp over the union. Differentiable in all four. A part
    without visible keys (-inf) has weight 0 and zero gradients; without any visible key the
    log-sum-exp stays -inf.
    """
    top = jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    top = jnp.where(top == -jnp.inf, 0, top)
    weight_a, weight_b = jnp.exp(lse_a - top), jnp.exp(lse_b - top)
    total = weight_a + weight_b
    safe = jnp.where(total == 0, 1, total)
    out = (weight_a / safe)[..., None] * out_a + (weight_b / safe)[..., None] * out_b
    lse = jnp.where(total == 0, -jnp.inf, top + jnp.log(safe))
    return out.astype(jnp.promote_types(out_a.dtype, out_b.dtype)), lse
