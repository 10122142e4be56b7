"""The self-test of our grouped matmul: which calls run the same kernels, and the comparison with
XLA's loop in fp32 on a GPU.

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


def kind_of(problem: GroupedMatmulProblem) -> Kind:
    """The kind of a problem that `mosaic` can serve. Tokens, groups and widths are replaced by
    smaller ones with the same remainders.
    """
    sizes, widths = balanced(problem.tokens, problem.groups), (problem.d_in, problem.d_out)
    plans = (
        plan_rows(sizes, problem.d_out),
        plan_rows(sizes, problem.d_in),
        plan_weights(sizes, *widths),
    )
    return Kind.of(
        "grouped_matmul",
        {
            "dtype": problem.dtype,
            "columns": [plan.columns for plan, _ in plans],
            "tokens": TOKENS + problem.tokens % 64,
            "widths": [
                width if width < 2 * PERIOD else PERIOD + width % PERIOD for width in widths
            ],
            "groups": min(problem.groups, 8),
        },
    )


def faults(
    facts: dict[str, Any], say: Callable[[str], None], product: Product | None = None
) -> list[str]:
    """What is wrong with our kernels for a kind's facts: each difference from XLA's loop in fp32,
    and between reruns.

    say: called with "ready" after the reference is computed and with "compiled" before a kernel
    runs. product: a function to test instead of the kernels, (x, w, dy, sizes) -> (y, dx, dw).
    """
    T, E, (D, F), rng = facts["tokens"], facts["groups"], facts["widths"], np.random.default_rng(0)
    x, w, dy = (
        jnp.asarray(rng.standard_normal(size), facts["dtype"])
        for size in ((T, D), (E, D, F), (T, F))
    )
    sizes = jnp.asarray(group_sizes(T, E), jnp.int32)
    wanted = jax.block_until_ready(
        jax.jit(by_xla)(*(a.astype(jnp.float32) for a in (x, w, dy)), sizes)
    )
    say("ready")
    kernels = (
        jax.jit(product or _ours([Plan(columns) for columns in facts["columns"]]))
        .lower(x, w, dy, sizes)
        .compile()
    )
    say("compiled")
    first = jax.block_until_ready(kernels(x, w, dy, sizes))
    found = [first, *(jax.block_until_ready(kernels(x, w, dy, sizes)) for _ in range(RERUNS))]
    wrong = []
    for i, name in enumerate(("the result", "the gradient of x", "the gradient of w")):
        if not all(_close(one[i], wanted[i], LIMIT[facts["dtype"]]) for one in found):
            wrong.append(f"{name} is too far from the reference")
        if not all((one[i] == first[i]).all() for one in found):
            wrong.append(f"{name} differs when it is computed again")
    return [f"{fault} (x {[T, D]}, w {[E, D, F]}, {facts['dtype']})" for fault in wrong]


def group_sizes(T: int, E: int) -> list[int]:
    """E sizes, of which one is 1 and one is 0 if there are enough; the last 20 tokens have no
    group.
    """
    small = [70, 0, 1][: E - 1]
    rest = T - 20 - sum(small)
    large = E - len(small)
    return [*small, *(rest // large + (i < rest % large) for i in range(large))]


def by_xla(x_TD: Array, w_EDF: Array, dy_TF: Array, sizes_E: Array) -> tuple[Array, Array, Array]:
    """The result and both gradients by XLA's loop."""
    y_TF = xla.rows(x_TD, w_EDF, sizes_E, transposed=False)
    return y_TF, xla.rows(dy_TF, w_EDF, sizes_E, transposed=True), xla.weights(x_TD, dy_TF, sizes_E)


def _ours(plans: list[Plan]) -> Product:
    """The three kernels with their plans."""

    def product(
        x_TD: Array, w_EDF: Array, dy_TF: Array, sizes_E: Array
    ) -> tuple[Array, Array, Array]:
        y_TF = hopper.rows(plans[0], x_TD, w_EDF, sizes_E, transpose=False)
        dx_TD = hopper.rows(plans[1], dy_TF, w_EDF, sizes_E, transpose=True)
        return y_TF, dx_TD, hopper.weights(plans[2], x_TD, dy_TF, sizes_E)

    return product


@jax.jit
def _close(found: Array, wanted: Array, limit: float) -> Array:
    """Whether each row's errors are at most `limit` of its largest number: 0 must be 0, and nan is
    not close.
    """
    return (
        jnp.abs(found.astype(jnp.float32) - wanted)
        <= limit * jnp.abs(wanted).max(-1, keepdims=True)
    ).all()
