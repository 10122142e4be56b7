"""What the gradient of a softmax needs of each row, beside its probabilities."""

import jax.numpy as jnp
from jax import Array, lax


def row_constant(dout: Array, out: Array, dlse: Array, empty: Array) -> Array:
    """delta [..., S, N] of FlashAttention-2 (2307.08691), with which dL/ds = p * (dp - delta), in
    the type of `dlse`.

    It is rowsum(dout * out) minus the gradient of the log-sum-exp, p * dlse, which is 0 in `empty`
    rows, those that see no key. dout, out: [..., S, N, H]; dlse, fp32, and empty, bool: [..., S,
    N].
    """
    wide, kept = dlse.dtype, jnp.finfo(out.dtype)
    dout = dout.astype(wide)
    if out.dtype != wide:
        # XLA drops the conversion of dout to 16 bits if only fp32 is needed of it here. dp is
        # computed from the rounded dout, and where a few keys have all the weight, dp - delta is a
        # small difference: the error of dq was 1.24 times cuDNN's on an H200.
        dout = lax.reduce_precision(dout, kept.nexp, kept.nmant)
    return (dout * out.astype(wide)).sum(-1) - jnp.where(empty, 0, dlse)
