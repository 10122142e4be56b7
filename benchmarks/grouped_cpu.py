"""The grouped matmul on this CPU: its loop over blocks of one expert, beside what else computes the
same.

All forms compute the result, or the result and both gradients, of tokens sorted by expert; a fifth
of the buffer's rows has no expert. Each is timed in turns with the others, and its shortest time
counts: the clock and the neighbours of a shared machine change in between.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from record import Record, Row, options

from pallas_kernels.grouped import blocks, xla

USED = 0.8
"""The share of the rows that have an expert."""


class Form(NamedTuple):
    """The product of rows (transposed or not), and the weights' gradient."""

    rows: Callable[..., Any]
    weights: Callable[..., Any]


def masks(sizes: jax.Array, T: int) -> list[jax.Array]:
    """For each expert, whether a row is its own [T, 1]."""
    ends = jnp.cumsum(sizes)
    row = jnp.arange(T)[:, None]
    return [(row >= ends[e] - sizes[e]) & (row < ends[e]) for e in range(len(sizes))]


def dense_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """All rows times each expert's matrix, of which each row keeps one product."""
    w = jnp.swapaxes(w, 1, 2) if transposed else w
    y = jnp.zeros((len(x), w.shape[2]), x.dtype)
    for e, mask in enumerate(masks(sizes, len(x))):
        y = jnp.where(mask, x @ w[e], y)
    return y


def dense_weights(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    return jnp.stack(
        [jnp.where(mask, x, 0).T @ jnp.where(mask, dy, 0) for mask in masks(sizes, len(x))]
    )


def ragged_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    return lax.ragged_dot(x, jnp.swapaxes(w, 1, 2) if transposed else w, sizes)


def ragged_weights(x: jax.Array, dy: jax.Array, sizes: jax.Array) -> jax.Array:
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[],
    )
    return lax.ragged_dot_general(x, dy, sizes, numbers)


FORMS = {
    "blocks": Form(blocks.rows, blocks.weights),
    "cells": Form(xla.rows, xla.weights),
    "experts": Form(dense_rows, dense_weights),
    "ragged_dot": Form(ragged_rows, ragged_weights),
}
"""blocks: that of CPUs; cells: that of GPUs; experts: a loop over experts with all rows each."""


def shortest(
    calls: dict[str, Callable[..., Any]], arrays: tuple[jax.Array, ...], repeats: int
) -> dict[str, float]:
    """Milliseconds of each call; the calls take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            # The call before has left its own arrays in the caches and in the allocator.
            jax.block_until_ready(call(*arrays))
            began = time.perf_counter()
            jax.block_until_ready(call(*arrays))
            seconds[name].append(time.perf_counter() - began)
    return {name: 1e3 * min(times) for name, times in seconds.items()}


def measured(dtype: str, T: int, D: int, F: int, E: int, repeats: int) -> Row:
    rng = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((T, D), (E, D, F), (T, F))
    )
    shares = rng.dirichlet(np.full(E, 4.0))
    sizes = jnp.asarray(np.floor(USED * T * shares), jnp.int32)

    forward: dict[str, Callable[..., Any]] = {}
    both: dict[str, Callable[..., Any]] = {}
    for name, form in FORMS.items():

        def result(x: Any, w: Any, sizes: Any, form: Form = form) -> Any:
            return form.rows(x, w, sizes, transposed=False)

        def all_results(x: Any, w: Any, dy: Any, sizes: Any, form: Form = form) -> Any:
            dx = form.rows(dy, w, sizes, transposed=True)
            return form.rows(x, w, sizes, transposed=False), dx, form.weights(x, dy, sizes)

        forward[name] = jax.jit(result).lower(x, w, sizes).compile()
        both[name] = jax.jit(all_results).lower(x, w, dy, sizes).compile()

    expected = both["cells"](x, w, dy, sizes)
    found = both["blocks"](x, w, dy, sizes)
    error = max(
        float(jnp.abs((a - b).astype(jnp.float32)).max() / jnp.abs(b).max())
        for a, b in zip(found, expected, strict=True)
    )
    row: Row = {"dtype": dtype, "rows": T, "width_in": D, "width_out": F, "experts": E}
    forward_ms = shortest(forward, (x, w, sizes), repeats)
    both_ms = shortest(both, (x, w, dy, sizes), repeats)
    for name in FORMS:
        row[f"{name}_forward_ms"] = forward_ms[name]
        row[f"{name}_ms"] = both_ms[name]
    return row | {"difference": error}


def main() -> None:
    assert __doc__ is not None
    arguments = options(__doc__).parse_args()
    jax.config.update("jax_platforms", "cpu")
    shapes = [(4096, 256, 512, 8), (4096, 256, 512, 4), (4096, 128, 256, 32), (512, 64, 256, 8)]
    if arguments.quick:
        shapes = [(256, 16, 32, 4)]
    record = Record(f"grouped_cpu{'-quick' * arguments.quick}", arguments.output)
    rows = [
        measured(dtype, *shape, repeats=2 if arguments.quick else 10)
        for dtype in ("float32", "bfloat16")
        for shape in shapes
    ]
    record.table(
        "Grouped matmul on a CPU",
        rows,
        "Shortest milliseconds of the result (forward), and of the result and both gradients. "
        "blocks: `grouped_matmul` on a CPU; cells: on a GPU without kernels; experts: all rows times each "
        "expert's matrix. The difference is between blocks and cells, of the largest number.",
    )
    print(record.write())


if __name__ == "__main__":
    sys.exit(main())
