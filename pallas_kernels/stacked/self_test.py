"""The self-test of our stacked matmul: which calls run the same kernel, and the comparison with
XLA's form in fp32 on a GPU.

Shape suffixes: R rows of the stack, T tokens, K and N the widths of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.grouped.plan import Plan
from pallas_kernels.stacked import hopper, xla
from pallas_kernels.stacked.plan import AddingPlan, plan_for, plan_to_add
from pallas_kernels.trust.kind import Kind

if TYPE_CHECKING:
    from pallas_kernels.stacked_matmul import StackedMatmulProblem

LIMIT = {"bfloat16": 6e-3, "float16": 1e-3}
"""Largest |ours - reference| as a share of the largest number of the same row: three times the
rounding of the result, or twice."""
EXACT = 1e-4
"""The same for sums that are not rounded: fp32 numbers are added in another order."""
RERUNS = 10
ROWS = 3
PERIOD = 3072
"""A multiple of all widths of tiles, with more tiles than SMs, and a contraction longer than the
buffers."""
Call = Callable[[Array, Array, Array, Array], Array]


def kind_of(problem: StackedMatmulProblem) -> Kind:
    """The kind of a problem that `mosaic` can serve. Tokens and widths are replaced by smaller ones
    with the same remainders.
    """
    T, K, N = problem.tokens, problem.K, problem.N
    if problem.form == "add":
        plan = plan_to_add(K, N, T)[0]
    else:
        plan = plan_for(T, *((K, N) if problem.form == "transposed" else (N, K)))[0]
    sizes = [size if size < 2 * PERIOD else PERIOD + size % PERIOD for size in (T, K, N)]
    facts = {
        "form": problem.form,
        "dtype": problem.dtype,
        "tile": [plan.height, plan.columns],
        "sizes": sizes,
        "rounded": problem.rounded,
    }
    return Kind.of("stacked_matmul", facts)


def faults(
    facts: dict[str, Any], say: Callable[[str], None], call: Call | None = None
) -> list[str]:
    """What is wrong with our kernel for a kind's facts: each difference from XLA's form in fp32, in
    other rows, and between reruns.

    say: called with "ready" after the reference is computed and with "compiled" before a kernel
    runs. call: a function to test instead of the kernel, (stack, row, x, y) -> result, where the
    stack is weights and y unused, or fp32 sums and y the gradient of the result.
    """
    (T, K, N), rng, form = facts["sizes"], np.random.default_rng(0), facts["form"]
    width, other = (N, K) if form == "transposed" else (K, N)
    stack, x, y = (
        rng.standard_normal(size, np.float32) for size in ((ROWS, K, N), (T, width), (T, other))
    )
    stack, x, y = (jnp.asarray(a, facts["dtype"]) for a in (stack, x, y))
    if form == "add":
        stack = stack.astype(jnp.float32)
    row, exact = jnp.int32(1), [a.astype(jnp.float32) for a in (x, y)]
    wanted = jax.block_until_ready(
        jax.jit(lambda *a: by_xla(form, *a))(stack.astype(jnp.float32), row, *exact)
    )
    say("ready")
    kernel = jax.jit(call or _ours(facts)).lower(stack, row, x, y).compile()
    say("compiled")
    found = [jax.block_until_ready(kernel(stack, row, x, y)) for _ in range(1 + RERUNS)]
    wrong = []
    limit = LIMIT[facts["dtype"]] if form != "add" or facts["rounded"] else EXACT
    mine, target = ([one[1] for one in found], wanted[1]) if form == "add" else (found, wanted)
    if not all(_close(one, target, limit) for one in mine):
        wrong.append("the result is too far from the reference")
    if form == "add" and not all((one[i] == stack[i]).all() for one in found for i in (0, 2)):
        wrong.append("a row that was not asked for has changed")
    if not all((one == found[0]).all() for one in found):
        wrong.append("the result differs when it is computed again")
    return [f"{fault} ({form}, T, K, N {[T, K, N]}, {facts['dtype']})" for fault in wrong]


def by_xla(form: str, stack: Array, row: Array, x: Array, y: Array) -> Array:
    """The result by XLA's form."""
    if form == "add":
        return xla.add(stack, row, x, y, rounded=False)
    return xla.product(x, stack, row, transposed=form == "transposed")


def _ours(facts: dict[str, Any]) -> Call:
    """The kernel with its plan."""
    form, (height, columns) = facts["form"], facts["tile"]
    if form == "add":
        return lambda stack, row, x, y: hopper.add(
            AddingPlan(columns, height=height), stack, row, x, y, rounded=facts["rounded"]
        )
    return lambda stack, row, x, y: hopper.product(
        Plan(columns, height=height), x, stack, row, transpose=form == "transposed"
    )


@jax.jit
def _close(found: Array, wanted: Array, limit: float) -> Array:
    """Whether each row's errors are at most `limit` of its largest number: nan is not close."""
    return (
        jnp.abs(found.astype(jnp.float32) - wanted)
        <= limit * jnp.abs(wanted).max(-1, keepdims=True)
    ).all()
