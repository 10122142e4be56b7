"""AdamW (Loshchilov and Hutter, arXiv 1711.05101): first and second moments, m_hat / (sqrt(v_hat) +
eps).
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import optax

from mesh_lm.config import OptimizerConfig
from mesh_lm.optim.contract import ArraySpec, ArraySpecs, Params, Slots


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW, with two slots shaped like the parameter."""

    config: OptimizerConfig
    elementwise: bool = True

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """Both moments, each shaped like the parameter."""
        return {"mu": dict(leaves), "nu": dict(leaves)}

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        """Returns Adam's direction for each parameter, and the moments after the step (arXiv
        1412.6980).
        """
        c = self.config
        state = optax.ScaleByAdamState(count, cast(Any, slots["mu"]), cast(Any, slots["nu"]))
        direction, after = optax.scale_by_adam(c.beta1, c.beta2, c.eps).update(
            cast(Any, grads), state
        )
        after = cast(optax.ScaleByAdamState, after)
        return cast(Params, direction), {"mu": cast(Params, after.mu), "nu": cast(Params, after.nu)}
