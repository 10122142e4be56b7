"""Adafactor (Shazeer and Stern, arXiv 1804.04235): a second moment stored as its row and column
means, and no first moment.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mesh_lm.config import OptimizerConfig
from mesh_lm.optim.contract import ArraySpec, ArraySpecs, Params, Slots, is_matrix

SHORTEST = 32
"""The least size of both dimensions of a factored matrix. optax's default of 128 would not factor
attention with heads of 64."""
SLOTS = ("v_row", "v_col", "v")


def factored(name: str, leaf: ArraySpec) -> tuple[int, int] | None:
    """The dimensions that v_row and v_col are means over: the two longest of one layer, as in
    optax. None: v is not factored.
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

    beta1, beta2 and eps are not used: the second moment decays by 1 - t^-0.8 at update t, and 1e-30
    is added to squared gradients.
    """

    config: OptimizerConfig
    elementwise: bool = False

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """Mean squares of rows and of columns of the matrices, and of each element of the other
        parameters.
        """
        dims = {name: factored(name, leaf) for name, leaf in leaves.items()}
        rows, columns = (
            {name: leaves[name].without(pair[i]) for name, pair in dims.items() if pair}
            for i in range(2)
        )
        return {
            "v_row": rows,
            "v_col": columns,
            "v": {name: leaf for name, leaf in leaves.items() if not dims[name]},
        }

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        """Returns Adafactor's direction for each parameter, and the slots after the step (arXiv
        1804.04235).
        """
        directions, after = {}, {slot: {} for slot in SLOTS}
        for name, grad in grads.items():
            kept = {slot: slots[slot][name] for slot in SLOTS if name in slots[slot]}
            # Layer by layer, because optax would treat the layers as a dimension of the matrix, and
            # clip all of them by their common RMS.
            update = (
                jax.vmap(partial(_update, count))
                if leaves[name].stacked
                else partial(_update, count)
            )
            directions[name], new = update(grad, kept)
            for slot, value in new.items():
                after[slot][name] = value
        return directions, after


def _update(count: jax.Array, grad: jax.Array, kept: Params) -> tuple[jax.Array, Params]:
    """(the direction of one array, its updated slots)."""
    # optax's placeholder for slots that an array does not have
    unused = jnp.zeros((1,), grad.dtype)
    state = optax.FactoredState(count, *(cast(Any, kept.get(slot, unused)) for slot in SLOTS))
    direction, after = optax.scale_by_factored_rms(
        "v" not in kept, min_dim_size_to_factor=SHORTEST
    ).update(grad, state, grad)
    direction, _ = optax.clip_by_block_rms(1.0).update(direction, optax.EmptyState())
    return cast(jax.Array, direction), {
        slot: cast(jax.Array, getattr(after, slot)) for slot in kept
    }
