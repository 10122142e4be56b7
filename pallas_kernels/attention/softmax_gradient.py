"""The term of a softmax's gradient that is constant in each row."""

import jax.numpy as jnp
from jax import Array, lax


def row_constant(dout: Array, out: Array, dlse: Array, empty: Array) -> Array:
    """Returns delta of FlashAttention-2 (arXiv 2307.08691), for which dL/ds = p * (dp - delta).

    delta = rowsum(dout * out) - dlse, where the second term is the part of the gradient that comes
    through the log-sum-exp. That term is 0 in `empty` rows, which see no key.

    Args:
      dout, out: [..., S, N, H].
      dlse: fp32 (fp64 for fp64) [..., S, N].
      empty: bool [..., S, N].

    Returns:
      [..., S, N] in the dtype of `dlse`.
    """
    dtype = dlse.dtype
    dout = dout.astype(dtype)
    if out.dtype != dtype:
        # XLA drops the conversion of dout to 16 bits if only fp32 is needed of it here. dp is
        # computed from the rounded dout, and where a few keys have all the weight, dp - delta is a
        # small difference: the error of dq was 1.24 times cuDNN's on an H200.
        precision = jnp.finfo(out.dtype)
        dout = lax.reduce_precision(dout, precision.nexp, precision.nmant)
    return (dout * out.astype(dtype)).sum(-1) - jnp.where(empty, 0, dlse)
