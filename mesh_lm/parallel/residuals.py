"""Which residuals of a vjp function are saved for the backward pass, and which are computed again.

A vjp function is a pytree whose leaves are its residuals. `jax.vjp` of the same function yields
them in the same order each time, so those that one call saved can replace those of another, and XLA
removes the computations that made the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax


def depends_on_first(residuals_of: Callable[..., Sequence[jax.Array]], *args: Any) -> list[bool]:
    """Returns, for each array that `residuals_of(*args)` returns, whether it depends on the first
    argument, an array.
    """
    jaxpr = jax.make_jaxpr(residuals_of)(*args).jaxpr
    return _depends(jaxpr, [True] + [False] * (len(jaxpr.invars) - 1))


def saved(pull: Any, save: Sequence[bool]) -> list[jax.Array]:
    """Returns the residuals of a vjp function that `save` selects."""
    residuals = zip(jax.tree.leaves(pull), save, strict=True)
    return [residual for residual, is_saved in residuals if is_saved]


def restored(pull: Any, save: Sequence[bool], residuals: Iterable[jax.Array]) -> Any:
    """Returns a vjp function with `residuals`, saved from another call, in place of its own that
    `save` selects.
    """
    leaves, structure = jax.tree.flatten(pull)
    saved_residuals = iter(residuals)
    restored_leaves = [
        next(saved_residuals) if is_saved else leaf
        for leaf, is_saved in zip(leaves, save, strict=True)
    ]
    return jax.tree.unflatten(structure, restored_leaves)


def _depends(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """Returns, for each output of a jaxpr, whether it depends on an input that is marked."""
    dependent = {id(x) for x, is_marked in zip(jaxpr.invars, inputs, strict=True) if is_marked}
    for equation in jaxpr.eqns:
        operands = [id(operand) in dependent for operand in equation.invars]
        if not any(operands):
            continue
        outputs = [True] * len(equation.outvars)
        # A call is looked into: not all of its results depend on all of its operands.
        if equation.primitive.name in ("jit", "pjit", "remat", "checkpoint", "closed_call"):
            inner = equation.params.get("jaxpr")
            inner = getattr(inner, "jaxpr", inner)
            if inner is not None and len(inner.invars) == len(operands):
                outputs = _depends(inner, operands)
        for variable, is_dependent in zip(equation.outvars, outputs, strict=True):
            if is_dependent:
                dependent.add(id(variable))
    return [id(variable) in dependent for variable in jaxpr.outvars]
