"""Muon with the momentum of its author's code, a rule for `optimizer.rule=FILE.py:JordanMuon`; see
muon_momentum.py.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from mesh_lm.optim import ArraySpecs, Muon, Params, Slots

_LATE = 1_000_000
"""A number of updates after which corrections of the bias are 1."""


@dataclasses.dataclass(frozen=True)
class JordanMuon(Muon):
    """Muon whose momentum is m = beta m + (1 - beta) g, and whose matrices are beta m + (1 - beta)
    g (github.com/KellerJordan/Muon).

    optax divides m and g by 1 - beta^(t + 1) and 1 - beta^t first. Newton-Schulz ignores the scale
    of a matrix, so that only their ratio matters: the two are the same in the first step, and again
    after some hundred steps.
    """

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        """Returns the directions and slots of `Muon.direction`, but those of matrices without the
        correction of the bias.
        """
        late = jnp.full_like(count, _LATE)
        directions, new_slots = super().direction(grads, slots, params, count=late, leaves=leaves)
        corrected, corrected_slots = super().direction(
            grads, slots, params, count=count, leaves=leaves
        )
        for name in slots["nu"]:
            directions[name] = corrected[name]
        # Slots do not depend on the count.
        return directions, {"mu": new_slots["mu"], "nu": corrected_slots["nu"]}
