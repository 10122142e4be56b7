"""Differences between the supported versions of jax, in the parts that the kernels use.

There is one function for each difference. It looks at what jax has rather than at its version, so
that a version in between needs no line of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import jax
from jax import Array

_TESTED = ("0.10.", "0.11.", "0.12.")
"""Versions of jax whose kernels were read, interpreted on the CPU and compiled for an H100."""
SUPPORTED = f"jax {', '.join(version + 'x' for version in _TESTED)}"
"""The supported versions, for messages."""


def is_supported() -> bool:
    """Whether the kernels, and the interpreter of jax's internals, were tested with this jax."""
    return jax.__version__.startswith(_TESTED)


def load(ref: Any, **options: Any) -> Array:
    """An array in registers with the elements of a reference, which may be indexed with `.at`.

    Options are as for `plgpu.load`, which takes an index as its second argument before jax 0.12.
    """
    # Imported here, because only kernels load Mosaic.
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if "idx" in inspect.signature(plgpu.load).parameters:
        return plgpu.load(ref, (), **options)
    return plgpu.load(ref, **options)


def primitive_name(eqn: Any) -> str:
    """The name of an equation's primitive.

    Before jax 0.12, the names of some of Mosaic GPU's primitives end in `_p`.
    """
    return eqn.primitive.name.removesuffix("_p")


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values among the operands of a `scan`.

    jax 0.10 has both in the parameters; since 0.11 they are the lengths of the first two groups of
    a flat tree.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry = params["ft_in"].unpack()[:2]
    return len(consts), len(carry)
