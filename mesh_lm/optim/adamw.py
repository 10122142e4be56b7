"""AdamW (Loshchilov and Hutter, arXiv 1711.05101): first and second moments, m_hat / (sqrt(v_hat) +
eps).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, cast

import jax

from mesh_lm.fields import option
from mesh_lm.optim.contract import ArraySpec, ArraySpecs, Params, Slots


@dataclasses.dataclass(frozen=True)
class AdamW:
    """AdamW, with two slots shaped like the parameter."""

    elementwise: ClassVar[bool] = True
    beta1: float = option(0.9, least=0, below=1)
    """Decay rate of the first moment."""
    beta2: float = option(0.95, least=0, below=1)
    """Decay rate of the second moment."""
    # 0 would give 0 / 0 for zero gradients, such as those of padded rows.
    eps: float = option(1e-8, above=0, below=math.inf, expert=True)
    """Added to the denominator."""

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """Returns both moments, each shaped like the parameter."""
        return {"mu": dict(leaves), "nu": dict(leaves)}

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        """Returns Adam's direction for each parameter, and the moments after the step (arXiv
        1412.6980).
        """
        import optax  # here, so that configs load without it

        rule = optax.scale_by_adam(self.beta1, self.beta2, self.eps)
        state = optax.ScaleByAdamState(count, cast(Any, slots["mu"]), cast(Any, slots["nu"]))
        direction, new_state = rule.update(cast(Any, grads), state)
        moments = cast(optax.ScaleByAdamState, new_state)
        return cast(Params, direction), {"mu": cast(Any, moments.mu), "nu": cast(Any, moments.nu)}
