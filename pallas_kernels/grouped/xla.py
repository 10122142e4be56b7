"""Grouped matmul as a loop over cells; a cell is the part of one block of tokens that belongs to
one group. It runs on any platform.

`jax.lax.ragged_dot` is not used, because XLA expands it to one copy of the tokens for each group.
Shape suffixes: T tokens sorted by group, E groups, D width in, F width out, C tokens in a block.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 512
"""Tokens in a block of the loop: FLOPs for each byte of a weight that is read, twice an H100's
ratio of compute to bandwidth."""


def _cells(sizes_E: Array, T: int) -> tuple[tuple[Array, Array, Array, Array], int]:
    """((group, first row read, first row counted, row after the last one counted), each [n], C).

    Cells are in the order of groups. Their number suffices for the worst group sizes; spare cells
    count no rows and belong to the last group that is not empty.
    """
    C = min(BLOCK, T)
    ends = jnp.cumsum(sizes_E)
    starts = ends - sizes_E
    first = starts // C
    blocks = jnp.where(sizes_E > 0, (ends - 1) // C - first + 1, 0)
    after = jnp.cumsum(blocks)
    cell = jnp.arange(-(-T // C) + len(sizes_E) - 1)
    group = jnp.searchsorted(after, jnp.minimum(cell, after[-1] - 1), side="right")
    begin = (first[group] + cell - (after - blocks)[group]) * C
    stop = jnp.where(cell < after[-1], jnp.minimum(ends[group], begin + C), 0)
    # The last block is read from an earlier row, so that it has C rows.
    return (group, jnp.clip(begin, 0, T - C), jnp.maximum(starts[group], begin), stop), C


def rows(x_TD: Array, w_EDF: Array, sizes_E: Array, *, transposed: bool) -> Array:
    """Each token times its group's matrix, or the transpose of it."""
    cells, C = _cells(sizes_E, len(x_TD))

    def step(y: Array, cell: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
        group, row, begin, stop = cell
        x_C, w = lax.dynamic_slice_in_dim(x_TD, row, C), w_EDF[group]
        new = jnp.einsum(
            "cf,df->cd" if transposed else "cd,df->cf", x_C, w, preferred_element_type=_wide(x_C)
        ).astype(y.dtype)
        rows = row + jnp.arange(C)[:, None]
        new = jnp.where((begin <= rows) & (rows < stop), new, lax.dynamic_slice_in_dim(y, row, C))
        return lax.dynamic_update_slice_in_dim(y, new, row, 0), None

    width = w_EDF.shape[1 if transposed else 2]
    return lax.scan(step, jnp.zeros((len(x_TD), width), x_TD.dtype), cells)[0]


def weights(x_TD: Array, dy_TF: Array, sizes_E: Array) -> Array:
    """[E, D, F]: for each group, the sum of the outer products of its tokens."""
    cells, C = _cells(sizes_E, len(x_TD))

    def step(
        carry: tuple[Array, Array], cell: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], None]:
        (dw, sum_DF), (group, row, begin, stop, fresh) = carry, cell
        rows = row + jnp.arange(C)[:, None]
        inside = (begin <= rows) & (rows < stop)
        x_C, dy_C = (
            jnp.where(inside, lax.dynamic_slice_in_dim(a, row, C), 0) for a in (x_TD, dy_TF)
        )
        sum_DF = jnp.where(fresh, 0, sum_DF) + jnp.einsum(
            "cd,cf->df", x_C, dy_C, preferred_element_type=sum_DF.dtype
        )
        return (dw.at[group].set(sum_DF.astype(dw.dtype)), sum_DF), None

    # Only the current group is summed in fp32.
    group, shape = cells[0], (x_TD.shape[1], dy_TF.shape[1])
    fresh = group != jnp.roll(group, 1).at[0].set(-1)
    return lax.scan(
        step,
        (jnp.zeros((len(sizes_E), *shape), x_TD.dtype), jnp.zeros(shape, _wide(x_TD))),
        (*cells, fresh),
    )[0][0]


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)
