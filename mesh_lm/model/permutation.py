"""Rows in another order, for tokens that are sent to experts: each row of a buffer is the copy of
one token, and a token may have several rows.

Both directions are reads, forward and backward: the transpose that JAX derives for a read is a
scatter, which is slow on a GPU, and whose order of sums varies from run to run. Sizes: T tokens, R
rows of the buffer, C the largest number of rows of a token, D width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rows(NamedTuple):
    """Which token each row of a buffer copies, and the inverse. -1 stands for none."""

    token: jax.Array
    """int32 [R]: the token of each row."""
    places: jax.Array
    """int32 [T, C]: the rows of each token."""


class Order(NamedTuple):
    """A stable sort of keys 0 to n - 1, whose values of n or more are last."""

    by_key: jax.Array
    """int32 [A]: the positions of the keys, in the order of their values."""
    rank: jax.Array
    """int32 [A]: the place of each key in that order."""
    sizes: jax.Array
    """int32 [n]: how many keys have each value."""


def sort(keys_A: jax.Array, n: int) -> Order:
    """Returns the order of int32 keys."""
    by_key = jnp.argsort(keys_A, stable=True).astype(jnp.int32)
    positions = jnp.arange(len(keys_A), dtype=jnp.int32)
    rank = jnp.zeros_like(by_key).at[by_key].set(positions, unique_indices=True)
    return Order(by_key, rank, count(keys_A, n))


def count(keys_A: jax.Array, n: int) -> jax.Array:
    """Returns how often each of 0 to n - 1 occurs among the keys, int32 [n]."""
    return jnp.zeros(n, jnp.int32).at[keys_A].add(1, mode="drop")


# A custom VJP: the gradient of a token is the sum of its rows, which `places` finds by reading.
@jax.custom_vjp
def copy_tokens(x_TD: jax.Array, rows: Rows) -> jax.Array:
    """Returns the buffer [R, D]; rows of no token are 0."""
    return _token_rows(x_TD, rows)


def _copy_forward(x_TD: jax.Array, rows: Rows) -> tuple[jax.Array, Rows]:
    return copy_tokens(x_TD, rows), rows


def _copy_backward(rows: Rows, dy_RD: jax.Array) -> tuple[jax.Array, Rows]:
    return _sums_of_rows(dy_RD, rows), _no_gradient(rows)


copy_tokens.defvjp(_copy_forward, _copy_backward)


# A custom VJP: the gradient of a row is that of its token.
@jax.custom_vjp
def add_rows(y_RD: jax.Array, rows: Rows) -> jax.Array:
    """Returns the sum of each token's rows, [T, D], added up in float32."""
    return _sums_of_rows(y_RD, rows)


def _add_forward(y_RD: jax.Array, rows: Rows) -> tuple[jax.Array, Rows]:
    return add_rows(y_RD, rows), rows


def _add_backward(rows: Rows, dx_TD: jax.Array) -> tuple[jax.Array, Rows]:
    return _token_rows(dx_TD, rows), _no_gradient(rows)


add_rows.defvjp(_add_forward, _add_backward)


def _token_rows(x_TD: jax.Array, rows: Rows) -> jax.Array:
    # Zeros, not whatever token is read: what follows may multiply a row of no token, and a gradient
    # of exactly 0 may not become NaN.
    used_R = rows.token >= 0
    return jnp.where(used_R[:, None], x_TD[jnp.maximum(rows.token, 0)], 0)


def _sums_of_rows(y_RD: jax.Array, rows: Rows) -> jax.Array:
    total_TD = jnp.zeros((len(rows.places), y_RD.shape[1]), jnp.float32)
    # One column at a time, so that [T, C, D] is never in memory.
    for column in range(rows.places.shape[1]):
        place_T = rows.places[:, column]
        row_TD = y_RD[jnp.maximum(place_T, 0)].astype(jnp.float32)
        total_TD = total_TD + jnp.where((place_T >= 0)[:, None], row_TD, 0)
    return total_TD.astype(y_RD.dtype)


def _no_gradient(rows: Rows) -> Rows:
    """Returns the cotangent of integers, which JAX asks for in this type."""
    return jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), rows)
