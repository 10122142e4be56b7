"""Stacked matmul as XLA has it: a matrix is taken out of the stack, multiplied, and a gradient is added to its row. Runs anywhere.

Shape suffixes: R rows of the stack, T tokens, K and N the widths of a matrix.
"""

import jax.numpy as jnp
from jax import Array, lax


def product(x: Array, weights_RKN: Array, row: Array, *, transposed: bool) -> Array:
    """x [T, K] @ weights[row], or x [T, N] @ weights[row]^T. A row outside of the stack counts as the nearest one."""
    w_KN = lax.dynamic_index_in_dim(weights_RKN, _inside(row, weights_RKN), keepdims=False)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("tn,kn->tk" if transposed else "tk,kn->tn", x, w_KN, preferred_element_type=wide).astype(x.dtype)


def add(sums_RKN: Array, row: Array, x_TK: Array, dy_TN: Array, *, rounded: bool) -> Array:
    """`sums_RKN` with x^T dy added to its row. rounded: the product is first rounded to x's type."""
    row = _inside(row, sums_RKN)
    wanted = x_TK.dtype if rounded else sums_RKN.dtype
    dw_KN = jnp.einsum("tk,tn->kn", x_TK, dy_TN, preferred_element_type=wanted).astype(sums_RKN.dtype)
    old_KN = lax.dynamic_index_in_dim(sums_RKN, row, keepdims=False)
    return lax.dynamic_update_index_in_dim(sums_RKN, old_KN + dw_KN, row, 0)


def _inside(row: Array, stack: Array) -> Array:
    return jnp.clip(row, 0, len(stack) - 1)
