"""Adafactor (Shazeer and Stern, arXiv 1804.04235): a second moment kept as its means over rows and over columns, and no first moment."""

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
"""The length from which a dimension is averaged over. optax's own 128 would leave attention with heads of 64 a whole second moment."""
SLOTS = ("v_row", "v_col", "v")


def factored(name: str, leaf: ArraySpec) -> tuple[int, int] | None:
    """The dimensions that v_row and v_col are means over: those that optax takes, the longest of one layer. None: v is kept whole."""
    if not is_matrix(name, leaf.axes):
        return None
    first = int(leaf.stacked)
    *_, shorter, longer = (first + int(dim) for dim in np.argsort(leaf.shape[first:]))
    return (longer, shorter) if leaf.shape[shorter] >= SHORTEST else None


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Without the paper's relative step sizes: the learning rate and the decay of AdamW fit, for a direction has an RMS of at most 1.

    beta1, beta2 and eps are not used: update t keeps 1 - t^-0.8 of the second moment, and 1e-30 is added to squared gradients.
    """

    config: OptimizerConfig
    elementwise: bool = False

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        dims = {name: factored(name, leaf) for name, leaf in leaves.items()}
        rows, columns = ({name: leaves[name].without(pair[i]) for name, pair in dims.items() if pair} for i in range(2))
        return {"v_row": rows, "v_col": columns, "v": {name: leaf for name, leaf in leaves.items() if not dims[name]}}

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:  # fmt: skip
        directions, after = {}, {slot: {} for slot in SLOTS}
        for name, grad in grads.items():
            kept = {slot: slots[slot][name] for slot in SLOTS if name in slots[slot]}
            # Layer by layer, because optax would take the layers for a dimension of the matrix, and clip all by their common RMS.
            update = jax.vmap(partial(_update, count)) if leaves[name].stacked else partial(_update, count)
            directions[name], new = update(grad, kept)
            for slot, value in new.items():
                after[slot][name] = value
        return directions, after


def _update(count: jax.Array, grad: jax.Array, kept: Params) -> tuple[jax.Array, Params]:
    """The direction of one array, and those of its slots that it has."""
    unused = jnp.zeros((1,), grad.dtype)  # what optax keeps in place of the slots that an array does not have
    state = optax.FactoredState(count, *(cast(Any, kept.get(slot, unused)) for slot in SLOTS))
    direction, after = optax.scale_by_factored_rms("v" not in kept, min_dim_size_to_factor=SHORTEST).update(grad, state, grad)
    direction, _ = optax.clip_by_block_rms(1.0).update(direction, optax.EmptyState())
    return cast(jax.Array, direction), {slot: cast(jax.Array, getattr(after, slot)) for slot in kept}
