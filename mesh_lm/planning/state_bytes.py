"""The bytes of a run's training state on one device, part by part.

They are computed from its declaration alone (`mesh_lm.state.parts`).
"""

from __future__ import annotations

import re
from collections import defaultdict
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
    """Returns the function that `compile_report` needs: path of an argument -> class of memory."""

    def kind(name: str) -> str:
        match = _PART.match(name)
        part = declared.get(match[1]) if match else None
        return _KINDS[part.kind] if part else kind_of_argument(name)

    return kind


def report_facts(declared: Mapping[str, StatePart]) -> tuple[tuple[str, str], ...]:
    """Returns a line for the report: the bytes of each part on one device, and its types."""
    texts = []
    for name, part in declared.items():
        if part.leaves:
            place = " on the host" if part.on_host else ""
            texts.append(f"{name} {size(part.nbytes)} {_types(part)}{place}")
    return (("state", ", ".join(texts)),)


def _types(part: StatePart) -> str:
    """Returns the types of a part's arrays, joined by "+", the one with the most bytes first."""
    nbytes: dict[str, int] = defaultdict(int)
    for leaf in part.leaves.values():
        nbytes[jnp.dtype(leaf.dtype).name] += leaf.nbytes
    names = sorted(nbytes, key=lambda name: -nbytes[name])
    return "+".join(_SHORT.get(name, name) for name in names)
