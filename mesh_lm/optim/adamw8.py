"""AdamW with moments of one byte an element (as in Dettmers et al., arXiv 2110.02861, but with
linear levels): blocks of the last dimension share a scale.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from mesh_lm.errors import ConfigError
from mesh_lm.fields import option
from mesh_lm.optim.adamw import AdamW
from mesh_lm.optim.contract import ArraySpec, ArraySpecs, Params, Slots, is_matrix
from mesh_lm.optim.quantization import SHORTEST_BLOCK, dequantized, quantized, quantized_root

SMALLEST = 4096
"""Elements of the smallest matrix with 8-bit moments: smaller ones add nothing to speak of to
a model's memory."""


@dataclasses.dataclass(frozen=True)
class AdamW8:
    """AdamW whose matrices have an int8 first moment and the square root of the second in uint8.
    Vectors and small matrices have those of AdamW.

    The root, because it has half as many orders of magnitude as the second moment. Blocks and the
    choice of the matrices depend on the shape of a layer's parameter alone, neither on the mesh nor
    on the sharding, so that moments are the same bits on any mesh if gradients are.
    """

    elementwise: ClassVar[bool] = False
    by_layer: ClassVar[bool] = True
    """All moments at once, dequantized, would take the memory that 8 bits save."""
    beta1: float = option(0.9, least=0, below=1)
    """Decay rate of the first moment."""
    beta2: float = option(0.95, least=0, below=1)
    """Decay rate of the second moment."""
    eps: float = option(1e-8, above=0, below=math.inf, expert=True)
    """Added to the denominator."""
    block_size: int = option(32, least=SHORTEST_BLOCK, expert=True)
    """Elements of the last dimension that share a scale: the greatest common divisor of this and of
    the size of the dimension."""

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """Returns both moments in fp32 of the parameters that are not quantized, and levels and
        scales of the others.

        Raises ConfigError if large matrices would all have moments in fp32.
        """
        slots: dict[str, dict[str, ArraySpec]] = {
            slot: {} for slot in ("mu", "nu", "mu8", "mu_scale", "root8", "root_scale")
        }
        for name, leaf in leaves.items():
            block = self.block(name, leaf)
            if block is None:
                slots["mu"][name] = leaf
                slots["nu"][name] = leaf
                continue
            slots["mu8"][name] = leaf.like(jnp.dtype("int8"))
            slots["root8"][name] = leaf.like(jnp.dtype("uint8"))
            slots["mu_scale"][name] = leaf.blocked(block)
            slots["root_scale"][name] = leaf.blocked(block)
        large = [name for name, leaf in leaves.items() if _is_large(name, leaf)]
        if large and not slots["mu8"]:
            raise ConfigError(
                f"optimizer.rule.block_size={self.block_size}: no matrix would have 8-bit moments, "
                f"because none of their last dimensions, such as {leaves[large[0]].shape[-1]} of "
                f"{large[0]}, has a common divisor of {SHORTEST_BLOCK} or more with it; use a "
                "power of two, such as 32, or optimizer.rule=adamw"
            )
        return slots

    def block(self, name: str, leaf: ArraySpec) -> int | None:
        """Returns the elements of a parameter that share a scale; None: its moments are fp32."""
        if not _is_large(name, leaf):
            return None
        block = math.gcd(leaf.shape[-1], self.block_size)
        return block if block >= SHORTEST_BLOCK else None

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        """Returns Adam's direction for each parameter, from moments that are rounded only after it,
        and the slots after the step.
        """
        mu = dict(slots["mu"])
        nu = dict(slots["nu"])
        for name, levels in slots["mu8"].items():
            mu[name] = dequantized(levels, slots["mu_scale"][name])
            nu[name] = jnp.square(dequantized(slots["root8"][name], slots["root_scale"][name]))
        adamw = AdamW(self.beta1, self.beta2, self.eps)
        directions, moments = adamw.direction(
            grads, {"mu": mu, "nu": nu}, params, count=count, leaves=leaves
        )

        new_slots: Slots = {slot: {} for slot in slots}
        for slot in ("mu", "nu"):
            new_slots[slot] = {name: moments[slot][name] for name in slots[slot]}
        for name, scale in slots["mu_scale"].items():
            block = slots["mu8"][name].shape[-1] // scale.shape[-1]
            new_slots["mu8"][name], new_slots["mu_scale"][name] = quantized(
                moments["mu"][name], block
            )
            new_slots["root8"][name], new_slots["root_scale"][name] = quantized_root(
                jnp.sqrt(moments["nu"][name]), block
            )
        return directions, new_slots


def _is_large(name: str, leaf: ArraySpec) -> bool:
    """Returns whether a parameter is a matrix of at least SMALLEST elements."""
    # Of one layer, because stages pad the stack.
    n_elements = math.prod(leaf.shape[int(leaf.stacked) :])
    return is_matrix(name, leaf.axes) and n_elements >= SMALLEST
