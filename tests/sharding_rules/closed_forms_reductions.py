"""What sums of gradients in int8, and in two levels by node, must send, on paper. Pure arithmetic,
as in closed_forms.py.

Bytes are those that one device sends in a step; elements are those of one device. n: replicas.
docs/gradients.md has the formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

BLOCK = 256
"""Elements with one scale in common, of four bytes."""


def all_reduce(elements: float, n: int, each: float = 4) -> float:
    """Around a ring of n."""
    return 2 * (n - 1) / n * each * elements


def int8_half(arrays: Iterable[int], n: int) -> dict[str, float]:
    """Type -> bytes of a reduce-scatter in int8, or of an all-gather: an n-th of each array is
    padded to whole blocks."""
    blocks = sum(n * math.ceil(math.ceil(elements / n) / BLOCK) for elements in arrays)
    return {"s8": (n - 1) / n * BLOCK * blocks, "f32": (n - 1) / n * 4 * blocks}


def by_node(arrays: Iterable[int], inner: int, outer: int, each: float = 4) -> tuple[float, float]:
    """(inside nodes, across nodes) of an all-reduce in two levels: an inner-th of each array is
    padded and summed across nodes."""
    padded = sum(inner * math.ceil(elements / inner) for elements in arrays)
    return all_reduce(padded, inner, each), all_reduce(padded / inner, outer, each)


def by_node_halves(
    arrays: Iterable[int], inner: int, outer: int, each: float = 4
) -> tuple[float, float]:
    """The same of a reduce-scatter, or of an all-gather, of vectors that divide."""
    elements = sum(arrays)
    return (inner - 1) / inner * each * elements, (outer - 1) / outer * each * elements / inner


def outer_step(elements: float, n: int, steps: int) -> float:
    """On average over the steps between two outer ones (DiLoCo): the change of fp32 weights is
    all-reduced once in `steps`."""
    return all_reduce(elements, n) / steps


def top_k(elements: float, n: int, share: float) -> float:
    """An all-gather of the largest share of each replica's elements, with an index each: it grows
    with n."""
    return (n - 1) * share * elements * (4 + 4)


def power_sgd(rows: int, columns: int, rank: int, n: int) -> float:
    """Of a matrix: two factors, of `rank` columns, are all-reduced (arXiv 1905.13727)."""
    return all_reduce(rank * (rows + columns), n)
