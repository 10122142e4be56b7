"""Stacked matmul in plain JAX. It runs on any platform.

A matrix is copied out of the stack and multiplied, and a gradient is added to its row.

Shape suffixes: R rows of the stack, T tokens, K and N the widths of a matrix.
"""

import jax.numpy as jnp
from jax import Array, lax


def product(x: Array, weights_RKN: Array, row: Array, *, transposed: bool) -> Array:
    """x [T, K] @ weights[row], or x [T, N] @ weights[row]^T.

    A row outside of the stack counts as the nearest one.
    """
    w_1KN = lax.dynamic_slice_in_dim(weights_RKN, _inside(row, weights_RKN), 1)
    equation = "tn,kn->tk" if transposed else "tk,kn->tn"
    accum_dtype = jnp.promote_types(x.dtype, jnp.float32)
    y = jnp.einsum(equation, x, w_1KN[0], preferred_element_type=accum_dtype)
    return y.astype(x.dtype)


def add(sums_RKN: Array, row: Array, x_TK: Array, dy_TN: Array, *, rounded: bool) -> Array:
    """`sums_RKN` with x^T dy added to its row. rounded: the product is first rounded to x's type.

    The addition is one fusion, which reads the row and writes it in place. With the index as a dim
    that is dropped and put back, XLA makes a copy of the row first.
    """
    row = _inside(row, sums_RKN)
    dw_dtype = x_TK.dtype if rounded else sums_RKN.dtype
    dw_KN = jnp.einsum("tk,tn->kn", x_TK, dy_TN, preferred_element_type=dw_dtype)
    dw_KN = dw_KN.astype(sums_RKN.dtype)
    if rounded:
        # XLA may leave out a conversion to fewer bits and back.
        bits = jnp.finfo(dw_dtype)
        dw_KN = lax.reduce_precision(dw_KN, bits.nexp, bits.nmant)
    old_1KN = lax.dynamic_slice_in_dim(sums_RKN, row, 1)
    return lax.dynamic_update_slice_in_dim(sums_RKN, old_1KN + dw_KN[None], row, 0)


def _inside(row: Array, stack: Array) -> Array:
    return jnp.clip(row, 0, len(stack) - 1)
