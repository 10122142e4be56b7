"""The bytes of a run's training state on one device, part by part, computed from its declaration
alone (`mesh_lm.state.parts`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import jax.numpy as jnp

from mesh_lm.state import StatePart
from sharding_rules.lab.compile import kind_of_argument
from sharding_rules.lab.summary import size

_PART = re.compile(r"state\['([^']*)'\]\[")
_KINDS = {"params": "params", "optimizer": "moments", "gradients": "gradients"}
"""Column of the rules -> the lab's class of memory."""
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def kind_of(declared: Mapping[str, StatePart]) -> Callable[[str], str]:
    """Returns a function for `compile_report`: path of an argument of the training step -> the
    lab's class of memory.
    """

    def kind(name: str) -> str:
        match = _PART.match(name)
        part = declared.get(match[1]) if match else None
        return _KINDS[part.kind] if part else kind_of_argument(name)

    return kind


def report_facts(declared: Mapping[str, StatePart]) -> tuple[tuple[str, str], ...]:
    """Returns a line for the report: the bytes of each part on one device, and the types of its
    arrays.
    """
    return (
        (
            "state",
            ", ".join(
                f"{name} {size(part.nbytes)} {_types(part)}"
                for name, part in declared.items()
                if part.leaves
            ),
        ),
    )


def _types(part: StatePart) -> str:
    """The types of a part's arrays, joined by "+", the one with the most bytes first."""
    total: dict[str, int] = {}
    for leaf in part.leaves.values():
        name = jnp.dtype(leaf.dtype).name
        total[name] = total.get(name, 0) + leaf.nbytes
    return "+".join(_SHORT.get(name, name) for name in sorted(total, key=lambda name: -total[name]))
