"""What differs between the supported versions of jax in the parts that the kernels use: one
function for each difference.

A function looks at what jax has rather than at its version, so that a version in between needs no
line of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
from jax import Array

_KNOWN = ("0.10.", "0.11.", "0.12.")
"""Versions of jax whose kernels were read, interpreted on the CPU and compiled for an H100."""
SUPPORTED = f"jax {', '.join(version + 'x' for version in _KNOWN)}"
"""The supported versions, for messages."""


def is_supported() -> bool:
    """Whether the kernels, and the interpreter that reads jax's internals, are known to work with
    this version of jax.
    """
    return jax.__version__.startswith(_KNOWN)


def load(ref: Any, **options: Any) -> Array:
    """An array in registers with the elements of a reference, which may be indexed with `.at`;
    options as for `plgpu.load`.

    Before jax 0.12, `plgpu.load` takes an index as its second argument.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu  # here: only kernels load Mosaic

    if "idx" in inspect.signature(plgpu.load).parameters:
        return plgpu.load(ref, (), **options)
    return plgpu.load(ref, **options)


def primitive_name(eqn: Any) -> str:
    """The name of an equation's primitive. Before jax 0.12, the names of some of Mosaic GPU's
    primitives end in `_p`.
    """
    return eqn.primitive.name.removesuffix("_p")


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """The number of constants and of carried values among the operands of a `scan`, from its
    parameters.

    jax 0.10 has the two numbers; since 0.11 they are the lengths of the first two groups of a flat
    tree.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry = params["ft_in"].unpack()[:2]
    return len(consts), len(carry)
