"""The self-test of our grouped matmul: a comparison with XLA's loop in fp32 on a GPU.

Calls that run the same kernels are of one kind (`kind_of`), and each kind is tested once.

Shape suffixes: T tokens sorted by group, E groups, D width in, F width out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.grouped import hopper, xla
from pallas_kernels.grouped.plan import Plan, balanced, plan_rows, plan_weights
from pallas_kernels.trust.kind import Kind

if TYPE_CHECKING:
    from pallas_kernels.grouped_matmul import GroupedMatmulProblem

LIMIT = {"bfloat16": 6e-3, "float16": 1e-3}
"""Largest |ours - reference| as a share of the largest number of the same row: three times the
rounding of the result, or twice."""
RERUNS = 10
TOKENS = 16_384
"""Enough that a block of threads visits several tiles."""
PERIOD = 768
"""A multiple of all widths of tiles, and a contraction longer than the buffers."""
Product = Callable[[Array, Array, Array, Array], tuple[Array, Array, Array]]
"""(x, w, dy, sizes) -> (y, dx, dw)."""


def kind_of(problem: GroupedMatmulProblem) -> Kind:
    """The kind of a problem that `mosaic` can serve.

    Tokens, groups and widths are replaced by smaller ones with the same remainders.
    """
    sizes = balanced(problem.tokens, problem.groups)
    widths = (problem.d_in, problem.d_out)
    plans = (
        plan_rows(sizes, problem.d_out),
        plan_rows(sizes, problem.d_in),
        plan_weights(sizes, *widths),
    )
    test_widths = [width if width < 2 * PERIOD else PERIOD + width % PERIOD for width in widths]
    facts = {
        "dtype": problem.dtype,
        "columns": [plan.columns for plan, _ in plans],
        "tokens": TOKENS + problem.tokens % 64,
        "widths": test_widths,
        "groups": min(problem.groups, 8),
    }
    return Kind.of("grouped_matmul", facts)


def faults(
    facts: dict[str, Any], say: Callable[[str], None], product: Product | None = None
) -> list[str]:
    """Returns the faults of our kernels for a kind's facts.

    A fault is a difference from XLA's loop in fp32, or between reruns.

    Args:
      say: called with "ready" after the reference is computed and with "compiled" before a kernel
        runs.
      product: a function to test instead of the kernels.
    """
    T = facts["tokens"]
    E = facts["groups"]
    D, F = facts["widths"]
    dtype = facts["dtype"]
    rng = np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.standard_normal(size), dtype) for size in ((T, D), (E, D, F), (T, F))
    )
    sizes = jnp.asarray(group_sizes(T, E), jnp.int32)
    exact = [a.astype(jnp.float32) for a in (x, w, dy)]
    references = jax.block_until_ready(jax.jit(by_xla)(*exact, sizes))
    say("ready")
    if product is None:
        product = _kernels([Plan(columns) for columns in facts["columns"]])
    compiled = jax.jit(product).lower(x, w, dy, sizes).compile()
    say("compiled")

    runs = [jax.block_until_ready(compiled(x, w, dy, sizes)) for _ in range(1 + RERUNS)]
    messages = []
    for i, name in enumerate(("the result", "the gradient of x", "the gradient of w")):
        if not all(_close(run[i], references[i], LIMIT[dtype]) for run in runs):
            messages.append(f"{name} is too far from the reference")
        if not all((run[i] == runs[0][i]).all() for run in runs):
            messages.append(f"{name} differs when it is computed again")
    return [f"{message} (x {[T, D]}, w {[E, D, F]}, {dtype})" for message in messages]


def group_sizes(T: int, E: int) -> list[int]:
    """E sizes, of which one is 1 and one is 0 if there are enough.

    The last 20 tokens have no group.
    """
    small = [70, 0, 1][: E - 1]
    return [*small, *balanced(T - 20 - sum(small), E - len(small))]


def by_xla(x_TD: Array, w_EDF: Array, dy_TF: Array, sizes_E: Array) -> tuple[Array, Array, Array]:
    """The result and both gradients by XLA's loop."""
    y_TF = xla.rows(x_TD, w_EDF, sizes_E, transposed=False)
    dx_TD = xla.rows(dy_TF, w_EDF, sizes_E, transposed=True)
    return y_TF, dx_TD, xla.weights(x_TD, dy_TF, sizes_E)


def _kernels(plans: list[Plan]) -> Product:
    """The three kernels with their plans."""

    def product(
        x_TD: Array, w_EDF: Array, dy_TF: Array, sizes_E: Array
    ) -> tuple[Array, Array, Array]:
        y_TF = hopper.rows(plans[0], x_TD, w_EDF, sizes_E, transpose=False)
        dx_TD = hopper.rows(plans[1], dy_TF, w_EDF, sizes_E, transpose=True)
        return y_TF, dx_TD, hopper.weights(plans[2], x_TD, dy_TF, sizes_E)

    return product


@jax.jit
def _close(result: Array, reference: Array, limit: float) -> Array:
    """Whether each row's errors are at most `limit` of its largest number.

    0 must be 0, and nan is not close.
    """
    error = jnp.abs(result.astype(jnp.float32) - reference)
    return (error <= limit * jnp.abs(reference).max(-1, keepdims=True)).all()
