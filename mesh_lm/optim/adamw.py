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
        """Returns both moments, each shaped like the parameter."""
        return {"mu": dict(leaves), "nu": dict(leaves)}

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        """Returns Adam's direction for each parameter, and the moments after the step (arXiv
        1412.6980).
        """
        rule = optax.scale_by_adam(self.config.beta1, self.config.beta2, self.config.eps)
        state = optax.ScaleByAdamState(count, cast(Any, slots["mu"]), cast(Any, slots["nu"]))
        direction, new_state = rule.update(cast(Any, grads), state)
        moments = cast(optax.ScaleByAdamState, new_state)
        return cast(Params, direction), {"mu": cast(Any, moments.mu), "nu": cast(Any, moments.nu)}
