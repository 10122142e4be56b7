"""The self-test of our stacked matmul: a comparison with XLA's form in fp32 on a GPU.

Calls that run the same kernel are of one kind (`kind_of`), and each kind is tested once.

Shape suffixes: R rows of the stack, T tokens, K and N the widths of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
"""The limit for sums that are not rounded: fp32 numbers are added in another order."""
RERUNS = 10
ROWS = 3
PERIOD = 3072
"""A multiple of all widths of tiles, with more tiles than SMs, and a contraction longer than the
buffers."""
ROW = 1
"""The row of the stack that is used."""
Call = Callable[[Array, Array, Array, Array], Array]
"""(stack, row, x, y) -> result. The stack is weights and y unused, or the stack is fp32 sums and y
the gradient of the result."""


def kind_of(problem: StackedMatmulProblem) -> Kind:
    """The kind of a problem that `mosaic` can serve.

    Tokens and widths are replaced by smaller ones with the same remainders.
    """
    T = problem.tokens
    K = problem.K
    N = problem.N
    if problem.form == "add":
        plan, _ = plan_to_add(K, N, T)
    elif problem.form == "transposed":
        plan, _ = plan_for(T, K, N)
    else:
        plan, _ = plan_for(T, N, K)
    facts = {
        "form": problem.form,
        "dtype": problem.dtype,
        "tile": [plan.height, plan.columns],
        "sizes": [size if size < 2 * PERIOD else PERIOD + size % PERIOD for size in (T, K, N)],
        "rounded": problem.rounded,
    }
    return Kind.of("stacked_matmul", facts)


def faults(
    facts: dict[str, Any], say: Callable[[str], None], call: Call | None = None
) -> list[str]:
    """Returns the faults of our kernel for a kind's facts.

    A fault is a difference from XLA's form in fp32, in other rows, or between reruns.

    Args:
      say: called with "ready" after the reference is computed and with "compiled" before a kernel
        runs.
      call: a function to test instead of the kernel.
    """
    T, K, N = facts["sizes"]
    form = facts["form"]
    adds = form == "add"
    x_width, y_width = (N, K) if form == "transposed" else (K, N)
    rng = np.random.default_rng(0)
    sizes = ((ROWS, K, N), (T, x_width), (T, y_width))
    numbers = [rng.standard_normal(size, np.float32) for size in sizes]
    stack, x, y = (jnp.asarray(a, facts["dtype"]) for a in numbers)
    if adds:
        stack = stack.astype(jnp.float32)
    row = jnp.int32(ROW)
    exact = [a.astype(jnp.float32) for a in (x, y)]
    reference = jax.block_until_ready(
        jax.jit(partial(by_xla, form))(stack.astype(jnp.float32), row, *exact)
    )
    say("ready")
    kernel = jax.jit(call or _kernel(facts)).lower(stack, row, x, y).compile()
    say("compiled")

    results = [jax.block_until_ready(kernel(stack, row, x, y)) for _ in range(1 + RERUNS)]
    messages = []
    limit = EXACT if adds and not facts["rounded"] else LIMIT[facts["dtype"]]
    products = results
    if adds:
        products = [result[ROW] for result in results]
        reference = reference[ROW]
    if not all(_close(product, reference, limit) for product in products):
        messages.append("the result is too far from the reference")
    other_rows = [i for i in range(ROWS) if i != ROW]
    if adds and not all((result[i] == stack[i]).all() for result in results for i in other_rows):
        messages.append("a row that was not asked for has changed")
    if not all((result == results[0]).all() for result in results):
        messages.append("the result differs when it is computed again")
    return [f"{message} ({form}, T, K, N {[T, K, N]}, {facts['dtype']})" for message in messages]


def by_xla(form: str, stack: Array, row: Array, x: Array, y: Array) -> Array:
    """The result by XLA's form."""
    if form == "add":
        return xla.add(stack, row, x, y, rounded=False)
    return xla.product(x, stack, row, transposed=form == "transposed")


def _kernel(facts: dict[str, Any]) -> Call:
    """The kernel with its plan."""
    form = facts["form"]
    height, columns = facts["tile"]
    if form == "add":
        return lambda stack, row, x, y: hopper.add(
            AddingPlan(columns, height=height), stack, row, x, y, rounded=facts["rounded"]
        )
    return lambda stack, row, x, y: hopper.product(
        Plan(columns, height=height), x, stack, row, transpose=form == "transposed"
    )


@jax.jit
def _close(result: Array, reference: Array, limit: float) -> Array:
    """Whether each row's errors are at most `limit` of its largest number: nan is not close."""
    error = jnp.abs(result.astype(jnp.float32) - reference)
    return (error <= limit * jnp.abs(reference).max(-1, keepdims=True)).all()
