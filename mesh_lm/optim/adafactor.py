"""Adafactor (Shazeer and Stern, arXiv 1804.04235): a second moment stored as its row and column
means, and no first moment.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from mesh_lm.optim.contract import ArraySpec, ArraySpecs, Params, Slots, is_matrix

SHORTEST = 32
"""The least size of both dimensions of a factored matrix. optax's default of 128 would not factor
attention with heads of 64."""
SLOTS = ("v_row", "v_col", "v")


def factored(name: str, leaf: ArraySpec) -> tuple[int, int] | None:
    """Returns the dimensions that v_row and v_col are means over: the two longest of one layer, as
    in optax. None: v is not factored.
    """
    if not is_matrix(name, leaf.axes):
        return None
    first = int(leaf.stacked)
    *_, shorter, longer = (first + int(dim) for dim in np.argsort(leaf.shape[first:]))
    return (longer, shorter) if leaf.shape[shorter] >= SHORTEST else None


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Adafactor without relative step sizes. A direction has an RMS of at most 1, so AdamW's
    learning rate and weight decay are suitable.

    It has no hyperparameters: the second moment decays by 1 - t^-0.8 at update t, and 1e-30 is
    added to squared gradients.
    """

    elementwise: ClassVar[bool] = False

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """Returns mean squares of rows and of columns of the matrices, and of each element of the
        other parameters.
        """
        slots: dict[str, dict[str, ArraySpec]] = {slot: {} for slot in SLOTS}
        for name, leaf in leaves.items():
            dims = factored(name, leaf)
            if dims is None:
                slots["v"][name] = leaf
            else:
                slots["v_row"][name] = leaf.without(dims[0])
                slots["v_col"][name] = leaf.without(dims[1])
        return slots

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        """Returns Adafactor's direction for each parameter, and the slots after the step (arXiv
        1804.04235).
        """
        directions: Params = {}
        new_slots: Slots = {slot: {} for slot in SLOTS}
        for name, grad in grads.items():
            array_slots = {slot: slots[slot][name] for slot in SLOTS if name in slots[slot]}
            update = partial(_update, count)
            if leaves[name].stacked:
                # Layer by layer, because optax would treat the layers as a dimension of the matrix,
                # and clip all of them by their common RMS.
                update = jax.vmap(update)
            directions[name], new_array_slots = update(grad, array_slots)
            for slot, value in new_array_slots.items():
                new_slots[slot][name] = value
        return directions, new_slots


def _update(count: jax.Array, grad: jax.Array, slots: Params) -> tuple[jax.Array, Params]:
    """Returns (the direction of one array, its updated slots)."""
    import optax  # here, so that configs load without it

    is_factored = "v" not in slots
    placeholder = jnp.zeros((1,), grad.dtype)  # optax's, for slots that an array does not have
    state = optax.FactoredState(count, *(cast(Any, slots.get(slot, placeholder)) for slot in SLOTS))
    rule = optax.scale_by_factored_rms(is_factored, min_dim_size_to_factor=SHORTEST)
    direction, new_state = rule.update(grad, state, grad)
    direction, _ = optax.clip_by_block_rms(1.0).update(direction, optax.EmptyState())
    new_slots = {slot: cast(jax.Array, getattr(new_state, slot)) for slot in slots}
    return cast(jax.Array, direction), new_slots
