"""Lion (Chen et al., arXiv 2302.06675): the sign of a mean of the momentum and the gradient."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, cast

import jax

from mesh_lm.fields import option
from mesh_lm.optim.contract import ArraySpec, ArraySpecs, Params, Slots


@dataclasses.dataclass(frozen=True)
class Lion:
    """Lion, with one slot shaped like the parameter. Every weight moves by the full learning rate,
    so its authors divide AdamW's by 3 to 10 and multiply weight_decay by the same factor; their
    betas are 0.9 and 0.99.
    """

    elementwise: ClassVar[bool] = True
    beta1: float = option(0.9, least=0, below=1)
    """Weight of the momentum where it is interpolated with the gradient."""
    beta2: float = option(0.95, least=0, below=1)
    """Decay rate of the momentum."""

    def slots(self, leaves: ArraySpecs) -> dict[str, dict[str, ArraySpec]]:
        """Returns one momentum, shaped like the parameter."""
        return {"mu": dict(leaves)}

    def direction(
        self, grads: Params, slots: Slots, params: Params, *, count: jax.Array, leaves: ArraySpecs
    ) -> tuple[Params, Slots]:
        """Returns the sign of gradient and momentum interpolated, and the momentum after the step
        (arXiv 2302.06675).
        """
        import optax  # here, so that configs load without it

        rule = optax.scale_by_lion(self.beta1, self.beta2)
        state = optax.ScaleByLionState(count, cast(Any, slots["mu"]))
        direction, new_state = rule.update(cast(Any, grads), state)
        momentum = cast(optax.ScaleByLionState, new_state).mu
        return cast(Params, direction), {"mu": cast(Params, momentum)}
