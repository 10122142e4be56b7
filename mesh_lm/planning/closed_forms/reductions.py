"""What sums of gradients in int8, and in two levels by node, must send; and what islands send.

Bytes are those that one device sends in a step; elements are those of one device. n: replicas.
docs/gradients.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

INT8_BLOCK = 256
"""Elements with one scale in common, of four bytes."""


def all_reduce(elements: float, n: int, element_bytes: float = 4) -> float:
    """Returns the bytes around a ring of n."""
    return 2 * (n - 1) / n * element_bytes * elements


def int8_half(arrays: Iterable[int], n: int) -> dict[str, float]:
    """Returns type -> bytes of a reduce-scatter in int8, or of an all-gather: an n-th of each array
    is padded to whole blocks.
    """
    blocks = sum(int8_blocks(elements, n) for elements in arrays)
    return {"s8": (n - 1) / n * INT8_BLOCK * blocks, "f32": (n - 1) / n * 4 * blocks}


def int8_blocks(elements: float, n: int) -> int:
    """Returns the blocks of an array whose n parts are padded to whole ones."""
    return n * math.ceil(math.ceil(elements / n) / INT8_BLOCK)


def by_node(
    arrays: Iterable[int], inner: int, outer: int, element_bytes: float = 4
) -> tuple[float, float]:
    """Returns the bytes inside nodes, and across nodes, of an all-reduce in two levels: an inner-th
    of each array is padded and summed across nodes.
    """
    padded = sum(inner * math.ceil(elements / inner) for elements in arrays)
    inside = all_reduce(padded, inner, element_bytes)
    return inside, all_reduce(padded / inner, outer, element_bytes)


def by_node_halves(
    arrays: Iterable[int], inner: int, outer: int, element_bytes: float = 4
) -> tuple[float, float]:
    """Returns the same of a reduce-scatter, or of an all-gather, of vectors that divide."""
    elements = sum(arrays)
    inside = (inner - 1) / inner * element_bytes * elements
    return inside, (outer - 1) / outer * element_bytes * elements / inner


def outer_step(elements: float, n: int, steps: int) -> float:
    """Returns the bytes on average over the steps between two outer ones (DiLoCo): the change of
    fp32 weights is all-reduced once in `steps`.
    """
    return all_reduce(elements, n) / steps


def top_k(elements: float, n: int, share: float) -> float:
    """Returns the bytes of an all-gather of the largest share of each replica's elements, with an
    index each: it grows with n.
    """
    return (n - 1) * share * elements * (4 + 4)


def power_sgd(rows: int, columns: int, rank: int, n: int) -> float:
    """Returns those of a matrix whose two factors, of `rank` columns, are all-reduced (arXiv
    1905.13727).
    """
    return all_reduce(rank * (rows + columns), n)
