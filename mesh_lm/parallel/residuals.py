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
    """For each array that `residuals_of(*args)` returns, whether it depends on the first argument,
    an array.
    """
    jaxpr = jax.make_jaxpr(residuals_of)(*args).jaxpr
    return _reached(jaxpr, [True] + [False] * (len(jaxpr.invars) - 1))


def saved(pull: Any, save: Sequence[bool]) -> list[jax.Array]:
    """The residuals of a vjp function that `save` selects."""
    return [leaf for leaf, wanted in zip(jax.tree.leaves(pull), save, strict=True) if wanted]


def restored(pull: Any, save: Sequence[bool], residuals: Iterable[jax.Array]) -> Any:
    """A vjp function with `residuals`, saved from another call, in place of those that `save`
    selects.
    """
    leaves, structure = jax.tree.flatten(pull)
    from_forward = iter(residuals)
    return jax.tree.unflatten(
        structure,
        [
            next(from_forward) if was_saved else leaf
            for leaf, was_saved in zip(leaves, save, strict=True)
        ],
    )


def _reached(jaxpr: Any, inputs: Sequence[bool]) -> list[bool]:
    """For each output of a jaxpr, whether it depends on one of the inputs that are marked."""
    reached = {
        id(variable) for variable, marked in zip(jaxpr.invars, inputs, strict=True) if marked
    }
    for equation in jaxpr.eqns:
        operands = [id(operand) in reached for operand in equation.invars]
        if not any(operands):
            continue
        inner = (
            equation.params.get("jaxpr")
            if equation.primitive.name in ("jit", "pjit", "remat", "checkpoint", "closed_call")
            else None
        )
        inner = getattr(inner, "jaxpr", inner)
        if inner is not None and len(inner.invars) == len(operands):
            outputs = _reached(inner, operands)
        else:
            outputs = [True] * len(equation.outvars)
        reached.update(
            id(variable)
            for variable, marked in zip(equation.outvars, outputs, strict=True)
            if marked
        )
    return [id(variable) in reached for variable in jaxpr.outvars]
