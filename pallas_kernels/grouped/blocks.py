"""Grouped matmul as a loop over blocks of one group each, for CPUs.

A group's blocks begin at its first token, so that a block is multiplied whole, without a select.
The loop has as many blocks as the worst group sizes need, and skips the others: a conditional,
which costs a CPU nothing. A GPU would wait for its host in each, and has `xla.py`.
Shape suffixes: T tokens sorted by group, E groups, D width in, F width out, C tokens in a block.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

BLOCK = 128
"""Tokens in a block: of 64, 128, 256 and 512, the fastest or nearly so for 4 to 32 groups of 4,096
tokens, in fp32 and in bf16."""


class _Block(NamedTuple):
    """A block, or several: then each field is int [n]."""

    group: Array
    row: Array
    """The first of the C rows that are read. The last rows of a block may be those of later groups,
    or of none."""
    stop: Array
    """One past its last row; not after the first one in a block that is skipped."""


def rows(x_TD: Array, w_EDF: Array, sizes_E: Array, *, transposed: bool) -> Array:
    """Each token times its group's matrix, or the transpose of it."""
    blocks, C = _blocks(sizes_E, len(x_TD))
    equation = "cf,df->cd" if transposed else "cd,df->cf"
    width = w_EDF.shape[1 if transposed else 2]
    padded_x = jnp.pad(x_TD, ((0, C), (0, 0)))

    def multiply(y: Array, block: _Block) -> Array:
        x_C = lax.dynamic_slice_in_dim(padded_x, block.row, C)
        w = w_EDF[block.group]
        product = jnp.einsum(equation, x_C, w, preferred_element_type=_accum(x_C)).astype(y.dtype)
        # Rows of later groups are wrong until the blocks of those overwrite them.
        return lax.dynamic_update_slice_in_dim(y, product, block.row, 0)

    y = _visit(multiply, jnp.zeros((len(padded_x), width), x_TD.dtype), blocks)
    has_group = jnp.arange(len(x_TD))[:, None] < sizes_E.sum()
    return jnp.where(has_group, y[: len(x_TD)], 0)


def weights(x_TD: Array, dy_TF: Array, sizes_E: Array) -> Array:
    """[E, D, F]: for each group, the sum of the outer products of its tokens."""
    blocks, C = _blocks(sizes_E, len(x_TD))
    padded = [jnp.pad(a, ((0, C), (0, 0))) for a in (x_TD, dy_TF)]

    def add(dw: Array, block: _Block) -> Array:
        inside = (block.row + jnp.arange(C) < block.stop)[:, None]
        # Both, because 0 times a number that is not finite is not 0.
        x_C, dy_C = (
            jnp.where(inside, lax.dynamic_slice_in_dim(a, block.row, C), 0) for a in padded
        )
        product = jnp.einsum("cd,cf->df", x_C, dy_C, preferred_element_type=dw.dtype)
        return dw.at[block.group].add(product)

    shape = (len(sizes_E), x_TD.shape[1], dy_TF.shape[1])
    return _visit(add, jnp.zeros(shape, _accum(x_TD)), blocks).astype(x_TD.dtype)


def _visit(step: Callable[[Array, _Block], Array], result: Array, blocks: _Block) -> Array:
    """The result after a step for each block that has rows."""

    def visit(result: Array, block: _Block) -> tuple[Array, None]:
        has_rows = block.row < block.stop
        return lax.cond(has_rows, step, lambda result, _: result, result, block), None

    return lax.scan(visit, result, blocks)[0]


def _blocks(sizes_E: Array, T: int) -> tuple[_Block, int]:
    """(all blocks, C), in the order of groups."""
    C = min(BLOCK, T)
    ends = jnp.cumsum(sizes_E)
    n_blocks = -(-sizes_E // C)
    block_ends = jnp.cumsum(n_blocks)

    # Each of up to E groups ends with a block that is not full.
    block = jnp.arange(T // C + len(sizes_E))
    group = jnp.searchsorted(block_ends, block, side="right")
    group = jnp.minimum(group, len(sizes_E) - 1)
    number = block - (block_ends - n_blocks)[group]
    row = (ends - sizes_E)[group] + number * C
    return _Block(group, row, jnp.minimum(ends[group], row + C)), C


def _accum(x: Array) -> Any:
    """The dtype in which products of x are summed."""
    return jnp.promote_types(x.dtype, jnp.float32)
