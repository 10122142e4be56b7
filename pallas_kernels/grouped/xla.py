"""Grouped matmul as a loop over cells. It runs on any platform.

A cell is the part of one block of tokens that belongs to one group.
`jax.lax.ragged_dot` is not used, because XLA expands it to one copy of the tokens for each group.
Shape suffixes: T tokens sorted by group, E groups, D width in, F width out, C tokens in a block.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 512
"""Tokens in a block of the loop: FLOPs for each byte of a weight that is read, twice an H100's
ratio of compute to bandwidth."""


class _Cell(NamedTuple):
    """A cell, or several: then each field is int [n]."""

    group: Array
    row: Array
    """The first of the C rows that are read."""
    begin: Array
    """The first row of the cell."""
    stop: Array
    """One past its last row."""


def rows(x_TD: Array, w_EDF: Array, sizes_E: Array, *, transposed: bool) -> Array:
    """Each token times its group's matrix, or the transpose of it."""
    cells, C = _cells(sizes_E, len(x_TD))
    equation = "cf,df->cd" if transposed else "cd,df->cf"

    def step(y: Array, cell: _Cell) -> tuple[Array, None]:
        x_C = lax.dynamic_slice_in_dim(x_TD, cell.row, C)
        w = w_EDF[cell.group]
        product = jnp.einsum(equation, x_C, w, preferred_element_type=_accum(x_C)).astype(y.dtype)
        rows = cell.row + jnp.arange(C)[:, None]
        inside = (cell.begin <= rows) & (rows < cell.stop)
        y_C = jnp.where(inside, product, lax.dynamic_slice_in_dim(y, cell.row, C))
        return lax.dynamic_update_slice_in_dim(y, y_C, cell.row, 0), None

    width = w_EDF.shape[1 if transposed else 2]
    return lax.scan(step, jnp.zeros((len(x_TD), width), x_TD.dtype), cells)[0]


def weights(x_TD: Array, dy_TF: Array, sizes_E: Array) -> Array:
    """[E, D, F]: for each group, the sum of the outer products of its tokens."""
    cells, C = _cells(sizes_E, len(x_TD))

    def step(
        carry: tuple[Array, Array], xs: tuple[_Cell, Array]
    ) -> tuple[tuple[Array, Array], None]:
        dw, sum_DF = carry
        cell, is_first = xs
        rows = cell.row + jnp.arange(C)[:, None]
        inside = (cell.begin <= rows) & (rows < cell.stop)
        x_C, dy_C = (
            jnp.where(inside, lax.dynamic_slice_in_dim(a, cell.row, C), 0) for a in (x_TD, dy_TF)
        )
        sum_DF = jnp.where(is_first, 0, sum_DF) + jnp.einsum(
            "cd,cf->df", x_C, dy_C, preferred_element_type=sum_DF.dtype
        )
        return (dw.at[cell.group].set(sum_DF.astype(dw.dtype)), sum_DF), None

    # Only the current group is summed in fp32.
    D = x_TD.shape[1]
    F = dy_TF.shape[1]
    first_of_group = cells.group != jnp.roll(cells.group, 1).at[0].set(-1)
    dw = jnp.zeros((len(sizes_E), D, F), x_TD.dtype)
    sum_DF = jnp.zeros((D, F), _accum(x_TD))
    (dw, _), _ = lax.scan(step, (dw, sum_DF), (cells, first_of_group))
    return dw


def _cells(sizes_E: Array, T: int) -> tuple[_Cell, int]:
    """(all cells, C).

    Cells are in the order of groups. Their number suffices for the worst group sizes; spare cells
    have no rows and belong to the last group that is not empty.
    """
    C = min(BLOCK, T)
    ends = jnp.cumsum(sizes_E)
    starts = ends - sizes_E
    first_block = starts // C
    n_blocks = jnp.where(sizes_E > 0, (ends - 1) // C - first_block + 1, 0)
    cell_ends = jnp.cumsum(n_blocks)

    cell = jnp.arange(-(-T // C) + len(sizes_E) - 1)
    group = jnp.searchsorted(cell_ends, jnp.minimum(cell, cell_ends[-1] - 1), side="right")
    begin = (first_block[group] + cell - (cell_ends - n_blocks)[group]) * C
    stop = jnp.where(cell < cell_ends[-1], jnp.minimum(ends[group], begin + C), 0)
    # The last block is read from an earlier row, so that it has C rows.
    row = jnp.clip(begin, 0, T - C)
    return _Cell(group, row, jnp.maximum(starts[group], begin), stop), C


def _accum(x: Array) -> Any:
    """The dtype in which products of x are summed."""
    return jnp.promote_types(x.dtype, jnp.float32)
