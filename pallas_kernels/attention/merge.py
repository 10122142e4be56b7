"""Combines attention over disjoint sets of keys (ring attention, arXiv 2310.01889; split keys)."""

import jax
import jax.numpy as jnp
from jax import Array


def merge(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """The attention of the same queries over the union of two disjoint sets of keys.

    It is differentiable in all four arguments. A part without visible keys (-inf) has weight 0 and
    zero gradients.

    Args:
      out_a, out_b: outputs [B, S, N, H].
      lse_a, lse_b: log-sum-exps [B, S, N], as `flash_attention(..., return_lse=True)` returns them.

    Returns:
      The output, in the wider dtype of the two (keep a running output in fp32), and the log-sum-exp
      over the union, which stays -inf without any visible key.
    """
    # The maximum cancels in the result, so that no gradient needs to go through it.
    max_lse = jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    max_lse = jnp.where(max_lse == -jnp.inf, 0, max_lse)
    weight_a = jnp.exp(lse_a - max_lse)
    weight_b = jnp.exp(lse_b - max_lse)
    weight_sum = weight_a + weight_b
    divisor = jnp.where(weight_sum == 0, 1, weight_sum)
    out = (weight_a / divisor)[..., None] * out_a + (weight_b / divisor)[..., None] * out_b
    lse = jnp.where(weight_sum == 0, -jnp.inf, max_lse + jnp.log(divisor))
    return out.astype(jnp.promote_types(out_a.dtype, out_b.dtype)), lse
